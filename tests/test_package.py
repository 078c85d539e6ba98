"""The wheel holds every module, every static file, the type marker and the version of settings.ini."""

import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = ["pyproject.toml", "settings.ini", "setup.py", "README.md", "LICENSE"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy so that no build directory is left here."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in FILES:
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "art_nb", source / "art_nb", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", target, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(target.glob("*.whl"))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel, name):
    return next(content for path, content in wheel.items() if path.endswith(f".dist-info/{name}")).decode()


def test_everything_is_in_it(wheel):
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "art_nb").rglob("*") if path.is_file()}
    ours = {path for path in ours if "__pycache__" not in path and not Path(path).name.startswith(".")}
    assert "art_nb/py.typed" in ours
    assert not ours - wheel.keys()


def test_the_metadata_equals_settings_ini(wheel):
    ini = ConfigParser(delimiters=["="])
    ini.read(ROOT / "settings.ini", encoding="utf-8")
    facts, said = ini["DEFAULT"], metadata(wheel, "METADATA")
    assert f"\nVersion: {facts['version']}\n" in said
    assert f"\nRequires-Python: >={facts['min_python']}\n" in said
    for key in facts:
        if key.endswith("_requirements"):
            assert f"\nProvides-Extra: {key.removesuffix('_requirements')}\n" in said


def test_the_licence_is_in_it(wheel):
    assert any(path.endswith("/LICENSE") for path in wheel)
