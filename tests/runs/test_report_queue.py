"""Reporters of all kinds with a real run directory: order, failures, hangs, kills, secrets, two runs, real training."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from copy import deepcopy
from pathlib import Path

import pytest
from support.registered import at_home, until

import art_nb as art
from art_nb.core.events import Warned
from art_nb.core.types import BackendMissing, TrainError
from art_nb.pipeline.settings import make_group_rollout_fn
from art_nb.pipeline.trainer import PipelineTrainer
from art_nb.runs import report_queue
from art_nb.runs.report_queue import ReportQueue, end_all
from art_nb.runs.reporters import ToolReporter

ROOT = Path(__file__).parents[2]
SECRET = "sk-" + "0a1b2c3d" * 4
NOT_METRICS = {"step", "training_step", "recorded_at"}


class Calls(art.Reporter):
    """Records what a reporter gets."""

    def __init__(self, name=""):
        self.name, self.calls, self.groups, self.threads = name, [], [], set()

    def begin(self, model, config):
        self._note("begin", dict(config))

    def row(self, metrics, step):
        self._note("row", step, dict(metrics))

    def rollouts(self, groups, step):
        self._note("rollouts", step, groups[0].metadata["split"])
        self.groups += groups

    def warn(self, event):
        self._note("warn", event.message)

    def checkpoint(self, path, step):
        self._note("checkpoint", step, path)

    def written(self, split, step):
        self._note("written", step, split)

    def configure(self, config):
        self._note("configure", dict(config))

    def flush(self):
        assert not self.calls or self.calls[-1][0] != "end", "it is closed"

    def end(self):
        self._note("end")

    def _note(self, *call):
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)

    def of(self, kind):
        return [call[1:] for call in self.calls if call[0] == kind]


def rows_of(model):
    """The history as reporters get it."""
    return [(r["step"], {k: v for k, v in r.items() if k not in NOT_METRICS}) for r in model.store.history()]


def texts(recwarn):
    return [str(warning.message) for warning in recwarn]


@pytest.fixture
def named(tmp_path):
    return lambda report_to, name="a", **fields: art.Model(
        name=name, project="p", base_path=str(tmp_path / ".art"), report_to=report_to, **fields
    )


@pytest.fixture
def group():
    question = {"role": "user", "content": f"The key is {SECRET} and {os.environ.get('MY_TOKEN', '')}"}
    logprobs = {"content": [{"token": "ok", "logprob": -0.5, "bytes": [111], "top_logprobs": []}], "refusal": None}
    tool = {"name": "look", "arguments": json.dumps({"password": "hunter2hunter2"})}
    call = {"id": "1", "type": "function", "function": tool}
    message = {"role": "assistant", "content": "ok", "tool_calls": [call]}
    choice = {"index": 0, "finish_reason": "stop", "message": message, "logprobs": logprobs, "token_ids": [5, 6]}
    choice |= {"prompt_token_ids": [1, 2, 3]}
    won = art.Trajectory(messages_and_choices=[question, choice], reward=1, metrics={"tokens": 3}, logs=[SECRET])
    return art.TrajectoryGroup([won, art.Trajectory(reward=0), ValueError(SECRET)], metadata={"api_key": "abc"})


async def test_a_reporter_gets_everything_in_order_from_one_thread(named, group, recwarn):
    reporter = Calls()
    model = named([reporter])
    model.update_wandb_config({"seed": 7, "service": {"api_key": SECRET}})
    model._bus.emit(Warned(key="early", message="before the first row"))
    await model.log([group], split="train", step=1, metrics={"loss/train": 0.5, "loss/kl": float("nan")})
    model.update_wandb_config({"dice": 2})
    model._bus.emit(Warned(key="late", message="after it"))
    await model.log([group], split="val", step=1)
    await model.log(metrics={"x": 1}, step=2)
    await model.end_reports()
    assert texts(recwarn) == []
    assert [call[0] for call in reporter.calls] == (
        "begin row rollouts written configure warn row rollouts written row written end"
    ).split()
    assert reporter.of("begin") == [({"seed": 7, "service": {"api_key": "[redacted]"}},)]
    assert reporter.of("row") == rows_of(model)
    assert "loss/kl" not in reporter.of("row")[0][1]
    assert reporter.of("rollouts") == [(1, "train"), (1, "val")]
    assert reporter.of("written") == [(1, "train"), (1, "val"), (2, None)]
    assert len(reporter.threads) == 1 and threading.current_thread().name not in reporter.threads


async def test_rollouts_contain_no_secrets_and_no_token_data(named, group, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "correct-horse-battery")
    reporter = Calls()
    model = named(reporter)
    group.trajectories[0].messages_and_choices[0]["content"] += os.environ["MY_TOKEN"]
    await model.log([group], split="train", step=1)
    await model.end_reports()
    [sent] = reporter.groups
    text = str(sent.model_dump())
    for hidden in (SECRET, "correct-horse-battery", "token_ids", "-0.5", "'abc'"):
        assert hidden not in text
    assert sent.trajectories[0].reward == 1 and sent.trajectories[0].metrics == {"tokens": 3}
    assert sent.trajectories[0].messages()[1]["tool_calls"][0]["function"]["name"] == "look"
    assert [error.type for error in sent.exceptions] == ["ValueError"]
    assert "token_ids" in str(group.model_dump())  # the user's objects are as they were


async def test_at_most_max_rollouts_are_sent(named):
    reporter = Calls()
    reporter.max_rollouts = 5
    groups = [art.TrajectoryGroup([art.Trajectory(reward=r) for r in range(3)]) for _ in range(4)]
    model = named(reporter)
    await model.log(groups, split="train", step=1)
    await model.end_reports()
    assert [len(group) for group in reporter.groups] == [3, 2]


# failures


class Failing(Calls):
    """Fails at one of its calls."""

    def __init__(self, kind, error):
        super().__init__()
        self.kind, self.error, self.attempts = kind, error, 0

    def _note(self, *call):
        if call[0] == self.kind:
            self.attempts += 1
            raise self.error
        super()._note(*call)


@pytest.mark.parametrize("kind", ["begin", "row", "written", "configure", "end"])
@pytest.mark.parametrize("error", [OSError(28, f"No space left {SECRET}"), SystemExit(1)], ids=["disk", "exit"])
async def test_a_failing_reporter_is_stopped_alone_and_once(named, group, recwarn, kind, error):
    failing, sound = Failing(kind, error), Calls()
    model = named([failing, sound])
    for step in range(3):
        model._bus.emit(Warned(key=f"{step}", message="a warning"))
        model._reports.queues and model._reports.queues[0].put("checkpoint", "none", step)
        await model.log([group], split="train", step=step)
        model.update_wandb_config({f"{step}": step})
    await model.end_reports()
    [message] = [text for text in texts(recwarn) if "no longer reported" in text]
    assert message.startswith("a is no longer reported to Failing") and "history.jsonl" in message
    assert SECRET not in message
    assert sound.of("row") == rows_of(model) and len(rows_of(model)) == 3
    assert len(failing.of("row")) < 3 or kind == "end"
    assert len(failing.of("end")) == (kind != "end")  # the run in the tool is closed
    assert sound.of("end") == [()]


@pytest.mark.parametrize("kind", ["rollouts", "warn", "checkpoint"])
@pytest.mark.parametrize("error", [OSError(28, f"No space left {SECRET}"), SystemExit(1)], ids=["disk", "exit"])
async def test_an_error_in_what_is_optional_disables_only_this(named, group, recwarn, kind, error):
    failing, sound = Failing(kind, error), Calls()
    model = named([failing, sound])
    for step in range(3):
        model._bus.emit(Warned(key=f"{step}", message="a warning"))
        model._reports.queues and model._reports.queues[0].put("checkpoint", "none", step)
        await model.log([group], split="train", step=step)
    await model.end_reports()
    [message] = [text for text in texts(recwarn) if "no longer reported" in text]
    assert message.startswith({"warn": "Warnings"}.get(kind, kind.capitalize()[:8])) and SECRET not in message
    assert failing.of("row") == sound.of("row") == rows_of(model) and len(rows_of(model)) == 3
    assert failing.attempts == 1
    for other in {"rollouts", "checkpoint", "end"} - {kind}:
        assert failing.of(other), other


async def test_a_failed_end_after_a_failure_is_no_error(named, recwarn):
    class Broken(Calls):
        def row(self, metrics, step):
            raise ValueError("bug")

        def end(self):
            super().end()
            raise ValueError("not open")

    reporter = Broken()
    model = named([reporter])
    await model.log(metrics={"x": 1}, step=1)
    await until(lambda: reporter.of("end") == [()])
    await model.end_reports()
    assert ["ValueError: bug" in text for text in texts(recwarn)] == [True]


async def test_rows_are_not_lost_while_a_tool_begins(named, group, recwarn, monkeypatch):
    monkeypatch.setattr(report_queue, "MAX_WAITING", 20)
    release = threading.Event()

    class Slow(Calls):
        def begin(self, model, config):
            release.wait(60)

    reporter = Slow()
    model = named([reporter])
    for step in range(40):
        await model.log([group], split="train", step=step)
    release.set()
    await model.end_reports()
    assert reporter.of("row") == rows_of(model) and len(rows_of(model)) == 40
    kept = [step for step, _ in reporter.of("rollouts")]
    assert kept == [*range(40 - len(kept), 40)] and 5 < len(kept) < 15
    [message] = texts(recwarn)
    assert message.startswith("Slow is slow: 20 entries of a are waiting")


async def test_copies_of_a_built_in_reporter_report_runs_of_their_own(named):
    class Tool(ToolReporter):
        def begin(self, model, config):
            self.run, self.rows = model.name, []
            begun.append(self)

        def row(self, metrics, step):
            self.rows.append((self.run, metrics["val/x"]))

    begun, shared = [], Tool()
    a = named([shared])
    b = a.model_copy(update={"name": "b"})
    for model, x in ((a, 1), (b, 2), (a, 3)):
        await model.log(metrics={"x": x}, step=x)
    await asyncio.gather(a.end_reports(), b.end_reports())
    assert sorted(tool.rows for tool in begun) == [[("a", 1.0), ("a", 3.0)], [("b", 2.0)]]


async def test_a_new_object_with_the_id_of_a_failed_one_is_reported(named):
    class Bug(Calls):
        def row(self, metrics, step):
            super().row(metrics, step)
            raise ValueError("bug")

    model = named(None)
    for i in range(20):
        model.report_to = None
        gc.collect()
        model.report_to = reporter = (Bug, Calls)[i % 2]()
        await model.log(metrics={"x": 1}, step=i)
        await until(lambda reporter=reporter: reporter.of("row"))
    await model.end_reports()


async def test_a_slow_reporter_does_not_slow_training_and_gets_all_rows(named, group, recwarn, monkeypatch):
    monkeypatch.setattr(report_queue, "MAX_WAITING", 20)
    release, rows = threading.Event(), []
    slow = []
    model = named([lambda row: release.wait(280) and slow.append(row), rows.append])
    for step in range(60):
        await model.log(metrics={"x": step}, step=step)
        await until(lambda step=step: len(rows) == step + 1)
    assert not slow  # the first reporter still waits for its first row
    [message] = texts(recwarn)
    assert "is slow: 20 entries" in message
    release.set()
    await model.end_reports()
    assert [row["step"] for row in rows] == [row["step"] for row in slow] == [*range(60)]


async def test_a_hanging_end_is_given_up_after_the_time_limit(named, recwarn):
    release, ended = threading.Event(), []

    class Hanging(Calls):
        def end(self):
            release.wait(280)
            ended.append(self)

    model = named([Hanging(), (rows := []).append])
    await model.log(metrics={"x": 1}, step=1)
    await model.end_reports(timeout_s=0.5)
    assert len(rows) == 1 and not ended
    [message] = texts(recwarn)
    assert "Hanging" in message and "did not finish in time" in message
    release.set()


async def test_missing_rollouts_are_no_fault_of_the_tool(named, group, recwarn):
    gate = threading.Event()

    class Late(Calls):
        def begin(self, model, config):
            gate.wait(60)

    reporter = Late()
    model = named(reporter)
    path = await model.log([group], split="train", step=1)
    assert path
    (model.store.path / "trajectories" / "train" / "0001.parquet").unlink()
    gate.set()
    await model.log([group], split="train", step=2)
    await model.end_reports()
    assert reporter.of("rollouts") == [(2, "train")]
    [message] = texts(recwarn)
    assert "could not be reported to Late" in message


# requests


async def test_unknown_names_list_the_known_ones(named, tmp_path):
    for wrong, reason in (("trakio", "Did you mean 'trackio'"), (3, "art.Reporter"), (asyncio.sleep, "not async")):
        model = named([wrong])
        with pytest.raises(TrainError, match=reason):
            await model.register(art.LocalBackend(path=tmp_path / ".art", verbose=False))
    with pytest.raises(TrainError, match="Known names: .*mlflow, tensorboard, trackio, wandb"):
        await named("trakio").log(metrics={"x": 1}, step=1)
    assert named(None).store.history() == []  # so that the call can be repeated


async def test_a_missing_package_is_reported_before_anything_is_loaded(named, tmp_path, monkeypatch):
    for package in ("mlflow", "tensorboard", "trackio", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(BackendMissing, match=rf'pip install "art_nb\[{package}\]"'):
            await named(package).register(art.LocalBackend(path=tmp_path / ".art", verbose=False))
    await named("all").log(metrics={"x": 1}, step=1)  # of the installed ones, which are none


async def test_reporters_of_other_packages_are_found(named, tmp_path, monkeypatch):
    (tmp_path / "their_package.py").write_text(
        "ROWS = []\nclass Theirs:\n    name = 'theirs'\n    def begin(self, model, config): pass\n"
        "    def row(self, metrics, step): ROWS.append(step)\n    def rollouts(self, groups, step): pass\n"
        "    def warn(self, event): pass\n    def end(self): pass\n"
    )
    meta = tmp_path / "their_package-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: their_package\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text(
        "[art_nb.reporters]\ntheirs = their_package:Theirs\nbroken = their_package:Nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    model = named("theirs")
    await model.log(metrics={"x": 1}, step=4)
    await model.end_reports()
    import their_package

    assert their_package.ROWS == [4]
    with pytest.raises(BackendMissing, match="cannot be loaded from their_package:Nothing"):
        await named("broken").log(metrics={"x": 1}, step=1)


async def test_copies_share_objects_and_not_their_state(named):
    reporter = Calls()
    model = named([reporter])
    for copied in (deepcopy(model), model.model_copy(deep=True), model.model_copy()):
        assert copied.report_to == [reporter] and copied._reports is not model._reports
    assert "report_to" not in model.model_dump()


async def test_two_runs_in_one_process(named):
    first, second = Calls(), Calls()
    a, b = named([first]), named([second], name="b")
    await asyncio.gather(*(m.log(metrics={"x": s}, step=s) for s in range(20) for m in (a, b)))
    again = named([first])  # the cell is run again
    await again.log(metrics={"x": 20}, step=20)
    await asyncio.gather(again.end_reports(), b.end_reports())
    assert first.of("row") == rows_of(a) and second.of("row") == rows_of(b)
    assert len(first.of("begin")) == len(second.of("begin")) == 1
    await a.log(metrics={"x": 21}, step=21)  # opens the run again
    await a.end_reports()
    assert len(first.of("begin")) == 2 and first.of("row")[-1][0] == 21


async def test_objects_of_a_deleted_model_are_ended(named):
    first = Calls()
    model = named([first])
    await model.log(metrics={"x": 1}, step=1)
    await asyncio.to_thread(model._reports.queues[0].drain, 10)
    del model
    rows = []
    again = named([rows.append])
    await again.log(metrics={"x": 2}, step=2)
    await until(lambda: first.of("end") == [()])
    await again.end_reports()


# continued runs

LOOP = """
import asyncio, sys, threading, art_nb as art

