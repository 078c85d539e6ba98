"""Build the documentation site in build/docs from the notebooks, docs/ and the docstrings (`make docs`).

The source directory of Sphinx is a copy of the repository's layout, so links between pages are the same as in the
repository. The script adds a page for each public name and the table of contents."""

import importlib
import inspect
import json
import re
import shutil
import sys
from pathlib import Path

from readme import DIRECTIVE, HIDE
from sphinx.cmd.build import main as sphinx_build

import art_nb

ROOT = Path(__file__).parents[1]
SOURCE, OUTPUT = ROOT / "build" / "docs-source", ROOT / "build" / "docs"
TUTORIALS = (
    "tic_tac_toe/tic-tac-toe yes_no_maybe/yes-no-maybe ruler/ruler 2048/2048 own_loss/own-loss "
    "resume_and_fork/resume-and-fork sft_then_rl/sft-then-rl self_play/self-play "
    "rock_paper_tool_use/rock-paper-tool-use existing_agent/existing-agent langgraph/langgraph node_agent/node-agent "
    "mcp/mcp email_agent/email-agent auto/auto reasoning_gym/reasoning-gym textarena/poker production/production"
).split()
HOW_TO = (
    "agent data programs frameworks endpoint mcp environments auto reward warm-up judge loss base-model debug resume "
    "trackers traces record import curate export remote ray clusters serverless-server tinker-server client-keys "
    "profile"
).split()
CONCEPTS = "rollouts groups-and-advantages exact-tokens losses steps-and-checkpoints metrics".split()
SECTIONS = {  # of the table of contents
    "Start": ["docs/start/install", "docs/start/first-task"],
    "Tutorials": [f"examples/{name}" for name in TUTORIALS],
    "How-to": [*(f"docs/how-to/{name}" for name in HOW_TO), "docs/gpu", "docs/colab"],
    "Concepts": [f"docs/concepts/{name}" for name in CONCEPTS],
    "Coming from": [f"docs/coming-from/{name}" for name in ("art", "trl", "verl", "tinker")],
    "Reference": ["docs/options", "api/index"],
    "Project": [
        "docs/architecture",
        "docs/benchmarks",
        "docs/performance",
        "docs/audit-2026-11",
        "docs/platforms",
        "docs/hosts",
        "CONTRIBUTING",
        "CHANGELOG",
    ],
}


def copy_pages() -> None:
    """Copy the pages, notebooks and images of the repository to the source directory."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    ignored = shutil.ignore_patterns(".art", ".ipynb_checkpoints", "__pycache__", "site", "README.md")
    for folder in ("docs", "examples", "nbs"):
        shutil.copytree(ROOT / folder, SOURCE / folder, ignore=ignored)
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, SOURCE)
    shutil.copy(ROOT / "README.md", SOURCE / "index.md")
    shutil.copy(ROOT / "docs" / "site" / "conf.py", SOURCE)
    for name in ("index.ipynb", "llms.txt"):  # the README is the first page
        (SOURCE / "nbs" / name).unlink()


def site_link(match: re.Match, page: Path) -> str:
    """Return a link of a page as it is in the site: a folder is its index notebook, a file outside is its text."""
    text, target = match.groups()
    if "://" in target or target.startswith("#"):
        return match[0]
    path, hash_, anchor = target.partition("#")
    path = path.replace("README.md", "index.md")
    if (page.parent / path).is_dir():
        path = f"{path}/index.ipynb"
    return f"[{text}]({path}{hash_}{anchor})" if (page.parent / path).is_file() else text


def without_directives(cell: dict) -> dict:
    """Return a cell without nbdev's directives. A hidden cell is empty."""
    source = "".join(cell["source"])
    return cell | {"source": "" if HIDE.search(source) else DIRECTIVE.sub("", source).strip()}


def fix_pages() -> None:
    """Change the relative links of all pages to targets in the site, and remove nbdev's directives."""

    def with_site_links(text: str, page: Path) -> str:
        return re.sub(r"(?<!!)\[([^\[\]]+)\]\(([^()\s]+)\)", lambda match: site_link(match, page), text)

    for page in SOURCE.rglob("*.md"):
        page.write_text(with_site_links(page.read_text(), page))
    for page in SOURCE.rglob("*.ipynb"):
        notebook = json.loads(page.read_text())
        notebook["cells"] = [cell for cell in map(without_directives, notebook["cells"]) if cell["source"]]
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = with_site_links(cell["source"], page)
        page.write_text(json.dumps(notebook))


