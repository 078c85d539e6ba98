"""Every notebook runs, top to bottom, in a real kernel."""

from pathlib import Path

import nbformat
import pytest
from nbdev.config import get_config
from nbdev.test import nb_test_cells
from support.jupyter_kernels import run_notebook

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "nbs").rglob("*.ipynb"))


@pytest.mark.slow  # all notebooks together: they start first, because one worker runs them
@pytest.mark.timeout(900)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.relative_to(ROOT / "nbs").as_posix())
def test_notebook(notebook, smollm2_dir, monkeypatch):
    """Only cells under a flag of `tst_flags` (slow, gpu, net) are left out."""
    monkeypatch.chdir(ROOT)
    nb = nbformat.read(notebook, as_version=4)
    chosen = {cell.id for cell in nb_test_cells(notebook, get_config().tst_flags.split())}
    nb.cells = [cell for cell in nb.cells if cell.id in chosen]
    run_notebook(nb, notebook.parent, 800)
