"""The first tutorial and the demo, shortened, as a user runs them."""

import json
import re
import shutil
import subprocess

import nbformat
import pytest
from support.jupyter_kernels import run_notebook, shorten_tutorial
from support.warm import warm_python

import art_nb as art


@pytest.fixture
def tic_tac_toe(root, tmp_path):
    """A copy of the example, so that its run directory stays out of the repository."""
    example, copy = root / "examples" / "tic_tac_toe", tmp_path / "tic_tac_toe"
    return shutil.copytree(example, copy, ignore=shutil.ignore_patterns(".art"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tutorial_runs_from_top_to_bottom(tic_tac_toe, smollm2_dir, monkeypatch):
    monkeypatch.setenv("EXAMPLE_STEPS", "2")
    run_notebook(shorten_tutorial(tic_tac_toe / "tic-tac-toe.ipynb"), tic_tac_toe)
    assert (tic_tac_toe / ".art" / "tic-tac-toe" / "models" / "ttt-001" / "checkpoints" / "0003").is_dir()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_on_vllm_it_runs_with_one_argument_changed(tic_tac_toe, monkeypatch):
    pytest.importorskip("vllm", reason="vLLM is not installed here: ART_NB_TESTS=full make test-vllm runs this")
    from art_nb.samplers.vllm import vllm_version

    monkeypatch.setenv("EXAMPLE_STEPS", "1")
    notebook, changed = shorten_tutorial(tic_tac_toe / "tic-tac-toe.ipynb"), 0
    for cell in notebook.cells:
        changed += "art.LocalBackend(" in cell.source
        cell.source = cell.source.replace("art.LocalBackend(", 'art.LocalBackend(sampler="vllm", ')
    assert changed == 1
    run_notebook(notebook, tic_tac_toe)
    text = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
    assert f"sampled by {vllm_version()}" in text
    assert (tic_tac_toe / ".art" / "tic-tac-toe" / "models" / "ttt-001" / "checkpoints" / "0002").is_dir()


def test_committed_tutorial_shows_the_curve_rising(root):
    notebook = nbformat.read(root / "examples" / "tic_tac_toe" / "tic-tac-toe.ipynb", as_version=4)
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    text = "".join(str(out.get("text") or out.get("data", {})) for out in outputs)
    images = [out for out in outputs if "image/png" in out.get("data", {})]
    wins = [float(part.split()[0].rstrip(",")) for part in text.split("win ")[1:] if part[0].isdigit()]
    assert len(images) >= 2
    assert wins[0] == 0.0
    assert max(wins) > 0.75


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_keeps_its_run_and_says_how_to_read_it(tic_tac_toe, smollm2_dir):
    command = [warm_python(), "demo.py", "--json", "--steps", "1", "--groups", "2", "--games", "2", "--warm-up", "2"]
    done = subprocess.run(command, cwd=tic_tac_toe, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr[-2000:]
    *_, untrained, warmed_up, trained, baselines, _, _, games, lost, report, _, delete, results = (
        done.stdout.splitlines()
    )
    assert [line.split()[:2] for line in (untrained, warmed_up, trained)] == [
        ["untrained", "won"],
        ["warmed-up", "won"],
        ["trained", "won"],
    ]
    assert baselines.startswith("For comparison: random legal moves win 44 %")
    assert "step = 2 and split = val and reward = 0" in lost
    assert games.split()[-3:-1] == ["view", "--notebook"]
    assert games.split()[-1] == report.split()[-1]
    assert re.search(rf"rm -r {report.split()[-1]}  \(it takes \d+ MB, mostly checkpoints\)$", delete)
    assert [line[:12] for line in done.stdout.splitlines() if " of 5: " in line] == [
        f"Stage {i} of 5" for i in range(1, 6)
    ]
    run = art.open_run(tic_tac_toe / report.split()[-1])
    assert [row["step"] for row in run.history() if "train/reward" in row] == [2]
    told = json.loads(results)
    assert told.keys() == {
        "win_before",
        "win_after_warm_up",
        "win_after",
        "ci95",
        "games",
        "steps",
        "train_seconds",
        "illegal_after",
        "peak_rss_gb",
    }
    assert told["steps"] == 1
    assert told["games"] == 2
    assert told["peak_rss_gb"] < 6


async def test_the_panel_of_the_judge_example_shows_the_scores_of_the_reader(root, tmp_path, monkeypatch):
    shutil.copytree(root / "examples" / "ruler", tmp_path / "ruler", ignore=shutil.ignore_patterns(".art"))
    monkeypatch.chdir(tmp_path / "ruler")
    text = "\n".join(cell.source for cell in nbformat.read("ruler.ipynb", as_version=4).cells)
    (call,) = re.findall(r"await (art\.judge\([^`\n]+\))", text)
    (rubric,) = re.findall(r'RUBRIC = """\\\n(.+?)"""', text, re.DOTALL)
    answers = art.open_run("rollouts").read_groups("train", 0)
    panel = await eval(call, {"art": art, "answers": answers, "RUBRIC": rubric})
    table = repr(panel)
    assert "judge: a careful reader" in table and "0.75" in table and "An invented adaptation." in table
