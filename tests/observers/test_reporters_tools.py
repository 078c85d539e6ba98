"""Trackio, MLflow, TensorBoard and W&B, offline: what was written is read back and compared with the run directory."""

import asyncio
import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from support.registered import at_home

import art_nb as art
from art_nb.core.events import Warned

trackio = pytest.importorskip("trackio", reason="make test-observers installs the packages")
mlflow = pytest.importorskip("mlflow", reason="make test-observers installs the packages")
event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
SECRET = "sk-" + "0a1b2c3d" * 4
NOT_METRICS = {"step", "training_step", "recorded_at"}
TOOLS = ["trackio", "mlflow", "tensorboard"]


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """All tools write into the directory of the test."""
    for name, value in settings(tmp_path).items():
        monkeypatch.setenv(name, value)
    import trackio.sqlite_storage
    import trackio.utils

    monkeypatch.chdir(tmp_path)
    for module in (trackio.utils, trackio.sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio", raising=False)


def settings(folder):
    return {
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "HF_HUB_OFFLINE": "1",
    }


def rows_of(model):
    """The history as tools get it: (step, metrics)."""
    return [(r["step"], {k: v for k, v in r.items() if k not in NOT_METRICS}) for r in model.store.history()]


def in_trackio(project, run):
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs(project, run)
    metrics = [(r["step"], {k: v for k, v in r.items() if k not in ("step", "timestamp")}) for r in rows]
    traces = sorted(SQLiteStorage.get_traces(project, run), key=lambda t: (t["step"], t["key"], t["index"]))
    alerts = [alert["text"] for alert in SQLiteStorage.get_alerts(project)]
    return [row for row in metrics if row[1]], traces, alerts, SQLiteStorage.get_run_config(project, run)


def in_mlflow(project, run):
    """The client, the run, and its metrics: (name, step, value)."""
    client = mlflow.MlflowClient()
    [found] = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    assert found.info.run_name == run
    names = found.data.metrics
    values = [(n, m.step, m.value) for n in names for m in client.get_metric_history(found.info.run_id, n)]
    return client, found, sorted(values)


def in_tensorboard(model):
    accumulator = event_accumulator.EventAccumulator(str(model.store.path / "tensorboard"))
    accumulator.Reload()
    tags = accumulator.Tags()
    scalars = sorted((n, e.step, e.value) for n in tags["scalars"] for e in accumulator.Scalars(n))
    texts = {n: [e.tensor_proto.string_val[0].decode() for e in accumulator.Tensors(n)] for n in tags["tensors"]}
    return scalars, texts


def single(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def flat(rows):
    return sorted((name, step, float(value)) for step, metrics in rows for name, value in metrics.items())


def artifact(client, run, path):
    return Path(client.download_artifacts(run.info.run_id, path))


def group():
    tool = {"name": "look", "arguments": json.dumps({"cell": "A1"})}
    call = {"id": "1", "type": "function", "function": tool}
    messages = [
        {"role": "system", "content": "You play."},
        {"role": "user", "content": f"The key is {SECRET}."},
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "logprobs": {"content": [{"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []}]},
            "message": {"role": "assistant", "content": "# <b>look</b>", "tool_calls": [call]},
            "token_ids": [5, 6],
            "prompt_token_ids": [1, 2],
        },
        {"role": "tool", "tool_call_id": "1", "content": "free"},
    ]
    metadata = {"ruler_explanation": "It looked first."}
    won = art.Trajectory(messages_and_choices=messages, reward=0.75, metrics={"moves": 3}, metadata=metadata)
    lost = art.Trajectory(messages_and_choices=messages[:2], reward=0.25)
    return art.TrajectoryGroup([won, lost, ValueError("illegal")])


@pytest.fixture
async def written(tmp_path, recwarn):
    """A run that was reported to all tools."""
    model = art.Model(name="a", project="p", base_path=str(tmp_path / ".art"), report_to=TOOLS)
    model.update_wandb_config({"seed": 7, "service": {"api_key": SECRET}})
    await model.log([group()], split="train", step=1, metrics={"loss/train": 0.1, "loss/kl": float("nan")})
    model._bus.emit(Warned(key="flat", message="All rewards of a group are equal."))
    await model.log([group()], split="val", step=1)
    await model.log(metrics={"costs/gpu": 0.25}, split="train", step=2)
    await model.end_reports(120)
    assert not [str(warning.message) for warning in recwarn if "reported" in str(warning.message)]
    return model


def assert_harmless(folder):
    """No file of a tool contains the secret, token IDs or logprobs."""
    files = [path for path in folder.rglob("*") if path.is_file() and ".art" not in path.parts]
    files += [*(folder / ".art").rglob("events.out.tfevents*")]
    assert len(files) > 3
    for path in files:
        content = path.read_bytes()
        for hidden in (SECRET, "prompt_token_ids", '"logprob"'):
            assert hidden.encode() not in content, path


async def test_trackio_has_the_rows_traces_alerts_and_settings(written, tmp_path):
    rows, traces, alerts, config = in_trackio("p", "a")
    assert rows == rows_of(written)
    assert alerts == ["All rewards of a group are equal."]
    assert config["seed"] == 7 and config["service"] == {"api_key": "[redacted]"}
    assert [(t["step"], t["key"]) for t in traces] == [(1, f"rollouts/{s}") for s in ("train", "val") for _ in range(3)]
    first, second, failed = traces[:3]
    sent = json.loads(json.dumps(written.store.read_groups("train", 1)[0].trajectories[0].messages()))
    sent[1]["content"] = "The key is [redacted]."
    assert first["messages"] == sent
    expected = {"group": 0, "rollout": 0, "reward": 0.75, "explanation": "It looked first.", "moves": 3}
    assert first["metadata"] == expected | {"status": "ok"}
    assert second["metadata"]["reward"] == 0.25
    assert failed["metadata"] == {"group": 0, "error": "ValueError: illegal", "status": "error"}
    assert_harmless(tmp_path)


async def test_a_replayed_run_is_the_same_in_trackio_and_once(tmp_path):
    models = [
        art.Model(name="a", project=project, base_path=str(tmp_path / ".art"), report_to=report_to)
        for project, report_to in (("live", "trackio"), ("replayed", "none"))
    ]
    for model in models:
        for step in (1, 2):
            await model.log([group()], split="train", step=step, metrics={"loss/train": 0.1 * step})
        await model.log(metrics={"accuracy": 0.25}, split="val", step=2)
        await model.end_reports(120)
    n_rows = len(models[1].store.history())
    assert [art.report_run(models[1], "trackio") for _ in range(2)] == [n_rows, 0]
    assert art.report_run(models[0].store.path, "trackio") == 0, "it was reported while it was trained"
    rows, traces, *_ = in_trackio("replayed", "a")
    live_rows, live_traces, *_ = in_trackio("live", "a")
    assert rows == rows_of(models[1]) and len(traces) == 2 * 3
    fields = [[(t["step"], t["key"], t["messages"], t["metadata"]) for t in each] for each in (traces, live_traces)]
    assert fields[0] == fields[1]
    (call,) = traces[0]["messages"][2]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"cell": "A1"} and traces[0]["messages"][3]["content"] == "free"
    assert {t["metadata"].get("explanation") for t in traces} == {"It looked first.", None}
    assert [row for row in live_rows if "train/reward" in row[1]] and len(live_rows) == n_rows


async def test_mlflow_has_the_rows_params_warnings_and_rollouts(written):
    client, run, metrics = in_mlflow("p", "a")
    assert metrics == flat(rows_of(written))
    assert run.info.status == "FINISHED"
    assert run.data.params == {"seed": "7", "service.api_key": "[redacted]"}
    records = json.loads(artifact(client, run, "rollouts/train/0001.json").read_text())["rollouts"]
    assert [record["reward"] for record in records] == [0.75, 0.25, None]
    assert records[0]["explanation"] == "It looked first." and records[0]["metrics"] == {"moves": 3}
    assert records[0]["messages"][1]["content"] == "The key is [redacted]."
    assert records[2]["error"] == "ValueError: illegal"
    page = artifact(client, run, "rollouts/val/0001.html").read_text()
    assert "# &lt;b&gt;look&lt;/b&gt;" in page and "<b>look</b>" not in page and "<script" not in page
    [warned] = [file.path for file in client.list_artifacts(run.info.run_id, "warnings")]
    assert artifact(client, run, warned).read_text().endswith("All rewards of a group are equal.")


async def test_mlflow_gets_all_settings_and_keeps_the_warnings_of_earlier_sessions(tmp_path):
    model = art.Model(name="a", project="p", base_path=str(tmp_path / ".art"), report_to="mlflow")
    model.update_wandb_config({f"setting_{i}": i for i in range(250)})
    for session in (1, 2):
        await model.log(metrics={"x": 1}, step=session)
        model._bus.emit(Warned(key=f"{session}", message=f"A warning of session {session}."))
        await model.end_reports(120)
    client, run, _ = in_mlflow("p", "a")
    assert run.data.params == {f"setting_{i}": str(i) for i in range(250)}
    files = [file.path for file in client.list_artifacts(run.info.run_id, "warnings")]
    written = sorted(artifact(client, run, file).read_text()[20:] for file in files)
    assert written == ["A warning of session 1.", "A warning of session 2."]


async def test_tensorboard_has_the_rows_and_texts(written):
    scalars, texts = in_tensorboard(written)
    assert scalars == [(name, step, single(value)) for name, step, value in flat(rows_of(written))]
    assert texts["warnings/flat"] == ["    All rewards of a group are equal."]
    assert '"seed": 7' in texts["config"][0]
    [text] = texts["rollouts/train"]
    assert "Group 0, rollout 0, reward 0.75" in text and "    assistant: # <b>look</b> → look(" in text
    assert all(line.startswith("    ") for line in text.splitlines() if "<b>" in line)
    assert "ValueError: illegal" in text


# continued runs

LOOP = """
import asyncio, os, sys, art_nb as art

async def main():
    model = art.Model(name="a", project="p", report_to={tools!r})
    for step in range({first}, {last}):
        await model.log(metrics=dict(x=step), step=step)
    if {kill}:
        for queue in model._reports.queues:
            assert queue.drain(120)
        os.kill(os.getpid(), 9)
    await model.end_reports(200)  # longer than at the end of a process: importing MLflow can take half a minute

asyncio.run(main())
"""


def test_a_killed_and_continued_run_has_each_step_once(tmp_path):
    env = os.environ | settings(tmp_path) | {"PYTHONPATH": str(ROOT)}
    for first, last, kill in ((0, 4, True), (4, 8, True), (8, 10, False)):
        program = LOOP.format(tools=TOOLS, first=first, last=last, kill=kill)
        done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, check=False, timeout=250)
        assert done.returncode == (-signal.SIGKILL if kill else 0)
    model = art.Model(name="a", project="p", base_path=str(tmp_path / ".art"), report_to="none")
    rows, *_ = in_trackio("p", "a")
    assert rows == rows_of(model) and [step for step, _ in rows] == [*range(10)]
    assert in_mlflow("p", "a")[2] == flat(rows)
    assert in_tensorboard(model)[0] == flat(rows)


async def test_two_runs_in_one_process_do_not_mix(tmp_path):
    models = [art.Model(name=n, project=n, base_path=str(tmp_path / ".art"), report_to=TOOLS) for n in "ab"]
    await asyncio.gather(*(m.log(metrics={"x": s}, step=s) for s in range(5) for m in models))
    await asyncio.gather(*(m.end_reports(120) for m in models))
    for model in models:
        rows, *_ = in_trackio(model.name, model.name)
        assert rows == rows_of(model)
        assert in_mlflow(model.name, model.name)[2] == flat(rows) == in_tensorboard(model)[0]


# real training


async def turn(model, scenario):
    messages = [{"role": "user", "content": f"free: {scenario}"}]
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=4, logprobs=True
    )
    return art.Trajectory(messages_and_choices=[*messages, reply.choices[0]], reward=next(turn.rewards) % 3)


async def test_checkpoints_are_artifacts(tiny_model_dir, tmp_path):
    turn.rewards = iter(range(1000))
    tools = [
        art.TrackioReporter(checkpoints="all"),
        art.MLflowReporter(checkpoints="last"),
        art.WandbReporter(mode="offline", checkpoints="all", dir=str(tmp_path)),
    ]
    async with at_home(tiny_model_dir, tmp_path / ".art") as (model, backend):
        model.report_to = tools
        await model.register(backend)
        await art.train(model, turn, range(4), steps=2, groups_per_step=2, rollouts_per_group=2, show=False)
        await model.end_reports(120)
        store = model.store
    client, run, metrics = in_mlflow("tests", "tiny")
    assert metrics == flat(rows_of(model))
    assert [file.path for file in client.list_artifacts(run.info.run_id, "checkpoints")] == ["checkpoints/0002"]
    names = {path.name for path in store.checkpoint_dir(2).iterdir()}
    sent = artifact(client, run, "checkpoints/0002")
    assert {path.name for path in sent.iterdir()} == names
    for name in names:
        assert (sent / name).read_bytes() == (store.checkpoint_dir(2) / name).read_bytes()
    run = trackio.init(project="tests", name="reader", embed=False)
    for alias, step in (("step1", 1), ("step2", 2), ("latest", 2)):
        folder = Path(run.use_artifact(f"tiny:{alias}").download(root=str(tmp_path / alias)))
        weights = "adapter_model.safetensors"
        assert (folder / weights).read_bytes() == (store.checkpoint_dir(step) / weights).read_bytes()
    run.finish()
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    assert all(word in content for word in (b"lora", b"step1", b"step2", b"latest", b"adapter_model.safetensors"))


async def test_evaluation_and_sft_are_reported(tiny_model_dir, tmp_path):
    turn.rewards = iter(range(1000))
    async with at_home(tiny_model_dir, tmp_path / ".art", report_to=TOOLS) as (model, _):
        await art.evaluate(model, turn, range(2))
        shown = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "B2"}]
        await model.train_sft([art.Trajectory(messages_and_choices=shown)])
        await model.end_reports(120)
    rows, traces, *_ = in_trackio("tests", "tiny")
    assert rows == rows_of(model) and "sft/loss" in rows[-1][1] and "val/reward" in rows[0][1]
    assert {trace["key"] for trace in traces} == {"rollouts/val"}
    assert in_mlflow("tests", "tiny")[2] == flat(rows)
    assert in_tensorboard(model)[0] == [(name, step, single(value)) for name, step, value in flat(rows)]


async def test_a_server_that_is_gone_costs_one_warning(tmp_path, monkeypatch, recwarn):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    rows = []
    gone = art.MLflowReporter(tracking_uri=f"http://user:{SECRET}@127.0.0.1:9")
    model = art.Model(name="a", project="p", base_path=str(tmp_path / ".art"), report_to=[gone, rows.append])
    for step in range(3):
        await model.log(metrics={"x": step}, step=step)
    await model.end_reports(120)
    [message] = [str(w.message) for w in recwarn if "no longer reported" in str(w.message)]
    assert "mlflow" in message and SECRET not in message
    assert [row["step"] for row in rows] == [0, 1, 2]
