"""The order of packages and modules is the order of imports. Cells, classes and names follow the house rules."""

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

import art_nb

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "nbs").glob("[0-9]*/[0-9]*.ipynb"))
PACKAGES = {folder.name.partition("_")[2]: int(folder.name[:2]) for folder in sorted((ROOT / "nbs").glob("[0-9]*"))}
EXPORT = re.compile(r"^#\| *exporti? *$", re.MULTILINE)
MODULE = re.compile(r"^#\| *default_exp +(\S+)", re.MULTILINE)


@cache
def code(notebook):
    """The sources of the code cells. nbformat would also validate the notebook, in each test process."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


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
    "serving": "core rollouts models tokens samplers",
    "backends": "core rollouts runs models tokens policy learners samplers serving",
    "distributed": "core rollouts runs models tokens policy learners samplers serving backends",
    "servers": "core rollouts runs models tokens policy learners samplers serving backends",
    "training": "core rollouts runs models tokens backends learners",
    "pipeline": "core rollouts runs models training backends",
    "views": "core rollouts runs models rewards tokens training learners",
    "reports": "core rollouts runs models tokens policy backends training views",
    "panels": "core rollouts runs models rewards tokens training views reports",
    "integrations": "core rollouts runs models rewards tokens policy samplers serving training reports",
    "compat": "core rollouts runs models backends",
}


CLOSED = {  # a module more is a decision
    "core": "redaction seeds types jsonable events aio machine files progress_bars"
}


def package_imports():
    """The packages that each package imports, at the top or inside a function."""
    imports = {package: set() for package in PACKAGES}
    for notebook in NOTEBOOKS:
        package = module(notebook).partition(".")[0]
        imports[package] |= {name.partition(".")[0] for source in exported_cells(notebook) for name in imported(source)}
    return {package: names & PACKAGES.keys() - {package} for package, names in imports.items()}


def test_a_package_imports_what_the_table_says():
    imports = package_imports()
    assert imports.pop("cli")  # it may import everything
    assert imports == {package: set(names.split()) for package, names in ALLOWED.items()}


def test_the_order_of_packages_is_the_order_of_imports():
    assert len({*PACKAGES.values()}) == len(PACKAGES)
    assert [*PACKAGES] == art_nb._PACKAGES == [*ALLOWED, "cli"]
    for package, names in package_imports().items():
        assert all(PACKAGES[name] < PACKAGES[package] for name in names), package


@pytest.mark.parametrize("package", CLOSED)
def test_a_closed_package_gets_no_module(package):
    assert {name for name in NUMBERS if name.startswith(f"{package}.")} == {
        f"{package}.{name}" for name in CLOSED[package].split()
    }


@pytest.mark.parametrize("notebook", [n for n in NOTEBOOKS if number(n)[0] < PACKAGES["views"]], ids=identifier)
def test_training_imports_no_panel(notebook):
    """Not even as text, as in `import_module("art_nb.panels.viewer")`."""
    for source in exported_cells(notebook):
        texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
        paths = [
            text for text in texts if isinstance(text, str) and re.search(r"\bpanels\.\w|ipywidgets|anywidget", text)
        ]
        assert not paths


DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def length(node, source):
    """The number of lines of a definition or a cell, without docstrings."""
    strings = [inner.body[0] for inner in ast.walk(node) if isinstance(inner, DEFINITIONS) and ast.get_docstring(inner)]
    lines = node.end_lineno - node.lineno + 1 if isinstance(node, DEFINITIONS) else len(source.splitlines())
    return lines - sum(string.end_lineno - string.lineno + 1 for string in strings)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=identifier)
def test_cells_and_classes_are_short(notebook):
    for source in exported_cells(notebook):
        cell = ast.parse(source)
        definitions = [node for node in cell.body if isinstance(node, DEFINITIONS)]
        one_class = len(definitions) == 1 and isinstance(definitions[0], ast.ClassDef)
        first = definitions[0].name if definitions else "the table"
        assert length(cell, source) <= 60 or not definitions or one_class, f"split the cell of {first}"
        for node in ast.walk(cell):
            if isinstance(node, ast.ClassDef):
                assert length(node, source) <= 200, f"{node.name} has too many lines"


LINK = re.compile(r"\]\(([^)\s]+)\)")
PAGES = [
    *sorted((ROOT / "nbs").rglob("*.ipynb")),
    *sorted((ROOT / "examples").rglob("*.ipynb")),
    *[ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"],
    *sorted((ROOT / "docs").rglob("*.md")),
]
HEADING = re.compile(r"^#+ +(.+?) *#*$", re.MULTILINE)


@cache
def prose(page):
    """The Markdown of a page or notebook, without its code blocks."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def local_links(page):
    """The files that a notebook or a Markdown page links to, each with its anchor."""
    for link in LINK.findall(prose(page)):
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            yield page.parent / path if path else page, anchor


