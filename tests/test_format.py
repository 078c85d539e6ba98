"""Formatting of Python and JavaScript, types, and the unit tests of the panels' JavaScript."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
JS = ROOT / "js"


def run(*command, cwd=ROOT):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def npm():
    """The path of npm. Without npm or the installed packages the tests are skipped, unless ART_NB_BROWSER=required."""
    path = shutil.which("npm")
    if path and (JS / "node_modules").is_dir():
        return path
    if os.environ.get("ART_NB_BROWSER") == "required":
        pytest.fail("ART_NB_BROWSER=required, and npm or js/node_modules is missing: run `npm ci` in js/")
    pytest.skip("npm or js/node_modules is missing: run `npm ci` in js/")


def test_python_is_formatted():
    done = run(
        sys.executable, "-m", "ruff", "format", "--check", "nbs", "tests", "examples", "benchmarks", "tools", "docs"
    )
    assert done.returncode == 0, (
        f"run `ruff format nbs tests examples benchmarks tools docs`\n{done.stdout}{done.stderr}"
    )


def test_javascript_is_formatted(npm):
    done = run(npm, "run", "format:check", cwd=JS)
    assert done.returncode == 0, f"run `npm run format` in js/\n{done.stdout}{done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 90 seconds of one processor, which a busy machine does not give
def test_types(npm):
    done = run(JS / "node_modules/.bin/pyright", "--pythonpath", sys.executable, "--level", "error")
    assert done.returncode == 0, f"run `js/node_modules/.bin/pyright`\n{done.stdout}{done.stderr}"


def test_javascript_functions(npm):
    done = run(npm, "test", cwd=JS)
    assert done.returncode == 0, done.stdout + done.stderr
