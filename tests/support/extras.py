"""The extras of settings.ini, and the versions that uv would install."""

import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = ConfigParser(delimiters=["="])
SETTINGS.read(ROOT / "settings.ini", encoding="utf-8")
FACTS = SETTINGS["DEFAULT"]
EXTRAS = sorted(name.removesuffix("_requirements") for name in FACTS if name.endswith("_requirements"))
UV_FAILED = 2  # the exit code of everything but a missing solution


class NoSolution(AssertionError):
    """An error for requirements that contradict each other."""


def requirements_of(extras) -> list[str]:
    """Return the requirements of the package with some extras."""
    return FACTS["requirements"].split() + [r for extra in extras for r in FACTS[f"{extra}_requirements"].split()]


def resolve(python: str, requirements: list[str], constraints: Path | None = None) -> dict[str, str]:
    """Return the versions uv would install, by name. Skip the test if the registry cannot be reached."""
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "-q",
        "--no-config",
        "--no-header",
        "--no-annotate",
        "--python-version",
        python,
        "--python-platform",
        "x86_64-manylinux_2_28",
        *(["-c", str(constraints)] if constraints else []),
        "-",
    ]
    done = subprocess.run(command, input="\n".join(requirements), capture_output=True, text=True, check=False)
    if done.returncode == UV_FAILED and re.search(r"(?i)failed to (fetch|download)|connect|dns|timed out", done.stderr):
        pytest.skip(f"no package registry: {done.stderr.strip().splitlines()[0]}")
    if done.returncode:
        raise NoSolution(done.stderr)
    return dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)