def anchors(page):
    """The anchors of the headings, as GitHub and the documentation site write them."""
    found = []
    for heading in HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # a link in a heading is its text
        found.append(re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-"))
    return {f"{name}-{n}" if (n := found[:i].count(name)) else name for i, name in enumerate(found)}


def dead_links(page):
    """The links of a page to files or headings that do not exist."""
    for target, anchor in local_links(page):
        has_headings = target.suffix in (".md", ".ipynb") and target.is_file()
        if not target.exists() or (anchor and has_headings and anchor not in anchors(target)):
            yield f"{target}#{anchor}" if anchor else str(target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page):
    assert not [*dead_links(page)]


def test_links_are_found():
    links = [link for page in PAGES for link in local_links(page)]
    assert len(links) > 200
    assert sum(bool(anchor) for _, anchor in links) > 40


def test_a_dead_link_is_found(tmp_path):
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# One\n\n## `art.two`: what it does\n\n## One\n\n```sh\n# no heading\n```\n")
    good = ["other.md", "other.md#one", "other.md#one-1", "other.md#arttwo-what-it-does", "#here", "https://x.org/#y"]
    bad = ["absent.md", "other.md#two", "other.md#one-2", "other.md#no-heading", "#there", "absent.md#one"]
    page.write_text("# Here\n\n" + "\n".join(f"[a]({link})" for link in [*good, *bad]))
    assert [link.removeprefix(f"{tmp_path}/").removeprefix("page.md") for link in dead_links(page)] == bad


DOCS_PAGE = re.compile(r"\bdocs/[\w/-]+\.md\b")


def test_pages_that_the_code_names_exist():
    """In error messages, docstrings and comments."""
    files = [*(ROOT / "art_nb").rglob("*.py"), *(ROOT / "tools").glob("*.py"), *(ROOT / "tests").rglob("*.py")]
    named = {page: file.name for file in files for page in DOCS_PAGE.findall(file.read_text(encoding="utf-8"))}
    assert len(named) >= 5
    assert not {page: file for page, file in named.items() if not (ROOT / page).is_file()}


# Names of earlier versions that say nothing to a reader who does not know them.
RETIRED = set(
    """
    ANYWAY Asked Attached Between Busy Called Case ChatAsked ChatWriter Chosen Complete Deaf Desk EDGES Entry Folded
    Gather Graded Home Host INSTEAD Job Judgement JudgementSink Kept Lesson Listening MAX_TICK NEEDLESS Nowhere
    ORDERS OURS OVER Open Opinion Packed Part Place Pools Prefixes Question REFUSED Reading Record Recording Reply
    Room Row Rows Rule SAID SETUPS Said Scope Service Setup Sheet Show Slotted Source Stack Stage Stretch Swapped
    Tail Tape Tenant TextAsked TextWriter Ticker TokenMemory TrainRow WeighedRows Writes _aloud _beats _enter
    _furnish _hand_out _heard _parse_answer _rest _send_tick _tell _to_the_end abandon adopt alike all_or_nothing
    all_or_stop answered as_if asked_for at_once at_work beat begin begun_call beside by_litellm choose clean
    cleaned closest copied cut cut_off described evenly expected facts fitted fitting flat_reward_calm
    flat_reward_restless fold follow forget format_of funnel give_up go_on grading guarded has_calm_gradient hold
    home_of how imported in_our_names in_words index_of installed interrupt_run judgement_metrics judgements_of keep
    keep_events known laid_out lessons listening load_newest look made_once mend_tokenizer misfit moved named
    of_model orders over_rounds own_logprobs part_of_loss parts_of permitted place_of placed plainly point portioned
    pulse put_down ranking_of_judgement read_channels read_deepseek read_gemma read_glm read_mistral read_python
    read_scores read_xml received remedy rest_of_call retreat rollouts runs_at_work scenario_facts send_tick
    sentence serve settle short shows span staleness stamp_of steadiness steps_saved stop sweep take_up tick_of
    together trained undisturbed unheard unless_gone varies wanted whole_checkpoint
    """.split()
)
# These do not return as variables or parameters either.
RETIRED_EVERYWHERE = set(
    "said told asked heard kept found own earlier within settled news wrong one desk home opinion lesson vitals tick "
    "guest lease judgement judgements colour".split()
)
RIGHT = {
    "begin": "the counterpart of `end` in the same class",
    "earlier": "a command in the messages of the live cell",
    "listening": "a display listens for clicks of its buttons",
    "opinion": "an argument in the messages of the judging panel",
    "rollouts": "a method of the protocol Reporter",
    "serve": "uvicorn calls the method by this name",
    "span": "a range of positions",
    "steps_saved": "a public method of RunStore",
    "stop": "users stop runs and servers",
    "tick": "a trait in the messages between a panel and its page",
}


def names(source):
    """The names that a cell defines: (name, whether it is a function or class)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DEFINITIONS):
            yield node.name, True
        elif isinstance(node, ast.arg):
            yield node.arg, False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.id.isupper()


@pytest.mark.parametrize("package", PACKAGES)
def test_retired_names_do_not_return(package):
    notebooks = [notebook for notebook in NOTEBOOKS if module(notebook).startswith(f"{package}.")]
    used = {pair for notebook in notebooks for source in exported_cells(notebook) for pair in names(source)}
    retired = {name for name, definition in used if definition and name in RETIRED}
    retired |= {name for name, _ in used if name.strip("_").lower() in RETIRED_EVERYWHERE}
    assert sorted(retired - RIGHT.keys()) == []


def test_the_list_of_right_names_is_short_and_used():
    used = {pair for notebook in NOTEBOOKS for source in exported_cells(notebook) for pair in names(source)}
    assert not RIGHT.keys() - {name for name, _ in used}


# Public names that two modules define for a reason. Every other name has one meaning.
SHARED_NAMES = {
    "Backend": "the protocol, and ART's name of the remote client",
    "TrainConfig": "ART has a model and a typed dictionary of this name",
    "TrainSFTConfig": "ART has a model and a typed dictionary of this name",
    "LOG": "the logger of a module",
    "RequestT": "a type variable",
    "compare": "the panel of runs, and the agreement of two rankings",
    "doctor": "a function and its command",
    "failures": "a panel and its command, and a check of diagnostics",
    "migrate": "a function and its command",
    "profile": "a function and its command",
    "record": "a function and its command",
    "train": "a function, its command and its remote call",
    "view": "a function and its command",
    "delete_checkpoints": "functions of the runtime and the pipeline, and the remote call",
}


def defined_names(node):
    """Return the names that a statement of a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    parts = [part for target in targets for part in getattr(target, "elts", [target])]
    return [part.id for part in parts if isinstance(part, ast.Name)]


def test_a_public_name_has_one_meaning():
    places = {}
    for notebook in NOTEBOOKS:
        for node in (node for source in exported_cells(notebook) for node in ast.parse(source).body):
            for name in defined_names(node):
                if not name.startswith("_"):
                    places.setdefault(name, set()).add(module(notebook))
    assert {name for name, modules in places.items() if len(modules) > 1} == {*SHARED_NAMES}
