"""The other tutorials, shortened, as a user runs them."""
import shutil

import nbformat
import pytest
from nbclient import NotebookClient

SHORT = {                                               # steps of the shortened form, and the run that it leaves
    "2048/2048.ipynb": ("2", "2048/models/2048-001/checkpoints/0003"),
    "yes_no_maybe/yes-no-maybe.ipynb": ("1", "yes-no-maybe/models/maybe-001/checkpoints/0001"),
    "own_loss/own-loss.ipynb": ("1", "own-loss/models/only-the-good/checkpoints/0001"),
    "resume_and_fork/resume-and-fork.ipynb": ("2", "resume/models/bolder/checkpoints/0002"),
    "sft_then_rl/sft-then-rl.ipynb": ("1", "sft-then-rl/models/larger-001/checkpoints/0002"),
    "self_play/self-play.ipynb": ("1", "self-play/models/self-001/checkpoints/0002"),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", SHORT)
def test_short_tutorial(path, root, tmp_path, smollm2_dir, monkeypatch):
    """In a copy, so that its run directory stays out of the repository; one borrows the game of another."""
    steps, left = SHORT[path]
    monkeypatch.setenv("EXAMPLE_STEPS", steps)
    examples = shutil.copytree(root / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns(".art"))
    notebook = nbformat.read(examples / path, as_version=4)
    resources = {"metadata": {"path": str((examples / path).parent)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    assert ((examples / path).parent / ".art" / left).is_dir()


def test_the_task_that_others_borrow_is_the_one_that_is_shown(root):
    folder = root / "examples" / "yes_no_maybe"
    shown = [cell.source for cell in nbformat.read(folder / "yes-no-maybe.ipynb", as_version=4).cells]
    task, = (source for source in shown if source.startswith("asking ="))
    module = (folder / "yes_no_maybe.py").read_text()
    worth, = (line for source in shown for line in source.splitlines() if line.startswith("WORTH ="))
    assert module.endswith(f"{worth}\n{task}\n")
