"""The failures panel in Chromium, on the real panel and a run on disk."""

import json
import time
from pathlib import Path

import pytest
from support.ui import HOSTILE, axe_faults, calm, waits
from support.view_parts import CALLS, Talk, crowd, games

import art_nb as art
from art_nb.cli.main import main
from art_nb.panels.failures_panel import FailuresPanel
from art_nb.reports.static_failures import static_failures
from art_nb.views.failures import KINDS, MAX_LISTED

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"required": ["query"]}}}]


def failing_steps():
    """Two steps with every kind of failure."""
    cut = Talk(1).add("user", "Count.").say("1 2 3", finish="length").end(0.5)
    call = Talk(2).add("user", "Look.").say("I look", tool_calls=CALLS).end(0.25)
    call.tools = TOOLS
    plain = art.Trajectory(messages_and_choices=[{"role": "assistant", "content": "typed"}], reward=1.0)
    errors = [ValueError(f"no number in 'line {n}' at 0x{n}f") for n in range(5)]
    return {
        1: [art.TrajectoryGroup([cut, call, plain, *errors[:2]], metadata={"scenario_id": "mixed"})],
        2: [games(1, 4, reward=0.75), games(2, 3, failed=1), art.TrajectoryGroup([plain, cut, *errors[2:]])],
    }


@pytest.fixture
def opened(page_with):
    """Open the panel and wait until everything is read."""

    def open_panel(what, **options):
        panel = FailuresPanel(what)
        page = page_with(panel, **options)
        page.wait_for_function(f"document.querySelectorAll('.art-f-kind').length == {len(KINDS)}")
        page.wait_for_function("!document.querySelector('.art-f-bar').textContent.includes('reading')")
        calm(page)
        page.panel = panel
        return page

    return open_panel


def row(page, text):
    return page.locator(".art-f-row", has_text=text)


def test_counts_shares_and_steps(opened, tmp_path):
    store = art.RunStore(tmp_path / "run")
    for step, groups in failing_steps().items():
        store.write_groups("train", step, groups)
    for what in (store, failing_steps()):
        page = opened(what)
        text = row(page, "ValueError: no number in '…' at 0x…").inner_text().split("\n")
        assert text[1:] == ["5 rollouts", "28 %"]
        label = row(page, "ValueError").locator("[role=img]").get_attribute("aria-label")
        assert label == "step 1: 2 of 5; step 2: 3 of 13"
        assert row(page, "all rewards are 0.75").inner_text().split("\n")[1] == "4 rollouts"
        assert row(page, "there is no tool 'evaluate'").count() == 1
        assert row(page, "the reply reached the token limit").inner_text().split("\n")[1] == "2 rollouts"
        advice = row(page, "no choice").inner_text()
        assert "Append response.choices[0]" in advice
        head = page.locator(".art-f-kind", has_text="Groups without signal").locator(".art-f-head")
        assert head.inner_text().split("\n")[-2:] == ["1 group", "25 %"]


def test_the_share_of_groups_without_signal_is_one_of_groups():
    """Failed rollouts have no reward, and are not counted in it."""
    flat = art.TrajectoryGroup([art.Trajectory(reward=0.0), art.Trajectory(reward=0.0), ValueError("x")])
    assert "2 groups (100 %)" in static_failures([flat, flat])
    assert "Groups without signal: 2 of 2 groups\n    all rewards are 0: 2" in str(art.failures([flat, flat]))


def test_a_rollout_that_calls_none_of_its_tools_is_listed():
    silent = Talk(3).add("user", "Look.").say("I do not know").end(0.5)
    without = silent.model_copy(update={"tools": None})
    silent.tools = TOOLS
    text = str(art.failures([art.TrajectoryGroup([silent, without])]))
    assert "Rollouts without a tool call: 1 of 2 rollouts\n    no call of look_up: 1" in text


