"""The live cell in JupyterLab, from the first tick to the notebook that is opened again without its kernel."""

import json
import time

import nbformat
import pytest
from playwright.sync_api import TimeoutError

SETUP = """
import art_nb as art
import art_nb.panels.live_cell

async def rollout(model, scenario):
    messages = [{{"role": "user", "content": f"free: {{scenario}}"}}]
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=4, logprobs=True)
    reward = reply.choices[0].model_extra["token_ids"][0] % 7
    return art.Trajectory(messages_and_choices=[*messages, reply.choices[0]], reward=reward)

model = art.TrainableModel(name="tiny", project="tests", base_model={model!r})
await model.register(art.LocalBackend(path={path!r}, verbose=False))
"""
TRAIN = "run = art.train(model, rollout, range(9), steps=100_000, groups_per_step=2, rollouts_per_group=4)"


def button(notebook, name):
    return notebook.page.get_by_role("button", name=name, exact=True)


def until(condition, timeout_s=120):
    """Wait for something in Python."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.05)


def state(notebook, name, timeout_s=120):
    """Wait until the cell shows a state."""
    notebook.page.wait_for_selector(f".art-state[data-state={name}]", timeout=timeout_s * 1000)


@pytest.mark.timeout(600)
def test_from_the_first_tick_to_the_reopened_notebook(lab, tiny_model_dir, tmp_path):
    nb = lab(
        [
            SETUP.format(model=str(tiny_model_dir), path=str(tmp_path)),
            TRAIN,
            "print(run.status, run.step)",
            "art.Run.attach(model.store.path)",
        ]
    )
    nb.run(0, 120)
    nb.run(1)
    state(nb, "running")
    nb.page.wait_for_selector(".art-curve canvas")
    nb.page.wait_for_selector(".art-group")

    button(nb, "Pause").click()
    state(nb, "paused")
    paused_at = nb.page.locator(".art-live-head").inner_text()
    nb.page.wait_for_timeout(1500)
    assert nb.page.locator(".art-live-head").inner_text() == paused_at
    assert not nb.page.locator(".art-state[data-state=lost]").count()
    nb.page.locator(".art-group").last.click()
    nb.page.wait_for_selector(".art-group.art-open")
    nb.page.wait_for_selector(".art-reader")  # the viewer, in the same cell, below
    assert nb.cell(1).locator(".art-reader").count() == 1
    button(nb, "Close the open group").click()
    nb.page.wait_for_selector(".art-reader", state="detached")

    button(nb, "Resume").click()
    state(nb, "running")
    button(nb, "Stop after step").click()
    nb.page.wait_for_selector(".art-panel", state="detached")
    nb.run(2)
    nb.cell(2).locator(".jp-OutputArea >> text=stopped").first.wait_for()  # JupyterLab draws outputs after their cells
    assert nb.text(2).startswith("stopped")
    nb.cell(1).locator(".jp-OutputArea >> text=stopped").first.wait_for()
    frozen = nb.text(1)
    assert "tiny" in frozen and "stopped" in frozen

    saved = nb.save()
    nbformat.validate(saved)
    assert "widgets" not in saved["metadata"]
    kinds = [set(out["data"]) for out in saved["cells"][1]["outputs"] if "data" in out]
    assert all("application/vnd.jupyter.widget-view+json" not in kind for kind in kinds)
    assert "<script" not in json.dumps(saved["cells"][1])
    assert "stopped" in json.dumps(saved["cells"][1]["outputs"])

    nb.page.reload()
    nb.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=120_000)
    nb.cell(1).locator(".jp-OutputArea >> text=stopped").first.wait_for()  # JupyterLab draws outputs after their cells
    assert "stopped" in nb.text(1)
    assert "Error displaying widget" not in nb.page.locator(".jp-Notebook").inner_text()


@pytest.mark.timeout(600)
def test_a_run_named_again_moves_and_a_dead_one_is_attached(lab, tiny_model_dir, tmp_path):
    home = str(tmp_path / "tests/models/tiny")
    attach = (
        f"import art_nb as art\nfrom art_nb.panels.live_cell import display_run\ndisplay_run(art.Run.attach({home!r}))"
    )
    again = "from art_nb.panels.live_cell import display_run\ndisplay_run(run)"
    nb = lab([SETUP.format(model=str(tiny_model_dir), path=str(tmp_path)), TRAIN, again, attach])
    nb.run(0, 120)
    nb.run(1)
    state(nb, "running")
    nb.run(2)
    nb.cell(1).get_by_text("The run was still active when this output was saved.").wait_for()
    nb.cell(2).locator(".art-panel").wait_for()
    nb.page.wait_for_function("document.querySelectorAll('.art-panel').length === 1")
    assert "The run was still active when this output was saved." in nb.text(1)
    assert nb.cell(2).locator(".art-panel").count() == 1
    nb.page.wait_for_function(
        "parseInt(document.querySelector('.art-live-head').innerText.match(/step (\\d+)/)[1]) > 2"
    )

    nb.page.get_by_role("menuitem", name="Kernel").click()
    nb.page.get_by_role("menuitem", name="Restart Kernel…", exact=False).first.click()
    nb.page.get_by_role("button", name="Confirm Kernel Restart").click()
    nb.page.wait_for_selector(".art-state[data-state=lost]", timeout=120_000)
    nb.idle()
    nb.run(3, 60)
    nb.page.wait_for_selector(".art-state[data-state=dead]", timeout=120_000)
    assert "train again with the same name" in nb.text(3)
    nb.page.wait_for_selector(".art-curve canvas")


@pytest.mark.timeout(600)
def test_a_run_that_its_cell_awaits_is_shown_once(lab, tiny_model_dir, tmp_path):
    train = TRAIN.replace("100_000", "2") + "\nawait run"
    nb = lab([SETUP.format(model=str(tiny_model_dir), path=str(tmp_path)), train, "run", "run.groups[-1]"])
    nb.run(0, 120)
    nb.run(1, 120)
    nb.cell(1).get_by_text("done at step 2 of 2").first.wait_for()
    assert nb.cell(1).get_by_text("done at step 2 of 2").count() == 1
    assert nb.cell(1).locator(".art-panel").count() == 0  # no live one beside the frozen
    nb.run(2, 60)
    nb.run(3, 60)
    nb.page.wait_for_selector(".art-state[data-state=done]")  # the live cell and the viewer in one page
    bar = nb.cell(3).locator(".art-bar").first
    bar.wait_for()
    assert bar.bounding_box()["height"] > 30


def kept(saved):
    """The static forms that a notebook holds for live panels."""
    outputs = [out for cell in saved["cells"] for out in cell.get("outputs", [])]
    return ["".join(out["data"]["text/html"]) for out in outputs if out.get("metadata", {}).get("art_nb")]


def drawn_steps(notebook):
    """Which steps the reward's curve shows, in words."""
    return notebook.page.locator(".art-curve").first.get_attribute("aria-label")


