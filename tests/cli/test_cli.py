"""`art-nb` as a person meets it: real processes, exit statuses, one sentence for each mistake."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import webbrowser
from configparser import ConfigParser
from pathlib import Path

import pytest
from support.remote_parts import MAIN, command
from support.warm import warm_python

import art_nb as art
from art_nb.cli.main import open_notebook, write_pages

ROOT = Path(__file__).parents[2]
VERBS = ["run", "train", "view", "doctor", "init", "migrate", "help"]
HEAVY = ["torch", "transformers", "numpy", "openai", "pydantic", "httpx", "starlette", "anywidget", "pyarrow"]
SMALL = ["--groups-per-step", "2", "--rollouts-per-group", "4"]
SCRIPT = """
import asyncio
import art_nb as art

scenarios = ["a", "b"]

async def rollout(model, scenario):
    messages = [{"role": "user", "content": scenario}]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=4, logprobs=True)
    choice = completion.choices[0]
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=float(len(choice.message.content)))
"""


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def call(*words, folder=None, code=None):
    line = [*(code or command()), *map(str, words)]
    return subprocess.run(line, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def refused(done):
    """The one sentence of a refusal."""
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("art-nb: ")]
    return said


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "toy.py"
    path.write_text(SCRIPT)
    return path


# help


def test_help_is_there_at_once():
    source = (
        "import sys; from art_nb.cli.main import parser; parser().format_help(); "
        "print(sorted({*sys.argv[1:]} & {*sys.modules}))"
    )
    done = call(*HEAVY, code=[sys.executable, "-c", source])
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["help"], 0),
        *[(["help", verb], 0) for verb in VERBS],
        ([], 2),
        (["fly"], 2),
        (["view"], 1),
        (["train", "x.py", "--steps", "many"], 2),
        (["help", "fly"], 2),
    ],
)
def test_exit_statuses(words, status):
    done = call(*words)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert (done.stderr == "") == (status == 0)


def test_every_command_is_listed():
    said = call("--help").stdout
    assert all(f"\n    {verb}" in said for verb in VERBS)


def test_the_console_script_is_installed():
    ini = ConfigParser(delimiters=["="])
    ini.read(ROOT / "settings.ini", encoding="utf-8")
    assert "art-nb=art_nb.cli.main:main" in ini["DEFAULT"]["console_scripts"].split()


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["install-skills", "."], "art-nb init"),
        (["runtime", "prepare"], "art-nb doctor"),
        (["runtime", "status", "--size"], "art-nb doctor"),
    ],
)
def test_a_command_that_only_art_has_names_ours(words, instead):
    assert instead in refused(call(*words))


# init


def test_init_writes_and_never_overwrites(tmp_path):
    assert call("init", folder=tmp_path).returncode == 0
    before = (tmp_path / "first-run.ipynb").read_bytes()
    assert "already exists" in refused(call("init", folder=tmp_path))
    assert (tmp_path / "first-run.ipynb").read_bytes() == before
    assert "toy.py" in call("init", "toy.py", folder=tmp_path).stdout
    assert ".ipynb or .py" in refused(call("init", "toy.txt", folder=tmp_path))
    assert "No such file" in refused(call("init", "nowhere/toy.py", folder=tmp_path))


def test_the_script_trains_as_it_stands(tmp_path, tiny_model_dir):
    assert call("init", "toy.py", folder=tmp_path).returncode == 0
    done = call("train", "toy.py", "--steps", 1, "--base-model", tiny_model_dir, *SMALL, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    run = art.open_run(tmp_path / ".art" / "toy" / "models" / "desk-001")
    assert run.steps_saved() == [0, 1]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_starter_learns(tmp_path, smollm2_dir):
    assert call("init", "toy.py", folder=tmp_path).returncode == 0
    done = call("toy.py", folder=tmp_path, code=[warm_python()])
    assert done.returncode == 0, done.stderr
    rewards = json.loads(done.stdout.splitlines()[-1])
    assert sum(rewards[-3:]) / 3 > min(sum(rewards[:3]) / 3 + 0.2, 0.95)  # the best reward is 1


# train


def test_train_resumes(script, tiny_model_dir):
    options = ["--base-model", tiny_model_dir, "--learning-rate", "1e-2", *SMALL]
    first = call("train", script, "--steps", 1, *options, folder=script.parent)
    assert first.returncode == 0, first.stderr
    assert "done: step 1 of 1" in first.stdout
    second = call("train", script, "--steps", 3, *options, folder=script.parent)
    assert "done: step 3 of 3" in second.stdout, second.stderr
    run = art.open_run(script.parent / ".art" / "toy" / "models" / "toy")
    assert [row["step"] for row in run.history()] == [1, 2, 3]
    named = call("train", script, "--steps", 1, "--name", "b", "--project", "p", *options, folder=script.parent)
    assert named.returncode == 0, named.stderr
    assert art.open_run(script.parent / ".art" / "p" / "models" / "b").steps_saved() == [0, 1]


@pytest.mark.skipif(os.name != "posix", reason="a signal")
def test_ctrl_c_ends_after_the_step(script, tiny_model_dir):
    script.write_text(SCRIPT.replace("    messages =", "    print('rollout', flush=True)\n    messages ="))
    line = [*command(), "train", str(script), "--base-model", str(tiny_model_dir), *SMALL]
    process = subprocess.Popen(
        line, cwd=script.parent, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while process.stdout.readline() != "rollout\n":
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGINT)
    said, complaint = process.communicate(timeout=120)
    assert process.returncode == 130, complaint
    assert "Traceback" not in complaint
    assert "stopped: step" in said
    run = art.open_run(script.parent / ".art" / "toy" / "models" / "toy")
    reached = max(run.steps_saved())
    assert reached >= 1
    assert [row["step"] for row in run.history()] == list(range(1, reached + 1))
    steps = ["--steps", reached + 1, "--base-model", tiny_model_dir, *SMALL]
    assert f"done: step {reached + 1}" in call("train", script, *steps, folder=script.parent).stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n1 / 0\n", "line 2: ZeroDivisionError"),
        ("def\n", "line 1: SyntaxError"),
        ("import no_such_module", "line 1"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("rollout = print", "does not define `scenarios`"),
        ("", "does not define `rollout` and `scenarios`"),
        (
            "import art_nb as art; rollout, scenarios, model = print, [1], art.Model(name='a', project='b')",
            "not trainable",
        ),
        ("rollout, scenarios = print, []", "no scenarios"),
        ("rollout, scenarios = print, 3", "make it a list"),
    ],
)
def test_a_script_that_cannot_be_trained(tmp_path, tiny_model_dir, text, said):
    (tmp_path / "odd.py").write_text(text)
    assert said in refused(call("train", "odd.py", "--base-model", tiny_model_dir, folder=tmp_path))


def test_a_rollout_that_fails_is_told(script, tiny_model_dir):
    script.write_text(SCRIPT.replace("    messages =", "    raise KeyError('board')\n    messages ="))
    said = refused(call("train", script, "--base-model", tiny_model_dir, "--steps", 1, *SMALL, folder=script.parent))
    assert "in step 1: KeyError: 'board' (" in said
    line = script.read_text().splitlines().index("    raise KeyError('board')") + 1
    assert f"{script.name}, line {line}, in " in said
    assert "raise KeyError('board')" in said


def test_no_script_and_no_model(tmp_path, script):
    assert "Script nowhere.py not found" in refused(call("train", "nowhere.py", folder=tmp_path))
    assert "no base model 'smolm2'" in refused(call("train", script, "--base-model", "smolm2", folder=tmp_path))


# view


def test_view(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    for name in ("one", "two"):
        store = art.RunStore(tmp_path / ".art" / "games" / "models" / name)
        store.write_groups(
            "train",
            1,
            [
                art.TrajectoryGroup(
                    [
                        art.Trajectory(
                            messages_and_choices=[{"role": "user", "content": f"question of {name}"}], reward=0.25
                        )
                    ]
                )
            ],
        )
        store.append_history({"step": 1, "train/reward": 0.25})
    shown = Path(call("view", store.path, "--no-browser").stdout.strip())
    assert shown == store.path / "report-games-two.html"
    assert "question of two" in shown.read_text()
    listed = Path(call("view", tmp_path / ".art", "--no-browser").stdout.strip())
    assert listed == tmp_path / ".art" / "runs.html"
    address = "games/models/one/report-games-one.html"
    assert f'href="{address}"' in listed.read_text()
    assert "question of one" in (listed.parent / address).read_text()
    assert Path(call("view", tmp_path, "--no-browser").stdout.strip()) == listed
    for path in (tmp_path / "nowhere", tmp_path / ".art" / "games" / "models" / "one" / "history.jsonl"):
        assert refused(call("view", path, "--no-browser"))
        assert refused(call("view", path, "--no-browser", "--notebook"))
    assert "not both" in refused(call("view", store.path, "--live", "--notebook"))
    assert "need --live" in refused(call("view", store.path, "--port", "80"))
    assert not [*(tmp_path / "temporary").glob("art-nb-view-*")]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(os, "access", lambda place, mode: place != store.path)  # a directory of another user
    page = write_pages(store.path)
    assert page.name == "report-games-two.html" and page.parent.name.startswith("art-nb-view-")
    assert write_pages(tmp_path / ".art") == listed
    links = re.findall(r'href="([^"]+report-games-\w+\.html)"', listed.read_text())
    assert len(links) == 2 and all((listed.parent / link).exists() for link in links)


def test_a_machine_without_a_browser_gets_the_address_of_the_viewer(tmp_path, monkeypatch, capsys):
    def no_browser():
        raise webbrowser.Error("could not locate runnable browser")

    lines = []

    class Server:
        def __init__(self, line):
            lines.append(line)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def wait(self):
            return 0

    store = art.RunStore(tmp_path / ".art" / "games" / "models" / "one")
    store.write_groups("train", 1, [art.TrajectoryGroup([art.Trajectory(reward=0.25)])])
    monkeypatch.setattr(subprocess, "Popen", Server)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(webbrowser, "get", no_browser)
    assert open_notebook(store.path, tmp_path, False) == 0
    assert "--no-browser" in lines[0] and "as with --no-browser" in capsys.readouterr().out
    monkeypatch.setattr(webbrowser, "get", lambda: None)
    assert open_notebook(store.path, tmp_path, False) == 0
    assert "--no-browser" not in lines[1] and capsys.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_view_opens_the_viewer_in_a_notebook(tmp_path):
    store = art.RunStore(tmp_path / ".art" / "games" / "models" / "one")
    store.write_groups("train", 1, [art.TrajectoryGroup([art.Trajectory(reward=0.25)])])
    line = [*command(), "view", str(store.path), "--notebook", "--no-browser"]
    with subprocess.Popen(
        line, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        logs = []
        for log in process.stderr:
            logs.append(log)
            if "/lab/tree/view.ipynb?token=" in log:
                break
        [folder] = [Path(log.split(": ", 1)[1].strip()) for log in logs if "from local directory: " in log]
        cells = json.loads((folder / "view.ipynb").read_text())["cells"]
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
        rest = process.communicate(timeout=200)[1]
    assert process.returncode == 0 and "Traceback" not in rest
    assert not folder.exists()
    assert "".join(cells[1]["source"]) == f"import art_nb as art\n\nart.view({str(store.path)!r})"


# doctor


def test_doctor():
    told = json.loads(call("doctor", "--json").stdout)
    found = {check["name"]: check["finding"] for check in told["checks"]}
    assert told["ok"]
    assert {"python", "cores", "memory", "disk", "device", "sampler", "learner", "[local]", "weights"} <= found.keys()
    assert "torch" in found["[local]"]
    assert {"jupyter"} <= found.keys()
    assert {check["verdict"] for check in told["checks"] if "not installed" in check["finding"]} <= {"info"}
    shown = call("doctor")
    assert shown.returncode == 0
    assert shown.stderr.splitlines()[0].startswith("art-nb doctor imports")
    assert found["sampler"].split()[0] in shown.stdout


def test_doctor_plans_the_memory_of_a_model(tiny_model_dir):
    report = json.loads(call("doctor", "--json", "--model", str(tiny_model_dir), "--memory", "16").stdout)
    checks = {check["name"]: check for check in report["checks"]}
    for name in ("embedded", "vllm", "vllm, unsloth", "4-bit unsloth"):
        assert checks[name]["verdict"] == "ok"
        assert "of 17.2 GB" in checks[name]["finding"]
    printed = call("doctor", "--model", str(tiny_model_dir)).stdout  # for the CPU
    assert "KV cache                 2.15" in printed
    assert "4-bit unsloth" not in printed
    assert "--memory plans the memory of a model: pass --model NAME" in refused(call("doctor", "--memory", "24"))


def test_doctor_where_nothing_can_be_trained():
    without = MAIN.replace("import sys;", "import sys; sys.modules['torch'] = None;")
    done = call("doctor", "--json", code=[sys.executable, "-c", without])
    told = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert "torch: not installed" in told["training"]["finding"]
    assert "art-nb run" in told["training"]["advice"]


# migrate


def test_migrate(tmp_path):
    pytest.importorskip("art_nb.runs.migrate")
    folder = tmp_path / ".art" / "p" / "models" / "m" / "trajectories" / "train"
    folder.mkdir(parents=True)
    told = {"messages_and_choices": [{"role": "user", "content": "hello"}], "reward": 1.0, "metrics": {}, "logs": []}
    group = {"trajectories": [told | {"metadata": {}}]}
    (folder / "0001.jsonl").write_text(json.dumps(group) + "\n")
    assert call("migrate", tmp_path / ".art", "-n").returncode == 0
    assert [path.suffix for path in folder.iterdir()] == [".jsonl"]
    assert call("migrate", tmp_path / ".art", "-v").returncode == 0
    assert [path.suffix for path in folder.iterdir()] == [".parquet"]
    assert refused(call("migrate", tmp_path / "nowhere"))
