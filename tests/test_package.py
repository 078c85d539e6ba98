"""`make wheel` builds a wheel and an sdist: complete, small, without compiled code, with one version number."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from email import message_from_string
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILES = ["pyproject.toml", "settings.ini", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"]
MAX_BYTES = 2 << 20  # of the wheel and of the sdist


@pytest.fixture(scope="module")
def facts():
    ini = ConfigParser(delimiters=["="])
    ini.read(ROOT / "settings.ini", encoding="utf-8")
    return ini["DEFAULT"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A directory with the sdist and the wheel, built by the command of `make wheel` from a copy of the repository."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in FILES:
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "art_nb", source / "art_nb", ignore=shutil.ignore_patterns("__pycache__"))
    (source / "tests").mkdir()
    (source / "tests" / "test_some.py").touch()  # setuptools would add it to the sdist
    command = re.search(r"\t\$\(BIN\)/python (-m build .*)", (ROOT / "Makefile").read_text(encoding="utf-8"))[1]
    done = subprocess.run(
        [sys.executable, *command.split(), "--outdir", target], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return target


@pytest.fixture(scope="module")
def wheel(dist):
    """The files of the wheel, which was built from the sdist."""
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def sdist(dist):
    """The names of the files in the sdist."""
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_make_install_ends_with_the_next_step():
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").split("\ninstall: weights")[1].split("\n\n")[0]
    own_task = "For your own task, in a new folder: . $(abspath $(BIN))/activate, then art-nb init"
    assert recipe.splitlines()[-1] == f'\t@echo "Next: make demo, or make lab. {own_task}"'


def metadata(wheel, name):
    return next(content for path, content in wheel.items() if path.endswith(f".dist-info/{name}")).decode()


def library_files():
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "art_nb").rglob("*") if path.is_file()}
    return {path for path in files if "__pycache__" not in path and not Path(path).name.startswith(".")}


def test_everything_is_in_it(wheel, sdist):
    ours = library_files()
    assert "art_nb/py.typed" in ours
    assert not ours - wheel.keys()
    assert not {*ours, *FILES} - sdist
    assert not [name for name in sdist if name.startswith("tests")]


def test_the_script_and_style_sheet_of_each_panel_are_in_it(wheel):
    modules = [content.decode() for name, content in wheel.items() if name.startswith("art_nb/panels/")]
    panels = {name for module in modules for name in re.findall(r'_esm, _css = static\("(\w+)"\)', module)}
    assert {"viewer", "live", "judging"} <= panels
    assert not {f"art_nb/static/{name}.{kind}" for name in panels for kind in ("js", "css")} - wheel.keys()


def test_both_are_small_and_need_no_compiler(dist, wheel):
    assert "\nRoot-Is-Purelib: true\n" in metadata(wheel, "WHEEL")
    assert "\nTag: py3-none-any\n" in metadata(wheel, "WHEEL")
    assert all(path.stat().st_size < MAX_BYTES for path in dist.iterdir())


def test_the_metadata_equals_settings_ini(wheel, facts):
    said = message_from_string(metadata(wheel, "METADATA"))
    assert said["Version"] == facts["version"]
    assert said["Requires-Python"] == f">={facts['min_python']}"
    pythons = [name.rpartition(" ")[2] for name in said.get_all("Classifier")]
    assert pythons == facts["tested_pythons"].split()
    extras = {key.removesuffix("_requirements") for key in facts if key.endswith("_requirements")}
    assert set(said.get_all("Provides-Extra")) == extras


def test_without_an_extra_no_torch_is_installed(wheel):
    said = message_from_string(metadata(wheel, "METADATA")).get_all("Requires-Dist")
    base = {re.match(r"[\w.-]+", line)[0] for line in said if "extra ==" not in line}
    assert "anywidget" in base
    assert not base & {"torch", "transformers", "peft", "vllm", "unsloth"}


def test_the_licence_is_in_it(wheel):
    assert any(path.endswith("/LICENSE") for path in wheel)


def test_the_version_is_written_in_settings_ini_only(facts):
    """The changelog and the pages that name the wheel cannot compute it, so they are compared."""
    assert "version" not in json.loads((ROOT / "js" / "package.json").read_text(encoding="utf-8"))
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[1]
    pages = [page for pattern in ("*.md", "docs/**/*.md", "[en]*/**/*.ipynb") for page in ROOT.glob(pattern)]
    wheels = [re.findall(r"art_nb-(\d[\d.]*\d)[-.](?:py3|tar)", page.read_text(encoding="utf-8")) for page in pages]
    assert {newest, *sum(wheels, [])} == {facts["version"]}


def test_the_workflow_for_ci_names_files_that_exist():
    workflow = yaml.safe_load((ROOT / "docs" / "ci" / "github-actions.yml").read_text(encoding="utf-8"))
    commands = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    named = set(re.findall(r"(?:tests/[\w./]+|\.ci/\w+|constraints\.txt)", "\n".join(commands)))
    assert {".ci/run", "constraints.txt", "tests/test_package.py"} <= named
    assert not [name for name in named if not (ROOT / name).exists()]
