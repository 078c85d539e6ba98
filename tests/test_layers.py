"""The order of packages and modules is the order of imports."""

import ast
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "nbs").glob("[0-9]*/[0-9]*.ipynb"))
EXPORT = re.compile(r"^#\| *exporti? *$", re.MULTILINE)
MODULE = re.compile(r"^#\| *default_exp +(\S+)", re.MULTILINE)


def code(notebook):
    return [cell.source for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]


def exported_cells(notebook):
    return [source for source in code(notebook) if EXPORT.search(source)]


def identifier(notebook):
    return "/".join(notebook.parts[-2:])


def number(notebook):
    """The place of a notebook in the order of imports: the number of its folder, then its own."""
    return tuple(int(part.split("_")[0]) for part in notebook.parts[-2:])


def module(notebook):
    """The module that a notebook exports to."""
    names = [match[1] for source in code(notebook) if (match := MODULE.search(source))]
    return names[0] if names else None


NUMBERS = {module(notebook): number(notebook) for notebook in NOTEBOOKS}


def imported(source):
    """Every module of art_nb that an exported cell imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name.removeprefix("art_nb.") for name in names if name.startswith("art_nb."))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=identifier)
def test_imports_go_downwards(notebook):
    used = {name for source in exported_cells(notebook) for name in imported(source) if name in NUMBERS}
    upwards = sorted(name for name in used if NUMBERS[name] >= number(notebook))
    assert not upwards, f"{notebook.name} imports {upwards}"


def test_every_notebook_has_a_module_of_its_own():
    assert None not in NUMBERS
    assert len(NUMBERS) == len(NOTEBOOKS)


ALLOWED = {
    "core": "",
    "rollouts": "core",
    "runs": "core rollouts",
    "models": "core rollouts runs",
    "rewards": "core rollouts runs models",
    "tokens": "core rollouts runs models",
    "policy": "core models",
    "learners": "core rollouts runs tokens policy",
    "samplers": "core tokens policy",
    "serving": "core models tokens samplers",
    "backends": "core rollouts runs models tokens policy learners samplers serving",
    "training": "core rollouts runs models tokens backends learners",
    "pipeline": "core rollouts runs models training backends",
    "views": "core rollouts runs models rewards tokens training learners",
    "reports": "core rollouts runs models tokens training views",
    "panels": "core rollouts runs models rewards tokens training views reports backends",
    "compat": "core rollouts runs models backends",
}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=identifier)
def test_a_package_imports_only_those_it_may(notebook):
    package = module(notebook).split(".")[0]
    if package in ALLOWED:
        imports = {name.split(".")[0] for source in exported_cells(notebook) for name in imported(source)}
        assert imports - {package} <= set(ALLOWED[package].split())
