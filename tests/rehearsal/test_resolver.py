"""The extras can be installed together on each Python, and on Colab's image.

A solution for all extras is also a solution for each of their combinations. For fewer extras, uv can choose newer
versions. Therefore, the combinations that the documentation names are resolved too.
`ART_NB_TESTS=full make rehearse` resolves all combinations.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.audit import count
from support.extras import EXTRAS, FACTS, NoSolution, requirements_of, resolve

pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(find_spec("uv") is None, reason="uv is not installed (it is in the dev extra)"),
]
ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
DOCUMENTED = [tuple(EXTRAS), ("local", "unsloth"), ("local", "vllm")]
EVERY = [chosen for size in range(len(EXTRAS), -1, -1) for chosen in combinations(EXTRAS, size)]
CASES = [(python, chosen) for chosen in count(EVERY, DOCUMENTED) for python in PYTHONS]
COLAB_PYTHON = "3.13"
MOVED = {"transformers", "gguf", "jupyter-ui-poll", "llguidance", "tokenizers", "huggingface-hub"}  # Colab's cell moves
COLAB = {  # requirements, and a version that must be found; None: there is no solution
    "local": (requirements_of(["local"]), {"torch": "2.11.0"}),
    "local and Unsloth": (requirements_of(["local", "unsloth"]), {"torch": "2.11.0", "transformers": "5.17.0"}),
    "local and vLLM": (requirements_of(["local", "vllm"]), None),  # vLLM 0.32 needs torch 2.13
    "local, Unsloth and vLLM 0.26": (
        [*requirements_of(["local", "unsloth"]), "vllm>=0.24,<0.27"],
        {"torch": "2.11.0", "vllm": "0.26.0"},
    ),
}
POOL = ThreadPoolExecutor(4)  # uv mostly waits for the network


FOLDER = TemporaryDirectory(prefix="art-nb-resolver-")


@cache
def colab_constraints() -> Path:
    """Write the constraints of Colab's image, without the packages that our cell installs in other versions."""
    lines = (ROOT / "tests" / "colab.txt").read_text().splitlines()
    path = Path(FOLDER.name) / "colab.txt"
    path.write_text("\n".join(line for line in lines if canonicalize_name(line.partition("==")[0]) not in MOVED))
    return path


@cache
def started(python, extras):
    """Start to resolve a combination of extras."""
    return POOL.submit(resolve, python, requirements_of(extras))


@cache
def started_on_colab(name):
    """Start to resolve requirements with the constraints of Colab's image."""
    return POOL.submit(resolve, COLAB_PYTHON, COLAB[name][0], colab_constraints())


def start_early():
    """Start all of it, because it waits for the network while other tests run."""
    for case in CASES:
        started(*case)
    for name in COLAB:
        started_on_colab(name)


@pytest.mark.parametrize(("python", "extras"), CASES, ids=lambda c: c if isinstance(c, str) else "+".join(c))
def test_extras_resolve_together(python, extras, report):
    versions = started(python, extras).result()
    for extra in extras:
        for requirement in map(Requirement, FACTS[f"{extra}_requirements"].split()):
            version = versions[canonicalize_name(requirement.name)].partition(" ")[0]
            assert requirement.specifier.contains(version, prereleases=True), requirement
    shown = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "transformers", "vllm", "unsloth") if name in versions
    )
    report(
        "resolved versions",
        f"Python {python}: {'all extras' if len(extras) == len(EXTRAS) else '+'.join(extras)}: {shown}",
    )


@pytest.mark.parametrize("name", COLAB)
def test_extras_on_colabs_image(name, report):
    expected = COLAB[name][1]
    if expected is None:
        with pytest.raises(NoSolution, match="torch==2.13"):
            started_on_colab(name).result()
        report("resolved versions", f"Colab: {name}: no solution, because vLLM needs another torch")
        return
    versions = started_on_colab(name).result()
    assert {package: versions[package] for package in expected} == expected
    report("resolved versions", f"Colab: {name}: " + ", ".join(f"{p} {v}" for p, v in expected.items()))