def public_names() -> dict[str, str]:
    """Return the public names with the module that defines each of them."""
    names = {f"art.{name}": f"art_nb.{art_nb._MODULE_OF[name]}" for name in art_nb._MODULE_OF}
    for package in art_nb._PACKAGES:
        module = importlib.import_module(f"art_nb.{package}")
        for name in getattr(module, "__all__", ()):
            if name not in art_nb._MODULE_OF:
                value = getattr(module, name)
                names[f"art_nb.{package}.{name}"] = getattr(value, "__module__", module.__name__)
    return names


def notebook_of(module: str) -> str | None:
    """Return the page of the notebook that exports a module."""
    package, _, name = module.removeprefix("art_nb.").partition(".")
    paths = [*ROOT.glob(f"nbs/*_{package}/{f'*_{name}' if name else 'index'}.ipynb")]
    return str(paths[0].relative_to(ROOT).with_suffix("")) if paths else None


def description(name: str, module: str) -> list[str]:
    """Return the lines that document a public name: from its docstring, or its value if it is a constant."""
    attribute = name.rpartition(".")[2]
    path, value = f"{module}.{attribute}", getattr(importlib.import_module(module), attribute)
    if inspect.isclass(value) or inspect.isfunction(value):
        return [f".. {'autoclass' if inspect.isclass(value) else 'autofunction'}:: {path}"]
    if isinstance(value, dict):
        value = ", ".join(value)
    return [f".. py:data:: {path}", "", "   ::", "", *(f"      {line}" for line in str(value).splitlines())]


def write_api() -> None:
    """Write a page for each public name, and their list."""
    (SOURCE / "api").mkdir()
    names = public_names()
    for name, module in names.items():
        page = [name, "=" * len(name), "", *description(name, module), ""]
        if notebook := notebook_of(module):
            page += [f"Examples: :doc:`{notebook.removeprefix('nbs/')} </{notebook}>`", ""]
        (SOURCE / "api" / f"{name}.rst").write_text("\n".join(page))
    first = "The names of `art` come first (`import art_nb as art`). Each page has the parameters and the source."
    index = ["API", "===", "", first, "", ".. toctree::", "   :maxdepth: 1", "", *(f"   {name}" for name in names), ""]
    (SOURCE / "api" / "index.rst").write_text("\n".join(index))


def write_contents() -> None:
    """Append the table of contents to the first page, and to the page of each package."""
    packages = sorted((SOURCE / "nbs").iterdir())
    sections = SECTIONS | {"Modules": [f"nbs/{package.name}/index" for package in packages]}
    toctrees = [
        "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])
        for caption, pages in sections.items()
    ]
    with (SOURCE / "index.md").open("a") as file:
        file.writelines(toctrees)
    for package in packages:
        index = package / "index.ipynb"
        notebook = json.loads(index.read_text())
        pages = sorted(file.stem for file in package.glob("*.ipynb") if file != index)
        source = "\n".join(["```{toctree}", ":maxdepth: 1", "", *pages, "```"])
        notebook["cells"].append({"cell_type": "markdown", "id": "contents", "metadata": {}, "source": source})
        index.write_text(json.dumps(notebook))


ACCESSIBILITY = {  # what axe-core finds in pages of the theme, and the correction
    'class="caption" role="heading"': 'class="caption" role="heading" aria-level="2"',
    '<aside class="sidebar-drawer"': '<aside class="sidebar-drawer" aria-label="Contents"',
    "<pre>": '<pre tabindex="0">',
    '<div class="table-wrapper': '<div tabindex="0" class="table-wrapper',
    '<div style="overflow-x:auto">': '<div style="overflow-x:auto" tabindex="0">',  # tables of saved outputs
}
EMPTY_HEADER = re.compile(r"<th( [^>]*)?>(?:<p></p>)?</th>")


def correct_pages() -> None:
    """Make headings, landmarks, tables and wide code usable with a screen reader and a keyboard."""
    for file in OUTPUT.rglob("*.html"):
        text = file.read_text()
        for old, new in ACCESSIBILITY.items():
            text = text.replace(old, new)
        file.write_text(EMPTY_HEADER.sub(r"<td\1></td>", text))


def main() -> int:
    """Build the site and return the exit status of Sphinx. Warnings are errors."""
    copy_pages()
    fix_pages()
    write_api()
    write_contents()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    status = sphinx_build(["-q", "-W", "--keep-going", "-b", "html", str(SOURCE), str(OUTPUT)])
    correct_pages()
    return status


if __name__ == "__main__":
    sys.exit(main())
