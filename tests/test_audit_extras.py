"""The extras of settings.ini can be installed together, on every Python that we support."""

import re
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.audit import count
from support.extras import EXTRAS, FACTS, requirements_of, resolve

ROOT = Path(__file__).parents[1]
PYTHONS = ["3.11", "3.12", "3.13"]
COMBINATIONS = [chosen for size in range(len(EXTRAS), -1, -1) for chosen in combinations(EXTRAS, size)]
# All extras together are the hardest combination: its solution is one of every other.
CASES = [(python, chosen) for chosen in count(COMBINATIONS, COMBINATIONS[:1]) for python in count(PYTHONS, PYTHONS[:1])]


@pytest.mark.net
@pytest.mark.skipif(find_spec("uv") is None, reason="uv is not installed (it is in the dev extra)")
@pytest.mark.parametrize(("python", "extras"), CASES, ids=lambda c: c if isinstance(c, str) else "+".join(c))
def test_extras_resolve_together(python, extras):
    """Before, local and unsloth had no common solution: `transformers>=5.19` against Unsloth's `<=5.17.0`."""
    versions = resolve(python, requirements_of(extras))
    for extra in extras:
        for requirement in map(Requirement, FACTS[f"{extra}_requirements"].split()):
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            assert requirement.specifier.contains(versions[name].partition(" ")[0], prereleases=True), name


def test_what_the_readme_tells_to_install_are_extras():
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "nbs").rglob("*.ipynb")]
    typed = re.findall(r"(?:'\.|art_nb)\[([\w,]+)\]", "".join(path.read_text(encoding="utf-8") for path in texts))
    assert {"local", "local,vllm", "unsloth", "judge", "wandb"} <= {*typed}
    assert {extra for one in typed for extra in one.split(",")} <= {*EXTRAS}


PINNED = [
    ROOT / "constraints.txt",
    ROOT / "docs/site/requirements.txt",
    *sorted((ROOT / "benchmarks/peers").rglob("*.txt")),
]


@pytest.mark.parametrize("path", PINNED, ids=lambda path: path.name)
def test_every_pinned_package_has_hashes(path):
    """Before, 191 versions were pinned without a hash."""
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?://|--[a-z-]*index|--find-links", text), "a registry is the user's choice"
    hashes = r"(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+"
    entries = re.findall(r"^[A-Za-z0-9][\w.-]*==[^\n]*\\\n" + hashes, text, re.MULTILINE)
    assert len(entries) == len(re.findall(r"^[A-Za-z0-9]", text, re.MULTILINE)) > 0


def test_constraints_cover_what_the_extras_ask_for():
    lines = re.findall(r"^([A-Za-z0-9][\w.-]*)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {name.lower().replace("_", "-"): version for name, version in lines}
    wanted = f"{FACTS['requirements']} {FACTS['local_requirements']} {FACTS['dev_requirements']}".split()
    for requirement in map(Requirement, wanted):
        name = requirement.name.lower().replace("_", "-")
        assert name == "torch" or requirement.specifier.contains(pinned[name], prereleases=True), name


def test_every_install_of_the_makefile_requires_hashes():
    """torch is the exception, chosen by the user; the project itself cannot be hashed and installs no dependency."""
    installs = re.findall(r"pip install (.*)", (ROOT / "Makefile").read_text())
    assert len(installs) == 3
    assert '"--require-hashes"' in (ROOT / "tools" / "install.py").read_text()
    for options in installs:
        assert "--require-hashes" in options or options.endswith(("$(TORCH)", "--no-deps --no-build-isolation -e ."))