class ToFile(art.Reporter):
    name = "file"

    def row(self, metrics, step):
        if step == {hang}:
            print("hangs", flush=True)
            threading.Event().wait()
        with open("sent.txt", "a") as file:
            file.write(str(step) + "\\n")

async def main():
    model = art.Model(name="a", project="p", report_to=[ToFile()])
    for step in range({first}, {last}):
        await model.log(metrics=dict(x=step), step=step)
        await asyncio.sleep(0.02)
    print("logged", flush=True)

asyncio.run(main())
"""


def test_a_continued_run_sends_what_a_killed_process_could_not(tmp_path):
    """The killed process has written rows 0 to 9 to its history, and has sent rows 0 to 5."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-c", LOOP.format(hang=6, first=0, last=10)]
    process = subprocess.Popen(line, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    assert [process.stdout.readline().strip() for _ in range(2)] == ["hangs", "logged"]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    line = [sys.executable, "-c", LOOP.format(hang=-1, first=10, last=13)]
    subprocess.run(line, cwd=tmp_path, env=env, check=True, timeout=100)
    assert (tmp_path / "sent.txt").read_text().split() == [str(step) for step in range(13)]


def test_the_end_of_a_process_sends_what_is_waiting(tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-c", LOOP.format(hang=-1, first=0, last=5)]
    subprocess.run(line, cwd=tmp_path, env=env, check=True, timeout=100)
    assert (tmp_path / "sent.txt").read_text().split() == [*"01234"]


def test_a_hanging_reporter_does_not_keep_a_process(tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    program = "import art_nb.runs.report_queue as q; q.REPORT_TIMEOUT_S = 0.5\n" + LOOP.format(hang=2, first=0, last=5)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, check=True, timeout=100, capture_output=True, text=True
    )
    assert "did not finish in time" in done.stderr


async def test_undone_steps_are_not_sent_again(named):
    model = named("none")
    for step in (1, 2, 3):
        await model.log(metrics={"x": step}, step=step)
    rows = model.store.history()
    report_queue.write_position(model.store, "calls", rows[0])
    model.store.append_history({"step": 3, "training_step": 3, "undone": 1})
    reporter = Calls("calls")
    model = named([reporter])
    await model.log(metrics={"x": 30}, step=3)
    await model.end_reports()
    assert [(step, metrics["val/x"]) for step, metrics in reporter.of("row")] == [(2, 2.0), (3, 30.0)]


# real training


async def turn(model, scenario):
    messages = [{"role": "user", "content": f"free: {scenario}"}]
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=4, logprobs=True
    )
    return art.Trajectory(messages_and_choices=[*messages, reply.choices[0]], reward=next(turn.rewards) % 3)


@pytest.mark.slow
async def test_training_evaluation_and_sft_are_reported(tiny_model_dir, tmp_path):
    turn.rewards = iter(range(1000))
    reporter = Calls()
    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        model.report_to = [reporter]
        await model.register(backend)
        await art.train(model, turn, range(4), steps=2, groups_per_step=2, rollouts_per_group=2, show=False)
        await art.evaluate(model, turn, range(2))
        shown = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "B2"}]
        await model.train_sft([art.Trajectory(messages_and_choices=shown)])
        await model.end_reports()
        assert reporter.of("row") == rows_of(model)
        assert [split for _, split in reporter.of("rollouts")] == ["train", "train", "val"]
        saved = [(step, str(model.store.checkpoint_dir(step))) for step in model.store.steps_saved() if step]
        assert [*map(tuple, reporter.of("checkpoint"))][-len(saved) :] == saved
        names = [name for _, metrics in reporter.of("row") for name in metrics]
        assert {"train/reward", "loss/grad_norm", "val/reward", "sft/loss"} <= {*names}


