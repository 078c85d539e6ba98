"""The modules are what the notebooks export, and README.md is what index.ipynb says."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def modules(folder):
    """Every module's text by its path."""
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}


def run(*command, cwd=ROOT):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_export_is_current(tmp_path):
    """Fails after an edit of a .py file, a forgotten export, or a renamed notebook whose old module stayed."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "nbs", tmp_path / "nbs", ignore=shutil.ignore_patterns(".*"))
    (tmp_path / "art_nb").mkdir()
    shutil.copy(ROOT / "art_nb" / "__init__.py", tmp_path / "art_nb")
    done = run(str(Path(sys.executable).with_name("nbdev-export")), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ours, exported = modules(ROOT / "art_nb"), modules(tmp_path / "art_nb")
    stale = sorted(name for name in ours.keys() | exported.keys() if ours.get(name) != exported.get(name))
    assert not stale, f"run `make export`; these modules differ from their notebooks: {stale}"


def test_readme_is_current():
    assert run(sys.executable, "tools/readme.py", "--check").returncode == 0, "run `make export`"


def test_stubs_are_current():
    assert run(sys.executable, "tools/stubs.py", "--check").returncode == 0, "run `make export`"
