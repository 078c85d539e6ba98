"""The tutorials: the longer ones shortened, as a user runs them, and what the saved ones show."""

import re
import shutil
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from shutil import which

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from support.jupyter_kernels import run_notebook, shorten_tutorial

from art_nb.core.types import install_hint

SHORT = {  # steps of the shortened form, and the run that it leaves
    "2048/2048.ipynb": ("2", "2048/models/2048-001/checkpoints/0003"),
    "yes_no_maybe/yes-no-maybe.ipynb": ("1", "yes-no-maybe/models/maybe-001/checkpoints/0001"),
    "own_loss/own-loss.ipynb": ("1", "own-loss/models/positive-advantages/checkpoints/0001"),
    "resume_and_fork/resume-and-fork.ipynb": ("2", "resume/models/higher-learning-rate/checkpoints/0002"),
    "sft_then_rl/sft-then-rl.ipynb": ("1", "sft-then-rl/models/larger-001/checkpoints/0002"),
    "self_play/self-play.ipynb": ("1", "self-play/models/self-001/checkpoints/0002"),
    "rock_paper_tool_use/rock-paper-tool-use.ipynb": ("1", "rock-paper-tool-use/models/player-001/checkpoints/0002"),
    "production/production.ipynb": ("1", "production/models/desk-001/checkpoints/0002"),
    "existing_agent/existing-agent.ipynb": ("1", "existing-agent/models/stock-001/checkpoints/0002"),
    "node_agent/node-agent.ipynb": ("1", "node-agent/models/clerk-001/checkpoints/0002"),
    "email_agent/email-agent.ipynb": ("1", "email/models/mail-001/checkpoints/0002"),
    "auto/auto.ipynb": ("1", "auto/models/auto-001/checkpoints/0001"),
}
LONG = [
    "self_play/self-play.ipynb",
    "rock_paper_tool_use/rock-paper-tool-use.ipynb",
]  # these take minutes, even with fewer steps
LEARNT = {  # metric that rose from a run's first evaluation to its last
    "tic_tac_toe/tic-tac-toe.ipynb": "win",
    "2048/2048.ipynb": "win",
    "yes_no_maybe/yes-no-maybe.ipynb": "reward",
    "resume_and_fork/resume-and-fork.ipynb": "reward",
    "sft_then_rl/sft-then-rl.ipynb": "right",
    "self_play/self-play.ipynb": "win",
    "rock_paper_tool_use/rock-paper-tool-use.ipynb": "won",
    "mcp/mcp.ipynb": "valid",
    "reasoning_gym/reasoning-gym.ipynb": "solved",
    "production/production.ipynb": "right",
    "langgraph/langgraph.ipynb": "right",
    "existing_agent/existing-agent.ipynb": "right",
    "node_agent/node-agent.ipynb": "right",
    "email_agent/email-agent.ipynb": "right",
    "textarena/poker.ipynb": "won",
}
STAGES = [  # SFT, then reinforcement learning
    "sft_then_rl/sft-then-rl.ipynb",
    "production/production.ipynb",
    "langgraph/langgraph.ipynb",
    "existing_agent/existing-agent.ipynb",
    "email_agent/email-agent.ipynb",
]
NEEDS = {  # package and extra of a tutorial; tests/agents and tests/environments run these in their own environments
    "mcp/mcp.ipynb": ("mcp", "mcp"),
    "reasoning_gym/reasoning-gym.ipynb": ("reasoning_gym", "environments"),
    "textarena/poker.ipynb": ("textarena", "environments"),
    "langgraph/langgraph.ipynb": ("langchain", "langgraph"),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", [pytest.param(path, marks=[pytest.mark.full] * (path in LONG)) for path in SHORT])
def test_short_tutorial(path, root, tmp_path, smollm2_dir, monkeypatch):
    """In a copy, so that its run directory stays out of the repository; some borrow the task of another."""
    if path.startswith("node_agent") and not (which("node") or which("node", path=Path(sys.executable).parent)):
        pytest.skip("this tutorial needs Node")
    steps, left = SHORT[path]
    monkeypatch.setenv("EXAMPLE_STEPS", steps)
    examples = shutil.copytree(root / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns(".art"))
    run_notebook(shorten_tutorial(examples / path), (examples / path).parent)
    assert ((examples / path).parent / ".art" / left).is_dir()


def saved_text(root, path):
    """Return the outputs of a saved tutorial as text. None of them is an error."""
    cells = nbformat.read(root / "examples" / path, as_version=4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


def saved_evaluations(root, path):
    """Return the ends of the interval that a saved tutorial shows for each step of its first model."""
    text = saved_text(root, path)
    rows = re.findall(rf"Evaluation\((\S+) step (\d+): {LEARNT[path]} \S+, 95 % (\S+) to (\S+), n=\d+\)", text)
    return {int(step): (float(low), float(high)) for name, step, low, high in rows if name == rows[0][0]}


@pytest.mark.parametrize("path", LEARNT)
def test_what_a_saved_tutorial_shows(path, root):
    """The lower end of the trained model's interval lies above the upper end of the first one's."""
    evaluations = saved_evaluations(root, path)
    assert evaluations[max(evaluations)][0] > evaluations[min(evaluations)][1]


@pytest.mark.parametrize("path", STAGES)
def test_each_stage_of_a_saved_tutorial_rises(path, root):
    """The intervals of two successive stages do not overlap."""
    stages = [interval for _, interval in sorted(saved_evaluations(root, path).items())]
    assert len(stages) == 3
    assert all(later[0] > earlier[1] for earlier, later in pairwise(stages))


def test_the_judge_of_the_saved_tutorial_prefers_the_trained_model(root):
    """The lower end of the interval lies above one half, the share of a model that is as good as the base model."""
    (low,) = re.findall(
        r"The judge prefers the trained model: \S+, 95 % (\S+) to \S+, n=30", saved_text(root, "auto/auto.ipynb")
    )
    assert float(low) > 0.5


@pytest.mark.parametrize("path", NEEDS)
def test_a_tutorial_says_which_package_is_missing(path, root, tmp_path):
    """Before it loads a model: the last line of the error names the command that installs the package."""
    package, extra = NEEDS[path]
    if find_spec(package):
        pytest.skip(f"{package} is installed here")
    notebook = nbformat.read(root / "examples" / path, as_version=4)
    assert f'pip install "art_nb[{extra}]"' in notebook.cells[0].source
    with pytest.raises(CellExecutionError) as error:
        run_notebook(notebook, tmp_path)
    assert error.value.ename == "BackendMissing" and install_hint(extra) in error.value.evalue.splitlines()[0]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    failed = next(i for i, cell in enumerate(code) if any(out.output_type == "error" for out in cell.outputs))
    assert failed <= 2 and "TrainableModel" not in "".join(cell.source for cell in code[: failed + 1])


def test_the_task_that_others_borrow_is_the_one_that_is_shown(root):
    folder = root / "examples" / "yes_no_maybe"
    shown = [cell.source for cell in nbformat.read(folder / "yes-no-maybe.ipynb", as_version=4).cells]
    (task,) = (source for source in shown if source.startswith("TEMPLATES ="))
    module = (folder / "yes_no_maybe.py").read_text()
    (rewards,) = (line for source in shown for line in source.splitlines() if line.startswith("REWARDS ="))
    assert module.endswith(f"{rewards}\n{task}\n")
