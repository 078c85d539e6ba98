"""The first tutorial on vLLM (`make test-vllm`); in a file of its own, so that a second worker can take it."""
import shutil

import nbformat
import pytest

pytest.importorskip("vllm")

from kernels import run_notebook

from art_nb.vllm_sampler import vllm_version


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_runs_with_that_one_argument_changed(root, tmp_path, monkeypatch):
    monkeypatch.setenv("EXAMPLE_STEPS", "1")
    example, kept = tmp_path / "example", shutil.ignore_patterns(".art")
    shutil.copytree(root / "examples" / "tic_tac_toe", example, ignore=kept)
    notebook = nbformat.read(example / "tic-tac-toe.ipynb", as_version=4)
    changed = 0
    for cell in notebook.cells:
        changed += "art.LocalBackend(" in cell.source
        cell.source = cell.source.replace("art.LocalBackend(", 'art.LocalBackend(sampler="vllm", ')
    assert changed == 1
    run_notebook(notebook, example)
    text = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
    assert f"sampled by {vllm_version()}" in text
    assert (example / ".art" / "tic-tac-toe" / "models" / "ttt-001" / "checkpoints" / "0002").is_dir()
