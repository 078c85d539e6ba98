"""Colab's first cell: what it brings fits the image, and what the image must keep stays."""

import json
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
KEPT = {"torch", "numpy", "pandas", "ipykernel", "ipython", "ipywidgets"}
PYTHON = "3.13"


@pytest.fixture(scope="module")
def image():
    lines = (ROOT / "tests" / "colab.txt").read_text().splitlines()
    pins = [line.partition("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in pins}


@pytest.fixture(scope="module")
def brought(image):
    """The requirements that the image does not meet."""
    facts = ConfigParser(delimiters=["="])
    facts.read(ROOT / "settings.ini", encoding="utf-8")
    ours = facts["DEFAULT"]
    wanted = map(Requirement, f"{ours['requirements']} {ours['local_requirements']}".split())
    return [r for r in wanted if not r.specifier.contains(image.get(canonicalize_name(r.name), "0"), prereleases=True)]


def test_the_image_keeps_what_is_its_own(image, brought):
    assert KEPT <= image.keys()
    assert {r.name for r in brought} == {"transformers", "gguf", "jupyter-ui-poll", "llguidance"}
    cell = (ROOT / "docs" / "colab.md").read_text().split("```python\n")[1].split("```")[0]
    kept = cell.split("'^(")[1].split(")==")[0].split("|")
    assert KEPT <= set(kept)


@pytest.mark.net
def test_what_is_brought_fits_the_image(image, brought, tmp_path):
    moved = {canonicalize_name(r.name) for r in brought} | {"tokenizers", "huggingface-hub"}
    constraints = tmp_path / "kept.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in image.items() if name not in moved))
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--quiet",
        "--ignore-installed",
        "--report",
        "-",
        "--only-binary=:all:",
        "--python-version",
        PYTHON,
        "--target",
        str(tmp_path / "none"),
        "-c",
        str(constraints),
        *map(str, brought),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {
        canonicalize_name(one["metadata"]["name"]): one["metadata"]["version"]
        for one in json.loads(done.stdout)["install"]
    }
    changed = {name for name, version in found.items() if image.get(name) != version}
    assert "transformers" in changed
    assert not changed & KEPT, changed