def reload_until_connected(notebook, attempts=3):
    """Reload the page until the panel has its history. On a busy machine, Jupyter's widget manager may not connect."""
    for _ in range(attempts):
        notebook.reload()
        state(notebook, "running", 30)
        try:
            notebook.page.wait_for_selector(".art-panel .art-curve", timeout=20_000)
            return
        except TimeoutError:
            continue
    raise AssertionError(f"The panel had no history after {attempts} reloads.")


@pytest.mark.timeout(300)
def test_a_page_that_is_reloaded_or_closed_loses_nothing(lab, tiny_model_dir, tmp_path):
    run, again = tmp_path / "tests/models/tiny", TRAIN.replace("run = ", "again = ")
    nb = lab([SETUP.format(model=str(tiny_model_dir), path=str(tmp_path)), TRAIN, again])
    nb.run(0, 120)
    nb.run(1)
    state(nb, "running")
    nb.page.wait_for_selector(".art-group")
    saved = nb.save()
    nbformat.validate(saved)
    assert "The run was still active when this output was saved" in kept(saved)[0]
    assert "widgets" not in saved["metadata"] and "widget-view" not in json.dumps(saved["cells"][1]["outputs"])

    nb.reload()  # during the run: it is live again
    state(nb, "running")
    nb.leave()
    (run / "STOP").touch()  # the run ends while no page is open
    until(lambda: json.loads((run / "run.json").read_text())["status"] == "stopped")
    nb.open()
    nb.cell(1).get_by_text("stopped at step").wait_for()
    assert not nb.page.locator(".art-panel").count()
    saved = nb.save()
    assert not kept(saved)
    assert "stopped at step" in json.dumps(saved["cells"][1]["outputs"])

    nb.run(2)
    state(nb, "running")
    until(lambda: drawn_steps(nb) != "Reward by step: nothing yet")  # those of the session before
    nb.save()
    reload_until_connected(nb)
    button(nb, "Stop after step").click()
    nb.page.wait_for_selector(".art-panel", state="detached")  # the page that was reloaded shows the static form
    nb.cell(2).get_by_text("stopped at step").wait_for()
    saved = nb.save()
    nbformat.validate(saved)
    assert not kept(saved)
    assert "widget-view" not in json.dumps([cell["outputs"] for cell in saved["cells"][1:]])

    nb.run(1)
    state(nb, "running")
    nb.save()
    nb.leave()
    nb.end_kernel()  # the run dies, and nobody has seen its end
    nb.open()
    nb.cell(1).get_by_text("The run was still active when this output was saved").wait_for()
    nb.cell(2).get_by_text("stopped at step").wait_for()
    assert "Error displaying widget" not in nb.text(1) + nb.text(2)  # cell 0 may hold a progress bar of transformers
