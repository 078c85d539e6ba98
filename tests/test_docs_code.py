"""The Python code on the pages of the documentation: each page runs from top to bottom, and its names exist.

The pages name the embedded model; here they run with the tiny one. An HTML comment before a block, `<!-- not run: needs
an API key -->`, marks code that cannot run here. It is compiled and checked only. The how-to pages begin with what
docs/start/first-task.md defines before its comment `<!-- the how-to pages start here -->`. There, rewards are
random: the tiny model writes random text, and steps without different rewards would not train.
"""

import ast
import importlib
import inspect
import random
import re
import textwrap
import warnings
from importlib import metadata
from pathlib import Path
from typing import get_args

import pytest

import art_nb as art
from art_nb.models.tiny import save_tiny_model
from art_nb.reports import profile
from art_nb.training import diagnostics

ROOT = Path(__file__).parents[1]
FIRST_TASK = ROOT / "docs" / "start" / "first-task.md"
FOLDERS = ("start", "how-to", "concepts", "coming-from")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / "docs" / folder).glob("*.md"))
START = "<!-- the how-to pages start here -->"
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?(?P<indent> *)```python\n(?P<code>.*?)\n *```$", re.M | re.S
)
OBJECTS = {"art": art, "model": art.TrainableModel, "backend": art.LocalBackend, "run": art.Run}
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")


def blocks(text):
    """Return the line, the code, and the reason why it does not run, of each Python block of a page."""
    return [
        (text[: match.start("code")].count("\n"), textwrap.dedent(match["code"]), match["reason"])
        for match in BLOCK.finditer(text)
    ]


