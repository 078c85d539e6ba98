"""docs/architecture.md describes the code: its imports, its terms, its data flows and the places to extend it."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from test_layers import NOTEBOOKS, PACKAGES, exported_cells, imported, module

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SECTIONS = dict(section.split("\n", 1) for section in DOCUMENT.split("\n## ")[1:])
FLOWS = ["From rollout to gradient", "From request to token", "From click to bytes"]


def table(section):
    """The first cells of a table's rows, each with the rest of its row."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", SECTIONS[section], re.MULTILINE)
    return dict(rows[1:])  # without the head


def drawn():
    """The arrows of the diagram: (imported package, importing package) -> whether it is dotted."""
    (diagram,) = re.findall(r"```mermaid\nflowchart LR\n(.*?)```", DOCUMENT, re.DOTALL)
    arrows = {}
    for line in diagram.splitlines():
        source, kind, target = re.fullmatch(r" *(\w+) (-->|-\.->) (\w+)", line).groups()
        assert (source, target) not in arrows
        arrows[source, target] = kind == "-.->"
    return arrows


def import_statements(source):
    """The modules that a cell imports, each with whether the import is inside a function."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((name, id(node) in inside) for name in imported(ast.unparse(node)))


def real():
    """The imports between packages: (imported package, importing package) -> whether all are inside functions."""
    arrows = {}
    for notebook in NOTEBOOKS:
        package = module(notebook).partition(".")[0]
        for name, lazy in (pair for source in exported_cells(notebook) for pair in import_statements(source)):
            used = name.partition(".")[0]
            if used in PACKAGES and used != package:
                arrows[used, package] = arrows.get((used, package), True) and lazy
    return arrows


def follows(arrow, arrows):
    """Whether other arrows lead to the same package. A solid arrow does not follow from a dotted one."""
    usable = [other for other, lazy in arrows.items() if other != arrow and lazy <= arrows[arrow]]
    reached, pending = set(), [arrow[0]]
    while pending:
        package = pending.pop()
        targets = {target for source, target in usable if source == package} - reached
        pending += targets
        reached |= targets
    return arrow[1] in reached


def test_the_diagram_shows_the_imports():
    arrows = real()
    assert drawn() == {arrow: lazy for arrow, lazy in arrows.items() if not follows(arrow, arrows)}


def test_the_table_lists_the_packages_in_order():
    rows = table("Packages in import order")
    expected = [f"[{name}](../nbs/{number:02}_{name})" for name, number in PACKAGES.items()]
    assert [*rows] == expected


@cache
def definitions(path):
    """The names that a module defines, and the methods and fields of its classes as `Class.name`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        for name in (getattr(target, "name", getattr(target, "id", "")) for target in targets):
            names |= {name}
            names |= {f"{name}.{inner}" for inner in inner_names(node)}
    return names


def inner_names(node):
    """The names that a class defines."""
    for inner in node.body if isinstance(node, ast.ClassDef) else []:
        targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", inner)]
        yield from (getattr(target, "name", getattr(target, "id", "")) for target in targets)


def modules_of(name):
    """The modules that a dotted name of the document can mean, each with the rest of the name."""
    parts = name.split(".")
    for n in range(len(parts)):
        path = ROOT / "art_nb" / Path(*parts[: n + 1]) if n < 2 else None
        if path and path.with_suffix(".py").exists():
            yield path.with_suffix(".py"), ".".join(parts[n + 1 :])


def known_names():
    """Every name that a module of art_nb defines."""
    return {name for path in (ROOT / "art_nb").rglob("*.py") for name in definitions(path)}


def code_words(text):
    """The names in backticks, without arguments."""
    return {word.partition("(")[0] for word in re.findall(r"`([A-Za-z_][\w.]*(?:\([^`]*\))?)`", text)}


@pytest.mark.parametrize("flow", FLOWS)
def test_a_data_flow_names_what_exists(flow):
    """`training.run.train` is looked up in its module, and a class or function without a module in all of them."""
    assert len(re.findall(r"^\d\. ", SECTIONS[flow], re.MULTILINE)) >= 5
    looked_up = 0
    for word in code_words(SECTIONS[flow]):
        if word.partition(".")[0] in PACKAGES and "." in word:
            assert any(not rest or rest in definitions(path) for path, rest in modules_of(word)), word
            looked_up += 1
        elif word.partition(".")[0][0].isupper():
            assert word in known_names() or word in OTHERS, word
    assert looked_up >= 4


OTHERS = {"STOP"}
TERMS = "scenario rollout trajectory group choice row index ranking session runtime step policy sampler learner adapter"


def test_the_glossary_defines_the_terms():
    rows = table("Glossary")
    assert [term for term in TERMS.split() if term not in rows] == []
    for term, row in rows.items():
        for word in code_words(row.rpartition(" | ")[2]):
            if word.partition(".")[0] in PACKAGES and "." in word:
                assert any(not rest or rest in definitions(path) for path, rest in modules_of(word)), term
            elif word[0].isupper():
                assert word in known_names(), term


@pytest.mark.parametrize("part", ["sampler", "loss", "judge", "tracker", "integration", "panel"])
def test_where_to_add_a_part(part):
    rows = {what.split(" ", 1)[1]: row for what, row in table("Where to add").items()}
    links = re.findall(r"\]\((\.\./nbs/[^)]+\.ipynb)\)", rows[part])
    assert links
    assert all((ROOT / "docs" / link).exists() for link in links)
    names = {word for word in code_words(rows[part]) if word[0].isupper() and word not in {"NAME", "Bus"}}
    assert names <= known_names() | {"Bus"}