@pytest.mark.slow
async def test_the_pipeline_is_reported(tiny_model_dir, tmp_path):
    turn.rewards = iter(range(1000))
    reporter = Calls()
    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        model.report_to = [reporter]
        group = make_group_rollout_fn(lambda model, scenario, config: turn(model, scenario), n=2)
        sizes = {"num_rollout_workers": 2, "min_batch_size": 2, "max_batch_size": 3, "max_steps": 2}
        await PipelineTrainer(model, backend, group, range(12), {}, show=False, **sizes).train()
        await model.end_reports()
        assert reporter.of("row") == rows_of(model)
        assert len([row for _, row in reporter.of("row") if "loss/grad_norm" in row]) == 2


async def test_the_event_loop_is_not_blocked(named):
    """The reporter waits until the loop has logged all rows."""
    release, rows = threading.Event(), []
    model = named([lambda row: release.wait(280) and rows.append(row)])
    for step in range(5):
        await model.log(metrics={"x": step}, step=step)
    assert not rows
    release.set()
    assert await asyncio.to_thread(model._reports.queues[0].drain, 120)
    assert len(rows) == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        end_all()


def test_a_queue_that_did_not_begin_ends_at_once(tmp_path):
    queue = ReportQueue("x", Calls(), art.RunStore(tmp_path))
    before = time.monotonic()
    queue.close()
    queue.join(time.monotonic() + 280)
    assert time.monotonic() - before < 200


def test_a_damaged_step_does_not_end_the_report_of_a_run(tmp_path):
    store = art.RunStore(tmp_path / "run")
    store.write_model({"name": "run", "project": "p"})
    for step in (1, 2, 3):
        store.write_groups("val", step, [art.TrajectoryGroup([art.Trajectory(reward=1.0)])])
        store.append_history({"step": step, "val/x": step})
    (tmp_path / "run" / "trajectories" / "val" / "0002.parquet").write_bytes(b"damaged")
    calls = Calls("tool")
    with pytest.warns(UserWarning, match=r"The rollouts of step 2 \(val\) are not sent"):
        assert art.report_run(store, calls) == 3
    assert art.report_run(store, calls) == 0
    assert calls.of("rollouts") == [(1, "val"), (3, "val")]
    assert [step for step, metrics in calls.of("row")] == [1, 2, 3]
