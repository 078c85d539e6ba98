"""Committed notebooks hold what their author wrote and small, repeatable outputs; nothing else."""

import copy
import json
import re
from functools import cache
from pathlib import Path

import nbformat
import pytest
from nbdev.clean import clean_nb

ROOT = Path(__file__).parents[1]
FOUND = [path for folder in ("nbs", "examples") for path in (ROOT / folder).rglob("*.ipynb")]
NOTEBOOKS = sorted(path for path in FOUND if ".ipynb_checkpoints" not in path.parts)
MACHINE_PATH = re.compile(r"(?<![\w.])(/work|/root|/home|/Users)/|[A-Z]:\\\\Users")
every_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)


@cache
def read(notebook):
    return nbformat.read(notebook, as_version=4)


@every_notebook
def test_cleaning_changes_nothing(notebook):
    before = json.loads(notebook.read_text(encoding="utf-8"))
    after = nbformat.from_dict(copy.deepcopy(before))
    clean_nb(after)
    assert json.loads(json.dumps(after)) == before, "run `make export`"


@every_notebook
def test_no_widget_state(notebook):
    nb = read(notebook)
    assert "widgets" not in nb.metadata
    outputs = [out for cell in nb.cells for out in cell.get("outputs", [])]
    assert "application/vnd.jupyter.widget-view+json" not in {kind for out in outputs for kind in out.get("data", {})}
    assert not [out.metadata for out in outputs if "art_nb" in out.get("metadata", {})]


@every_notebook
def test_no_path_of_a_machine(notebook):
    found = MACHINE_PATH.search(notebook.read_text(encoding="utf-8"))
    assert found is None, found


@every_notebook
def test_no_directive_hides_in_metadata(notebook):
    hidden = [cell.id for cell in read(notebook).cells if "nbdev" in cell.metadata]
    assert not hidden


@every_notebook
def test_no_saved_error(notebook):
    outputs = [out for cell in read(notebook).cells for out in cell.get("outputs", [])]
    assert not [out.ename for out in outputs if out.output_type == "error"]
