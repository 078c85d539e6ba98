"""The tutorials of reasoning-gym and TextArena, shortened, as a user runs them."""

import shutil

import pytest
from support.jupyter_kernels import run_notebook, shorten_tutorial

pytest.importorskip("reasoning_gym", reason="make test-environments installs the packages")
TUTORIALS = {  # and the run that each of them leaves
    "reasoning_gym/reasoning-gym.ipynb": "reasoning-gym/models/reader-001",
    "textarena/poker.ipynb": "textarena/models/poker-001",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", TUTORIALS)
def test_the_tutorial_runs_from_top_to_bottom(path, root, tmp_path, smollm2_dir, monkeypatch):
    monkeypatch.setenv("EXAMPLE_STEPS", "1")
    notebook = root / "examples" / path
    folder = shutil.copytree(notebook.parent, tmp_path / "tutorial", ignore=shutil.ignore_patterns(".art"))
    run_notebook(shorten_tutorial(folder / notebook.name), folder)
    assert (folder / ".art" / TUTORIALS[path] / "checkpoints" / "0001").is_dir()
