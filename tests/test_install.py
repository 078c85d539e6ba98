"""The wheel in an empty environment: bare, it imports neither torch nor widgets; with [local], the ten lines run."""

import os
import re
import subprocess
import sys

import pytest

RUN_LINES = """
import ast, asyncio, sys
code = compile(sys.stdin.read(), "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
asyncio.run(eval(code, {"__name__": "__main__"}))
"""
IMPORT = """
import sys
before = set(sys.modules)
import art_nb as art
loaded = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": "hello"}], reward=1.0)
heavy = {"torch", "transformers", "anywidget", "ipywidgets"} & set(sys.modules)
print(*sorted(loaded), sorted(heavy), trajectory.reward)
"""


def call(*command, **options):
    """Run a command and give what it printed; its failure is the test's."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(root, tmp_path_factory):
    """The wheel, built from what git would clone and what is new beside it."""
    source, target = tmp_path_factory.mktemp("source") / "art_nb", tmp_path_factory.mktemp("wheel")
    listed = call("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=root).splitlines()
    for name in listed:
        if (root / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((root / name).read_bytes())
    call(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", target, source)
    return next(target.glob("*.whl"))


@pytest.fixture
def install(tmp_path):
    """A function that installs requirements into a new, empty environment and gives its Python."""
    python = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    call(sys.executable, "-m", "venv", tmp_path / "venv")

    def install(*requirements):
        if requirements:
            call(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile", *requirements)
        return python

    return install


def pinned(root, *names):
    """Return the entries of packages in constraints.txt, with their hashes."""
    entries = re.findall(r"^[a-z].*==(?:.*\\\n)*.*\n", (root / "constraints.txt").read_text(), re.MULTILINE)
    return "".join(entry for entry in entries if entry.partition("==")[0] in names)


def test_pinned_packages_are_installed_in_parallel(root, install, tmp_path):
    python, file = install(), tmp_path / "pins.txt"
    file.write_text(pinned(root, "idna", "h11", "sniffio"))
    assert call(python, root / "tools" / "install.py", file).splitlines()[-1] == "3 packages are installed."
    call(python, "-c", "import h11, idna, sniffio")


def test_the_installer_counts_packages_of_this_machine_and_prints_a_kind_of_warning_once(root, install, tmp_path):
    python, file = install(), tmp_path / "pins.txt"
    other = re.sub(r" \\", ' ; sys_platform == "other" \\\\', pinned(root, "sniffio"), count=1)
    file.write_text(pinned(root, "idna") + other)
    env = os.environ | {"PIP_FIND_LINKS": f"{tmp_path}/no-a {tmp_path}/no-b"}
    command = [python, root / "tools" / "install.py", file]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert done.stdout.splitlines()[-1] == "1 packages are installed."
    assert done.stderr.count("a non-existing path") == 1


def test_a_wrong_hash_is_an_error_with_the_output_of_pip(root, install, tmp_path):
    python, file = install(), tmp_path / "pins.txt"
    file.write_text(pinned(root, "idna", "h11") + "sniffio==1.3.1 \\\n    --hash=sha256:" + "0" * 64 + "\n")
    done = subprocess.run([python, root / "tools" / "install.py", file], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip failed with exit code 1." in done.stderr and "sniffio" in done.stderr


@pytest.mark.slow
def test_the_bare_wheel_imports_one_other_package(wheel, install, tmp_path):
    assert call(install(wheel), "-c", IMPORT, cwd=tmp_path).split() == ["art_nb", "lazy_loader", "[]", "1.0"]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_local_extra_runs_the_ten_lines_of_the_readme(root, wheel, install, tmp_path):
    """With the newest generation of the OpenAI client, which the judges' LiteLLM keeps out of the developers' own."""
    pinned = re.findall(r"^[A-Za-z0-9][^\\\n]*", (root / "constraints.txt").read_text(), re.MULTILINE)
    (tmp_path / "pins.txt").write_text("\n".join(pin for pin in pinned if not pin.startswith("openai==")))
    install("torch==2.13.0", "-c", tmp_path / "pins.txt")
    python = install(f"{wheel}[local]", "-c", tmp_path / "pins.txt")
    [lines] = re.findall(r"## Ten lines.*?```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    told = call(python, "-c", RUN_LINES, input=lines, cwd=tmp_path, env=env, timeout=800)
    rewards = [float(number) for number in re.findall(r"-?\d+\.\d+", told.splitlines()[-1])]
    assert len(rewards) == 10
    assert max(rewards[-3:]) > rewards[0]  # briefer than at the start


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_judge_extra_brings_a_litellm_that_judges(root, wheel, install, tmp_path):
    """LiteLLM wants an older OpenAI client than the rest of the tests run with."""
    testing = ["pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"]
    python = install(f"{wheel}[judge]", *testing)
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-k", "litellm and not without"]
    told = call(python, "-m", "pytest", *options, root / "tests" / "rewards" / "test_ruler.py", cwd=tmp_path)
    assert "2 passed" in told
    assert "skipped" not in told