def compiled(code, line, name):
    """Compile a block, with the line numbers of its page. It may await."""
    return compile("\n" * line + code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


async def execute(text, name, namespace, base_model):
    """Run the blocks of a page in one namespace."""
    for line, code, reason in blocks(text):
        code = code.replace('"smollm2-135m"', repr(str(base_model)))
        code = code.replace("max_completion_tokens=24", "max_completion_tokens=60")  # the tiny model's tokens are short
        if reason is None:
            pending = eval(compiled(code, line, name), namespace)
            if inspect.isawaitable(pending):
                await pending


def attribute(value, name):
    """Return an attribute that instances of a class have, `None` if its value is unknown. Raise `AttributeError`."""
    if inspect.isclass(value) and (
        name in getattr(value, "model_fields", {}) or re.search(rf"^ *{name} : ", value.__doc__ or "", re.M)
    ):
        return None
    found = getattr(value, name)
    return None if isinstance(found, property) else found


def resolve(node):
    """Return the value of `art.train` or `model.register`, or `None` if it is unknown."""
    if isinstance(node, ast.Name):
        return OBJECTS.get(node.id)
    if isinstance(node, ast.Attribute) and (value := resolve(node.value)) is not None:
        return attribute(value, node.attr)
    return None


def keywords(function):
    """Return the names of the keyword arguments of a function, or `None` if it takes any."""
    names = {*getattr(function, "model_fields", {})}
    for parameter in inspect.signature(function).parameters.values():
        names.add(parameter.name)
        if parameter.kind == parameter.VAR_KEYWORD and not hasattr(function, "model_fields"):
            options = get_args(parameter.annotation)  # of Unpack[…]
            if not options:
                return None
            names |= options[0].__annotations__.keys()
    return names


def faults(code, imported):
    """Return the names and keyword arguments of a block that do not exist. Add its imports to `imported`."""
    found = []
    for node in ast.walk(compile(code, "block", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "art_nb":
            module = importlib.import_module(node.module)
            for alias in node.names:
                imported[alias.name] = None
                try:
                    imported[alias.name] = getattr(module, alias.name)
                except AttributeError:
                    found.append(f"{node.module}.{alias.name}")
                except art.BackendMissing:  # the name exists, and its package is an extra
                    continue
        elif isinstance(node, ast.Attribute):
            try:
                resolve(node)
            except AttributeError:
                found.append(ast.unparse(node))
    for node in ast.walk(ast.parse(code)):
        found += wrong_keywords(node, imported) if isinstance(node, ast.Call) else []
    return found


def wrong_keywords(call, imported):
    """Return the keyword arguments of a call that its function does not have. `partial(f, x=1)` is a call of `f`."""
    is_partial = isinstance(call.func, ast.Name) and call.func.id == "partial"
    target = call.args[0] if is_partial else call.func
    try:
        function = imported.get(target.id) if isinstance(target, ast.Name) else resolve(target)
    except AttributeError:
        return []
    names = keywords(function) if callable(function) else None
    return [
        f"{ast.unparse(target)}({k.arg}=)" for k in call.keywords if names is not None and k.arg and k.arg not in names
    ]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A tiny model with room for the conversations of agents."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context=1024)


@pytest.fixture
def namespace(tmp_path, monkeypatch):
    """An empty namespace, in a working directory of its own. Its backends are closed at the end."""
    monkeypatch.chdir(tmp_path)
    return {"__name__": "page"}


@every_page
async def test_the_code_runs(page, namespace, weights):
    if page.parent.name == "how-to":
        await execute(FIRST_TASK.read_text(encoding="utf-8").partition(START)[0], FIRST_TASK.name, namespace, weights)
        namespace["reward"] = lambda found: random.random()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            await execute(page.read_text(encoding="utf-8"), page.name, namespace, weights)
    finally:
        backends = [value for value in namespace.values() if isinstance(value, art.LocalBackend)]
        for backend in backends:
            await backend.close()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_names_and_arguments_exist(page):
    imported, found = {}, []
    for _, code, _ in blocks(page.read_text(encoding="utf-8")):
        found += faults(code, imported)
    assert not found


def section(page, heading):
    """Return the rows of the table below a heading: the first cell of each."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \|", text, re.M)[1:]
    return [name for row in rows for name in row.replace("`", "").split(", ")]


def test_the_tables_are_complete():
    """Every finding of the doctor, every warning and every phase is explained, and every extra is listed."""
    doctor = inspect.getsource(importlib.import_module("art_nb.training.doctor"))
    assert {*section("how-to/debug.md", "Findings of `art.doctor`")} == {*re.findall(r'Check\(\s*"(\w+)"', doctor)}
    warned = {title for _, title, _ in diagnostics.CHECKS}
    assert {*section("how-to/debug.md", "Warnings of the live cell")} == warned
    small = {"schedule", "draw", "deliver", "optimizer"}  # never the longest phase
    assert {*section("how-to/profile.md", "What to change")} == profile.PHASE_MEANINGS.keys() - small
    machine = inspect.getsource(importlib.import_module("art_nb.cli.machine"))
    checks = {*section("start/install.md", "Findings of `art-nb doctor`")}
    assert {*re.findall(r'Check\(\s*"(\w+)"', machine)} - {"python", "cores", "weights", "learner"} <= checks
    extras = {*metadata.metadata("art_nb").get_all("Provides-Extra")} - {"dev"}
    assert {*section("start/install.md", "In your own environment")} == extras


def test_code_is_found_and_most_of_it_runs():
    reasons = [reason for page in PAGES for _, _, reason in blocks(page.read_text(encoding="utf-8"))]
    assert len(reasons) > 30
    assert sum(reason is not None for reason in reasons) < len(reasons) / 3  # most of these need another package
    fences = sum(page.read_text(encoding="utf-8").count("```python") for page in PAGES)
    assert fences == len(reasons), "a Python block is not closed, or its comment has an unknown form"
    assert START in FIRST_TASK.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("code", "fault"),
    {
        "art.trian(model)": "art.trian",
        "art.train(model, rollout, scenarios, step=3)": "art.train(step=)",
        "run = await art.train(model, f, s, los='ppo')": "art.train(los=)",
        "art.TrainableModel(nam='a')": "art.TrainableModel(nam=)",
        "model.get_name()": "model.get_name",
        "await model.register(backend, bus=1)": "model.register(bus=)",
        "run.groups.sort(); run.pawse()": "run.pawse",
        "from art_nb.rewards.ruler import rule": "art_nb.rewards.ruler.rule",
        "from art_nb.rewards.ruler import score_group\nscore_group(g, judg=f)": "score_group(judg=)",
        "partial(art.ruler_score_group, judge='local')": "art.ruler_score_group(judge=)",
    }.items(),
)
def test_a_fault_is_found(code, fault):
    assert faults(code, {}) == [fault]


async def test_code_that_fails_is_an_error_with_the_line_of_the_page(namespace, tiny_model_dir):
    skipped = "<!-- not run: needs a GPU -->\n```python\nx = 2\n```"
    page = f"# A page\n\n```python\nx = 1\n```\n\n{skipped}\n\n```python\nassert x == 2\n```\n"
    with pytest.raises(AssertionError) as caught:
        await execute(page, "a-page.md", namespace, tiny_model_dir)
    assert (str(caught.traceback[-1].path), caught.traceback[-1].lineno + 1) == ("a-page.md", 13)