def test_failures_of_an_evaluation_name_their_split(tmp_path):
    store = art.RunStore(tmp_path / "run")
    for split, errors in (("train", 1), ("val", 2)):
        store.write_groups(split, 1, [art.TrajectoryGroup([art.Trajectory(), *[ValueError("full")] * errors])])
    text = str(art.failures(store))
    assert ": 2 rollouts in training, 3 in the evaluation of step 1\n" in text
    assert "Exceptions: 1 of 2 rollouts, 2 of 3 in the evaluation of step 1\n" in text
    assert "Truncated replies: 0 of 2 rollouts" in text.splitlines()  # without failures, there is one count
    assert "    ValueError: full (val): 2, for example in step 1 of val\n" in text
    assert "    ValueError: full: 1, for example in step 1 of train\n" in text


def failed(text, count):
    """A group with one finished rollout and failed ones."""
    return art.TrajectoryGroup([art.Trajectory(), *[ValueError(text)] * count])


def test_of_the_evaluations_only_the_newest_one_counts(tmp_path, capsys):
    store = art.RunStore(tmp_path / "run")
    store.write_groups("val", 0, [failed("full", 9)])
    panel = FailuresPanel(store)
    assert "Exceptions: 9 of 10 rollouts\n" in str(panel)  # without training, the shares are those of the evaluation
    store.write_groups("train", 1, [failed("full", 1)])
    store.write_groups("val", 1, [failed("full", 3)])
    panel.refresh()
    left_out = "10 of earlier evaluations are left out (all_evaluations=True counts them)"
    for text in (str(panel), str(art.failures(store))):
        assert f": 2 rollouts in training, 4 in the evaluation of step 1. {left_out}\n" in text
        assert "Exceptions: 1 of 2 rollouts, 3 of 4 in the evaluation of step 1\n" in text
        assert "    ValueError: full (val): 3, for example in step 1 of val\n" in text
    reply = panel.failures()[0]
    assert reply["steps"] == ["1"] and reply["evaluation_steps"] == [4] and reply["rollouts"] == 6
    assert left_out in panel.html() and "3 of 4 in the evaluation of step 1" in panel.html()
    text = str(art.failures(store, all_evaluations=True))
    assert ": 2 rollouts in training, 14 in all evaluations\n" in text
    assert "Exceptions: 1 of 2 rollouts, 12 of 14 in all evaluations\n" in text
    assert "12 of 14 in all evaluations" in art.failures(store, all_evaluations=True).html()
    for options in ([], ["--all-evaluations"]):
        assert main(["failures", str(store.path), *options]) == 0
        assert capsys.readouterr().out == f"{art.failures(store, all_evaluations=bool(options))}\n"


def test_discarded_groups_are_not_an_evaluation(tmp_path):
    """The asynchronous trainer logs groups that it does not train on with the split `discarded`."""
    store = art.RunStore(tmp_path / "run")
    for step in (1, 2):
        for split in ("train", "discarded"):
            store.write_groups(split, step, [failed("full", 1)])
    text = str(art.failures(store))
    assert ": 8 rollouts\n" in text and "Exceptions: 4 of 8 rollouts\n" in text
    assert "    ValueError: full (discarded): 2, for example in step 2 of discarded\n" in text


def test_a_newest_evaluation_that_cannot_be_read_is_named(tmp_path):
    store = art.RunStore(tmp_path / "run")
    for step in (0, 1):
        store.write_groups("val", step, [failed("full", 3)])
    (store.path / "trajectories" / "val" / "0001.parquet").write_bytes(b"no parquet")
    panel = FailuresPanel(store)
    assert ": 0 rollouts in training. 4 of earlier evaluations are left out" in str(panel)
    assert "step 1 of val" in panel.failures()[0]["lost"][0]


