"""Each session of a run is recorded: versions, code, options and machine, and no secrets."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import BaseModel
from support.jupyter_kernels import run_notebook

import art_nb as art
from art_nb.runs import sessions
from art_nb.runs.sessions import SESSION_FILE, git_state, read_sessions, write_session
from art_nb.runs.sources import defining_statements, program_of, program_statements
from art_nb.runs.store import RunStore

SECRETS = [f"PLANTED{n:02}x9" for n in range(8)]


async def rollout(model, scenario):
    """The model says something to each number."""
    messages = [{"role": "user", "content": f"free: {scenario}"}]
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=4, logprobs=True
    )
    return art.Trajectory(messages_and_choices=[*messages, reply.choices[0]], reward=float(scenario))


def git(folder, *arguments):
    name = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *name, *arguments], cwd=folder, check=True, capture_output=True)


def a_repository(folder):
    folder.mkdir()
    git(folder, "init")
    git(folder, "remote", "add", "origin", f"https://user:{SECRETS[0]}@host.example/task.git")
    for name in ("task.py", "settings.yaml", ".env", "notes.ipynb"):
        (folder / name).write_text("before\n")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "task")
    (folder / "task.py").write_text(f'password = "{SECRETS[1]}"\nREWARD = 2\n')
    (folder / "settings.yaml").write_text(f"service:\n  api_key: {SECRETS[2]}\n")
    (folder / ".env").write_text(f"ANYTHING={SECRETS[3]}\n")
    (folder / "notes.ipynb").write_text(f'"printed {SECRETS[4]}"\n')
    return folder


@pytest.fixture
async def on_float32(tmp_path):
    async with art.LocalBackend(path=tmp_path / "runs", dtype="float32", verbose=False) as backend:
        yield backend


async def test_a_run_records_each_session_and_no_secret(named, on_float32, tmp_path, monkeypatch):
    monkeypatch.chdir(a_repository(tmp_path / "code"))
    monkeypatch.setenv("SERVICE_TOKEN", SECRETS[5])
    Path("task.py").write_text(Path("task.py").read_text() + f"OTHER = '{SECRETS[5]}'\n")

    class Config(BaseModel):
        api_key: str = SECRETS[6]

    model = named(config=Config())
    await model.register(on_float32)
    asked = {"groups_per_step": 1, "rollouts_per_group": 2, "seed": 7, "show": False, "kl_coef": 0.01}
    for steps in (1, 2):
        await art.train(model, rollout, [1, 2], steps=steps, loss_options={"is_max": 4.0}, **asked)
    first, second = read_sessions(model.store)
    assert (first["call"], first["step"], second["step"]) == ("art.train", 0, 1)
    assert first["options"] == {
        "steps": 1, "groups_per_step": 1, "rollouts_per_group": 2, "seed": 7, "learning_rate": 3e-4, "kl_coef": 0.01,
        "loss_options": {"is_max": 4.0},
    }  # fmt: skip
    assert first["goal"] == "The model says something to each number."
    assert first["base_model"]["identity"].startswith("sha256 of parts ")
    assert {"python", "art_nb", "torch"} <= first["versions"].keys()
    assert first["engine"]["dtype"] == "float32" and first["engine"]["device"] == "cpu"
    assert first["machine"]["threads"] >= 1
    assert "REWARD = 2" in first["git"]["diff"] and len(first["git"]["commit"]) == 40
    assert first["git"]["remote"] == "https://host.example/task.git"
    assert "notes.ipynb" not in first["git"]["diff"]
    assert second["git"] == first["git"], "filled in from the session before"
    lines = (model.store.path / SESSION_FILE).read_text().splitlines()
    assert json.loads(lines[1])["git"] is None
    for path in model.store.path.rglob("*"):
        if path.is_file():
            assert not [secret for secret in SECRETS if secret.encode() in path.read_bytes()], path.name


async def test_supervised_training_is_a_session(named, local):
    model = named()
    await model.register(local)
    talk = art.Trajectory(
        messages_and_choices=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    )
    await model.train_sft([talk], art.TrainSFTConfig(learning_rate=1e-3))
    [session] = read_sessions(model.store)
    assert session["call"] == "model.train_sft"
    assert session["options"]["learning_rate"] == 1e-3


def test_git_is_neither_needed_nor_waited_for(tmp_path, monkeypatch):
    assert git_state(tmp_path) == {}
    folder = a_repository(tmp_path / "code")
    assert git_state(folder)["commit"]
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(slow.parent))
    monkeypatch.setattr(sessions, "GIT_TIMEOUT_S", 0.5)
    began = time.monotonic()
    assert git_state(folder) == {}
    assert time.monotonic() - began < 300
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(folder) == {}


def test_a_long_diff_is_cut(tmp_path):
    folder = a_repository(tmp_path / "code")
    (folder / "task.py").write_text("x = 1\n" * 100_000)
    state = git_state(folder)
    assert not state["diff_is_complete"]
    assert 90_000 < len(state["diff"]) <= sessions.MAX_DIFF_BYTES


def test_a_damaged_line_is_skipped(tmp_path):
    store = RunStore(tmp_path)
    write_session(store, {"call": "a", "options": 3})
    with (tmp_path / SESSION_FILE).open("ab") as file:
        file.write(b'{"call": "b", "git": 7, "options": [1]}\n{"call": ')
    write_session(store, {"call": "c"})
    assert [session["call"] for session in read_sessions(store)] == ["a", "b", "c"]
    assert all(isinstance(session.get("options", {}), dict) for session in read_sessions(store))


CELLS = """
import random
import json as parser
from math import *
TABLE = {}
for n in range(3):
    TABLE[n] = sqrt(n)
unused = parser.loads("{}")
class Game:
    def play(self): return TABLE
def helper(): return Game().play()
scenarios = [1]
scenarios.append(2)
scenarios += [3]
model = object()
async def rollout(model, scenario, deep=random.random()):
    return helper()
await model.register(backend)
"""


def test_a_program_has_what_the_rollout_uses_and_no_more():
    statements = program_statements(CELLS)
    included, undefined = defining_statements(statements, ["rollout", "scenarios"])
    code = "\n".join(statement.text for statement in included)
    assert not undefined
    for part in ("import random", "from math import *", "TABLE[n] =", "class Game", "append(2)", "+= [3]"):
        assert part in code
    assert "unused" not in code and "backend" not in code and "object()" not in code


def test_an_imported_rollout_needs_an_import():
    assert program_of(rollout=rollout).code.startswith(f"from {rollout.__module__} import rollout")


def test_the_cells_of_a_kernel_are_found(tmp_path):
    import nbformat

    cells = [
        "LIMIT = 3",
        "def broken(:",
        "LIMIT = 4\n%pwd",
        "async def rollout(model, scenario):\n    return LIMIT",
        "async def rollout(model, scenario):\n    return -LIMIT",
        "from art_nb.runs.sources import program_of\nprogram = program_of(rollout=rollout, scenarios=range(3))\n"
        "assert program.undefined == [], program\nnamespace = {}\nexec(program.code, namespace)\n"
        "assert namespace['scenarios'] == range(3)\n"
        "import asyncio\nassert await namespace['rollout'](0, 0) == -4, program.code",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.cells[1].metadata["tags"] = ["raises-exception"]
    run_notebook(notebook, tmp_path)
