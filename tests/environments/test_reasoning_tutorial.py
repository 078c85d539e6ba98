"""The tutorial of reasoning-gym, shortened, as a user runs it."""

import shutil

import pytest
from support.jupyter_kernels import run_notebook, shorten_tutorial

pytest.importorskip("reasoning_gym", reason="make test-environments installs the packages")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_runs_from_top_to_bottom(root, tmp_path, smollm2_dir, monkeypatch):
    monkeypatch.setenv("EXAMPLE_STEPS", "1")
    example, copy = root / "examples" / "reasoning_gym", tmp_path / "reasoning_gym"
    folder = shutil.copytree(example, copy, ignore=shutil.ignore_patterns(".art"))
    run_notebook(shorten_tutorial(folder / "reasoning-gym.ipynb"), folder)
    assert (folder / ".art" / "reasoning-gym" / "models" / "reader-001" / "checkpoints" / "0001").is_dir()