def test_the_share_of_an_evaluation_is_one_of_its_rollouts(opened, tmp_path):
    store = art.RunStore(tmp_path / "run")
    store.write_groups("train", 1, [failed("full", 1)])
    store.write_groups("val", 2, [failed("full", 3)])
    page = opened(store)
    assert page.inner_text(".art-f-bar .art-grow").startswith("2 rollouts in training, 4 in the evaluation of step 2")
    assert row(page, "ValueError: full (val)").inner_text().split("\n")[1:] == ["3 rollouts", "75 %"]
    label = row(page, "ValueError: full (val)").locator("[role=img]").get_attribute("aria-label")
    assert label == "step 2: 3 of 4"
    head = page.locator(".art-f-kind", has_text="Exceptions").locator(".art-f-head")
    assert head.inner_text().split("\n")[-2:] == ["1 rollout", "50 %"]
    assert "Also 3 of 4 in the evaluation of step 2." in head.inner_text()
    assert KINDS["exception"].advice in head.inner_text()
    assert KINDS["truncated"].advice not in page.inner_text(".art-failures")  # there is no truncated reply


def test_groups_without_signal_come_before_rarer_and_equally_frequent_failures(opened):
    cut, whole = (Talk(1).add("user", "Count.").say("1 2 3", finish=finish).end(0.0) for finish in ("length", "stop"))
    for rollouts in ([cut, cut, cut, whole], [cut, cut]):
        text = str(art.failures([art.TrajectoryGroup(rollouts)]))
        assert text.index("Groups without signal: 1 of 1 group\n") < text.index("Truncated replies: ")
        assert f"    What to do: {KINDS['no_signal'].advice}\n" in text
    page = opened([art.TrajectoryGroup([cut, cut, cut, whole])])
    titles = page.locator(".art-f-name").all_inner_texts()
    assert titles[:2] == ["Groups without signal", "Truncated replies"]
    html = page.panel.html()
    assert html.index("Groups without signal") < html.index("Truncated replies")
    assert html.count("What to do: ") == 2 and "<code>max_completion_tokens</code>" not in html


def test_errors_of_tools_are_listed(tmp_path):
    results = [
        '{"error": "no page 12"}',
        '{"error": "no page 13"}',
        "ERROR: no page 12",
        "An error occurred: no page 12",
        "KeyError: 'page'",
        '"Error: no page 12"',
        '"Error: no page',
        '{"error": {"code": 404}}',
        '{"error": null, "page": 12}',
        '{"page": "no error"}',
        '{"error": ',
        "errors: 0",
        "the error is 0",
        "",
    ]
    rollouts = []
    for result in results:
        talk = Talk(1).add("user", "Look.").say("I look", tool_calls=CALLS[:1])
        rollouts.append(talk.add("tool", result, tool_call_id="call-a").say("12").end(0.5))
        rollouts[-1].tools = TOOLS
    store = art.RunStore(tmp_path / "run")
    store.write_groups("train", 1, [art.TrajectoryGroup(rollouts)])
    for what in ([art.TrajectoryGroup(rollouts)], store):
        panel = FailuresPanel(what)
        kind = next(kind for kind in panel.failures()[0]["kinds"] if kind["kind"] == "tool_error")
        assert {failure["title"]: failure["rollouts"] for failure in kind["failures"]} == {
            "no page N": 2,
            "ERROR: no page N": 1,
            "An error occurred: no page N": 1,
            "KeyError: '…'": 1,
            "Error: no page N": 1,
            '{"code": N}': 1,
        }
        assert "Tool errors: 7 of 14 rollouts\n    no page N: 2, for example in step " in str(panel)
        assert "no page N" in panel.html()


def test_the_documentation_says_what_to_do_for_each_kind():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "debug.md").read_text()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| ")]
    assert {kind.title for kind in KINDS.values()} <= {*rows}


