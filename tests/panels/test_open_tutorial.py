"""The JupyterLab of `make lab`: its start page, and notebooks that are opened and saved without changes."""

import copy
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from traitlets.config.loader import PyFileConfigLoader

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tools/jupyter/jupyter_server_config.py"
START = ROOT / "examples/README.md"
SPEC = {"display_name": "python3", "language": "python", "name": "python3"}
LAB_METADATA = {"kernelspec": SPEC | {"display_name": "Python 3 (ipykernel)"}, "language_info": {"name": "python"}}


def test_opening_a_tutorial_changes_nothing(lab):
    path = ROOT / "examples/tic_tac_toe/tic-tac-toe.ipynb"
    notebook = lab(path)
    notebook.page.wait_for_selector(".jp-mod-dirty")  # JupyterLab has set the kernel's metadata and would save it
    notebook.save()
    saved = (notebook.lab.folder / "notebooks" / notebook.name).read_text(encoding="utf-8")
    assert saved == path.read_text(encoding="utf-8")


def test_the_start_page_opens_a_tutorial(lab_server, browser):
    for path in ("examples/README.md", "examples/yes_no_maybe/yes-no-maybe.ipynb", "docs/start/first-task.md"):
        (lab_server.folder / "notebooks" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, lab_server.folder / "notebooks" / path)
    page = browser.new_page()

    def follow(text: str, workspace: str) -> None:  # a workspace of its own has no tabs that JupyterLab would restore
        start = f"{lab_server.url}/lab/workspaces/{workspace}/tree/examples/README.md?token={lab_server.token}"
        page.goto(start)
        link = page.locator(".jp-RenderedMarkdown a", has_text=text)  # rendered, and not the source
        link.click(timeout=120_000)

    follow("Yes, no, maybe", "notebook")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=120_000)
    assert page.url.endswith("/examples/yes_no_maybe/yes-no-maybe.ipynb")
    follow("Your first task in fifteen minutes", "page")
    page.locator(".jp-RenderedMarkdown h1", has_text="first task").wait_for(timeout=120_000)
    page.close()


def test_the_links_of_the_start_page_exist():
    links = re.findall(r"\]\(([^)#:]+)\)", START.read_text(encoding="utf-8"))
    assert links and not [link for link in links if not (START.parent / link).exists()]


def test_the_start_page_lists_all_tutorials():
    linked = set(re.findall(r"\]\(([\w/-]+\.ipynb)\)", START.read_text(encoding="utf-8")))
    assert linked == {path.relative_to(START.parent).as_posix() for path in START.parent.glob("*/*.ipynb")}


def test_make_lab_uses_the_settings_and_opens_the_start_page():
    target = (ROOT / "Makefile").read_text(encoding="utf-8").split("\nlab:")[1].split("\n\n")[0]
    assert "JUPYTER_CONFIG_PATH=$(CURDIR)/tools/jupyter " in target
    assert "--notebook-dir=. " in target and "default_url=/lab/tree/examples/README.md " in target


@pytest.mark.parametrize(
    ("on_disk", "expected"),
    [
        ({"kernelspec": SPEC}, {"kernelspec": SPEC}),
        ({"kernelspec": SPEC | {"name": "other"}}, {"kernelspec": LAB_METADATA["kernelspec"]}),  # another kernel
        ({}, LAB_METADATA),  # as JupyterLab creates a notebook
        (LAB_METADATA, LAB_METADATA),
        (None, LAB_METADATA),  # no such file
        ("damaged", LAB_METADATA),
    ],
)
def test_only_clean_notebooks_keep_their_metadata(tmp_path, on_disk, expected):
    if on_disk is not None:
        (tmp_path / "a.ipynb").write_text(json.dumps({"metadata": on_disk}))
    hook = PyFileConfigLoader(str(CONFIG)).load_config().ContentsManager.pre_save_hook
    model = {"type": "notebook", "content": {"cells": [], "metadata": copy.deepcopy(LAB_METADATA)}}
    hook(model=model, path="/a.ipynb", contents_manager=SimpleNamespace(root_dir=str(tmp_path)))
    assert model["content"]["metadata"] == expected


def test_text_files_are_saved_as_they_are(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    hook = PyFileConfigLoader(str(CONFIG)).load_config().ContentsManager.pre_save_hook
    model = {"type": "file", "content": "new"}
    hook(model=model, path="a.txt", contents_manager=SimpleNamespace(root_dir=str(tmp_path)))
    assert model == {"type": "file", "content": "new"}