def test_an_example_opens_in_the_viewer_by_keyboard(opened):
    page = opened(failing_steps())
    page.focus(".art-panel")
    for _ in range(20):
        page.keyboard.press("j")
        if "ValueError" in page.evaluate("document.activeElement.textContent"):
            break
    page.keyboard.press("Enter")
    page.wait_for_selector(".art-viewer .art-failure")
    assert "no number in 'line 2'" in page.inner_text(".art-failure")
    assert "Example 1 of 5" in page.inner_text(".art-f-example-bar")
    page.keyboard.press("n")
    page.wait_for_function("document.querySelector('.art-failure').textContent.includes(\"'line 3'\")")
    page.focus(".art-reader")
    page.keyboard.press("p")  # in the viewer: the previous rollout
    page.wait_for_function("document.querySelector('.art-failure').textContent.includes(\"'line 2'\")")
    assert "Example 2 of 5" in page.inner_text(".art-f-example-bar")
    page.click("text=Close")
    page.wait_for_selector(".art-viewer", state="detached")
    assert "ValueError" in page.evaluate("document.activeElement.textContent")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_accessible_and_not_wider_than_the_page(opened, theme):
    page = opened(failing_steps(), theme=theme, width=870)
    for width in (390, 870, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        assert not axe_faults(page)
        over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert over <= 0, width
    row(page, "the reply reached").click()
    page.wait_for_selector(".art-msg")
    calm(page)
    assert not axe_faults(page)


def test_a_long_status_leaves_the_button_in_the_first_line(opened):
    page = opened(failing_steps(), width=870)
    page.evaluate("document.querySelector('.art-f-bar .art-muted').textContent = 'word '.repeat(60)")
    status, button = (page.locator(f".art-f-bar {part}").bounding_box() for part in (".art-muted", ".art-button"))
    assert status["height"] > 36 and status["y"] <= button["y"] <= status["y"] + status["height"]


def test_hostile_texts_stay_texts(opened):
    rollouts = [RuntimeError(text) for text in HOSTILE]
    calls = [CALLS[0] | {"function": {"name": HOSTILE[1], "arguments": "{"}}]
    call = Talk(2).add("user", "x").say("y", tool_calls=calls)
    trajectory = call.end(0.1)
    trajectory.tools = TOOLS
    page = opened(art.TrajectoryGroup([trajectory, *rollouts], metadata={"scenario_id": HOSTILE[0]}))
    allowed = set("DIV SPAN BUTTON SECTION UL LI I STRONG H3".split())
    assert set(page.evaluate("[...document.querySelectorAll('.art-host *')].map((one) => one.tagName)")) <= allowed
    assert page.evaluate("window.__pwned") is None
    text = page.panel.html()
    assert "<script" not in text and "<img" not in text and "&lt;script" in text


def test_ten_thousand_rollouts_answer_as_fast_as_ten(opened):
    for count in (16, 10_000):
        groups = crowd(count)
        for n, group in enumerate(groups):
            group.exceptions = art.TrajectoryGroup([ValueError(f"{'abcdefgh'[n % 8] * (n % 97)} {n}")]).exceptions
        panel = FailuresPanel({1: groups})
        times, sizes, done = [], [], False
        while not done:
            start = time.process_time()
            reply, _ = panel.failures()
            times.append(time.process_time() - start)
            sizes.append(len(json.dumps(reply)))
            done = reply["done"]
        assert max(times) < 1.5, times  # 0.2 s, and one piece of at most 1000 rollouts
        assert max(sizes) < 60_000
        assert all(len(kind["failures"]) <= MAX_LISTED for kind in reply["kinds"])
        assert len(panel.failure_rows(0)[0]["rows"]) <= 200
        panel.close()
    assert reply["rollouts"] == 10_000 + 1250
    page = opened({1: groups})
    assert page.locator(".art-f-row").count() <= 5 * MAX_LISTED
    assert "not listed" in page.inner_text(".art-failures")


def test_a_new_step_and_freezing(opened, tmp_path):
    store = art.RunStore(tmp_path / "run")
    store.write_groups("train", 1, [games(1, 4, failed=1)])
    page = opened(store)
    assert row(page, "TimeoutError").inner_text().split("\n")[1] == "1 rollout"
    store.write_groups("train", 2, [games(1, 4, failed=2)])
    page.panel.refresh()
    waits(page, lambda: row(page, "TimeoutError").inner_text().split("\n")[1] == "3 rollouts")
    page.click("text=Make static")
    page.wait_for_selector(".art-panel", state="detached")
