"""A run that is watched, paused, resumed and stopped from elsewhere; rollouts that crash, hang and lie."""

import asyncio
import gc
import importlib
import inspect
import math
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
import weakref

import httpx
import pytest
import torch
from support.registered import at_home, heard
from support.warm import warm_python

import art_nb as art
from art_nb.cli.main import parser
from art_nb.core.events import Failed, GradientStep, RolloutDone, SignalReport, StepDone, Warned
from art_nb.core.types import RolloutError, TrainError
from art_nb.learners.settings import StepConfig
from art_nb.policy.adapter_files import read_adapter
from art_nb.policy.loading import load_policy
from art_nb.policy.lora import sequence_logprobs
from art_nb.rollouts.scenarios import scenarios_of_step
from art_nb.training.heartbeat import read_run_record
from art_nb.training.run import AttachedRun, Run, record_status
from art_nb.training.run_display import as_html

SCENARIOS = list(range(12))


async def say(model, scenario, max_tokens=4):
    """One reply to one prompt; what it is worth hangs on the reply alone."""
    messages = [{"role": "user", "content": f"free: {scenario}"}]
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=max_tokens, logprobs=True
    )
    choice = reply.choices[0]
    reward = choice.model_extra["token_ids"][0] % 7
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=reward, metadata={"scenario": scenario})


class Gate:
    """Rollouts that wait until told."""

    def __init__(self):
        self.started = self.cancelled = 0
        self.open = threading.Event()

    async def __call__(self, model, scenario):
        self.started += 1
        try:
            while not self.open.is_set():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await say(model, scenario)


@pytest.fixture
async def home(tiny_model_dir, tmp_path):
    async with at_home(tiny_model_dir, tmp_path) as pair:
        yield pair


def train(model, rollout=say, scenarios=SCENARIOS, **options):
    options = {"steps": 2, "groups_per_step": 2, "rollouts_per_group": 4, "show": False} | options
    return art.train(model, rollout, scenarios, **options)


async def until(truth, timeout_s=200):
    """Wait for something to become true."""
    end = time.monotonic() + timeout_s
    while not truth():
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.01)


# a run


async def test_it_returns_at_once_and_can_be_awaited(home):
    model, backend = home
    events, gate = heard(backend, StepDone), Gate()
    run = train(model, gate)  # returns although no rollout can finish yet
    assert (run.status, events) == ("running", [])
    gate.open.set()
    assert await run is run
    assert (run.status, run.step, await model.get_step()) == ("done", 2, 2)
    assert [row["step"] for row in run.history] == [event.step for event in events] == [1, 2]
    assert [len(group) for group in run.groups] == [4, 4]
    assert repr(run).startswith("Run(tiny: done, step 2 of 2, reward ")
    assert model.store.steps("train") == [1, 2]
    assert model.store.steps_saved() == [0, 1, 2]


async def test_the_record_of_a_run_ends_with_its_last_status(home):
    run = train(home[0])
    await run
    for _ in range(20):
        run.status = "stopping"
        beat = threading.Thread(target=record_status, args=[run])
        beat.start()
        run.status = "done"
        record_status(run)
        beat.join()
        assert read_run_record(home[0].store)["status"] == "done"


async def test_a_finished_run_is_freed_with_its_last_reference(home):
    """Without the garbage collector: the run is part of no cycle. `attach` then reads the directory."""
    path = home[0].store.path
    gc.disable()
    try:
        run = await train(home[0])
        assert Run.attach(path) is run
        reference = weakref.ref(run)
        del run
        await until(lambda: reference() is None)
    finally:
        gc.enable()
    assert isinstance(Run.attach(path), AttachedRun)


async def test_a_script_joins_it(home):
    run = train(home[0])
    assert (await asyncio.to_thread(run.join)).status == "done"
    assert run.join(0) is run


async def test_scenarios_that_begin_alike_are_counted_apart_and_named_as_they_wish(home):
    async def roll(model, scenario):
        return await say(model, scenario["q"])

    alike = [{"system": "Think step by step. " * 8, "q": n} for n in range(3)]
    named = {"q": 3, "metadata": {"scenario_id": "the fourth", "level": 2}}
    run = await train(home[0], roll, [*alike, named], steps=1, groups_per_step=4)
    assert run.history[-1]["data/cum/num_unique_scenarios"] == 4
    facts = [group.metadata for group in run.groups if group.metadata["scenario_id"] == "the fourth"]
    assert [told["scenario_level"] for told in facts] == [2]


async def test_what_on_step_sees(home):
    seen = []

    async def on_step(run):
        await asyncio.sleep(0)
        seen.append((run.step, len(run.groups), run.history[-1]["step"]))

    await train(home[0], on_step=on_step)
    assert seen == [(1, 2, 1), (2, 2, 2)]
    await train(home[0], steps=3, on_step=lambda run: seen.append(run.step))
    assert seen[2:] == [3]


async def test_a_callback_that_fails_ends_the_run(home):
    with pytest.raises(ZeroDivisionError):
        await train(home[0], on_step=lambda run: 1 / 0)
    assert await home[0].get_step() == 1


async def test_after_each_judges_a_group(home):
    def judge(group):
        for place, trajectory in enumerate(group):
            trajectory.reward = float(place)
        return group

    run = await train(home[0], steps=1, after_each=judge)
    assert [t.reward for t in run.groups[0]] == [0, 1, 2, 3]


async def test_a_run_stops_at_its_time_limit_and_continues(home):
    assert (await train(home[0], budget_s=0)).step == 0
    run = await train(home[0], steps=1000, budget_s=2)
    assert (run.status, 0 < run.step < 1000) == ("stopped", True)
    text = f"The time limit budget_s=2 (2 s) is reached: the run stopped after step {run.step} of 1000."
    assert [*run.progress.notes.values()] == [f"{text} Train again to continue."]
    assert text in as_html(run.progress)
    assert text in [*AttachedRun(run.store).progress.notes.values()][0]
    last = run.step + 1
    again = await train(home[0], steps=last, budget_s=600)
    assert (again.status, again.step, again.progress.notes) == ("done", last, {})
    assert AttachedRun(run.store).progress.notes == {}


@pytest.mark.parametrize("wrong", [{"scenarios": []}, {"groups_per_step": 0}, {"rollouts_per_group": 0}])
async def test_what_cannot_be_trained_is_said_at_once(home, wrong):
    with pytest.raises(TrainError):
        train(home[0], **wrong)


async def test_one_run_at_a_time_trains_a_model(home):
    gate = Gate()
    run = train(home[0], gate)
    with pytest.raises(TrainError, match="being trained already"):
        train(home[0])
    run.stop()
    assert (await train(home[0])).step == 2


# pause, resume, stop


async def test_pause_and_resume_from_another_task(home):
    model, gate = home[0], Gate()
    run = train(model, gate, steps=3)
    await until(lambda: gate.started)
    await asyncio.create_task(asyncio.to_thread(run.pause))
    assert run.status == "pausing"
    gate.open.set()
    await until(lambda: run.status == "paused")
    assert (run.step, model.store.steps_saved()) == (1, [0, 1])
    await asyncio.sleep(0.2)
    assert (run.step, run.status) == (1, "paused")
    run.resume()
    assert run.status == "running"
    assert (await run).step == 3


async def test_a_pause_taken_back_is_none(home):
    run = train(home[0])
    for _ in range(1000):
        run.pause()
        run.resume()
    assert (await run).status == "done"


@pytest.mark.parametrize("seed", range(3))
async def test_buttons_pressed_in_any_order_never_lose_the_stop(home, seed):
    dice, run = random.Random(seed), train(home[0], steps=1000)
    for _ in range(50):
        dice.choice([run.pause, run.resume])()
        await asyncio.sleep(dice.random() * 0.02)
    await asyncio.wait_for(asyncio.to_thread(run.stop), 200)
    assert run.status == "stopped"
    assert run.step in home[0].store.steps_saved()


async def test_stop_now_drops_the_step(home):
    model, backend = home
    done, gate = heard(backend, RolloutDone), Gate()
    run = train(model, gate)
    await until(lambda: gate.started == 8)
    run.stop()  # returns although no rollout would ever finish
    assert (run.status, run.step, gate.cancelled, await model.get_step()) == ("stopped", 0, 8, 0)
    assert [event.error.split(":")[0] for event in done] == ["cancelled"] * 8
    assert (await run) is run
    assert (await train(model)).step == 2


async def test_stop_after_the_step_keeps_it(home):
    gate = Gate()
    run = train(home[0], gate, steps=5)
    await until(lambda: gate.started)
    run.stop(after_step=True, wait=False)
    await asyncio.sleep(0.1)
    assert run.status == "stopping"
    gate.open.set()
    await run
    assert (run.status, run.step, gate.cancelled) == ("stopped", 1, 0)


async def test_a_second_stop_does_not_wait_for_the_step(home):
    gate = Gate()
    run = train(home[0], gate)
    await until(lambda: gate.started)
    run.stop(after_step=True, wait=False)
    run.stop()
    assert (run.status, run.step) == ("stopped", 0)


async def test_a_paused_run_can_be_stopped(home):
    run = train(home[0], steps=5, on_step=lambda run: run.pause())
    await until(lambda: run.status == "paused")
    run.stop()
    assert (run.status, run.step) == ("stopped", 1)


async def test_stop_ends_a_callback_that_takes_long(home):
    begun = threading.Event()

    async def on_step(run):
        begun.set()
        await asyncio.sleep(60)

    run = train(home[0], on_step=on_step)
    await until(begun.is_set)
    run.stop()
    assert (run.status, run.step) == ("stopped", 1)


async def test_a_stop_reports_how_many_finished_rollouts_it_discards(home):
    model, backend = home
    done, gate = heard(backend, RolloutDone), Gate()

    async def rollout(model, scenario):
        return await (say if gate.started >= 3 else gate)(model, scenario)

    run = train(model, rollout)
    await until(lambda: len(done) == 5)  # the other three wait
    run.stop()
    (note,) = run.progress.notes.values()
    assert "discarded step 1 (finished rollouts: 5)." in note
    assert (run.status, gate.cancelled) == ("stopped", 3)
    run = await train(model, rollout=say, steps=1)
    assert run.progress.notes == {}
    run = train(model, steps=5)
    await until(lambda: run.step == 2)
    run.stop(after_step=True)
    assert not any("discarded" in note for note in run.progress.notes.values())


async def test_a_callback_may_stop_its_run_and_finish(home):
    after = []

    async def on_step(run):
        run.stop()
        await asyncio.sleep(0.05)
        after.append(run.step)

    run = await train(home[0], on_step=on_step, steps=5)
    assert (run.status, run.step, after) == ("stopped", 1, [1])
    run = await train(home[0], on_step=lambda run: run.stop(), steps=5)
    assert (run.status, run.step) == ("stopped", 2)


async def test_a_rollout_may_stop_its_run(home):
    begun = threading.Event()

    async def rollout(model, scenario):
        await asyncio.to_thread(begun.wait)
        run.stop()
        await asyncio.sleep(60)

    run = train(home[0], rollout)
    begun.set()
    await run
    assert (run.status, run.step) == ("stopped", 0)


async def test_a_file_stops_it_while_rollouts_hang(home):
    mark, gate = home[0].store.path / "STOP", Gate()
    mark.touch()  # of an earlier run
    run = train(home[0], gate)
    await until(lambda: gate.started == 8 and not mark.exists())
    await asyncio.sleep(0.7)
    assert run.status == "running"
    mark.touch()
    await asyncio.wait_for(run, 200)
    assert (run.status, run.step, gate.cancelled, mark.exists()) == ("stopped", 0, 8, False)


async def test_a_rollout_that_ignores_its_end_does_not_hold_up_the_stop(home):
    begun, free = threading.Event(), threading.Event()

    async def deaf(model, scenario):
        begun.set()
        while not free.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    async def sleepy(model, scenario):
        begun.set()
        await asyncio.to_thread(free.wait)

    try:
        for rollout in (sleepy, deaf):
            begun.clear()
            run = train(home[0], rollout, groups_per_step=1, rollouts_per_group=1)
            await until(begun.is_set)
            await asyncio.wait_for(asyncio.to_thread(run.stop), 200)
            assert (run.status, free.is_set()) == ("stopped", False)
    finally:
        free.set()


async def test_an_interrupted_cell_pauses_then_stops(home, capsys, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # as in a notebook
    gate = Gate()
    run = train(home[0], gate, steps=5)
    cell = asyncio.create_task(run.wait())
    await asyncio.sleep(0)
    await until(lambda: gate.started)
    cell.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cell
    assert (run.status, "run.resume() to continue" in capsys.readouterr().out) == ("pausing", True)
    cell = asyncio.create_task(run.wait())
    await asyncio.sleep(0.1)
    cell.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cell
    await until(lambda: run.status == "stopped")
    assert run.step == 0


PAUSED = """
import asyncio, sys
import art_nb as art

async def rollout(model, scenario):
    return art.Trajectory(messages_and_choices=[])

async def main():
    model = art.TrainableModel(name="tiny", project="tests", base_model=sys.argv[1])
    await model.register(art.LocalBackend(path=sys.argv[2], verbose=False))
    run = art.train(model, rollout, [1], steps=9, show=False, on_step=lambda run: run.pause())
    while run.status != "paused": await asyncio.sleep(0.01)
    print("paused", flush=True)

asyncio.run(main())
"""


def test_a_program_can_end_while_a_run_is_paused(tiny_model_dir, tmp_path):
    command = [warm_python(), "-c", PAUSED, str(tiny_model_dir), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "paused"), done.stderr


ROLLOUT = """
import art_nb as art

REWARD = {reward}
scenarios = list(range(12))


async def rollout(model, scenario):
    messages = [{{"role": "user", "content": f"free: {{scenario}}"}}]
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=4, logprobs=True
    )
    return art.Trajectory(messages_and_choices=[*messages, reply.choices[0]], reward=REWARD)
"""


async def test_a_program_that_imports_the_same_rollout_has_not_changed(home, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    size = {"groups_per_step": 1, "rollouts_per_group": 2}

    def imported(name, reward):
        (tmp_path / f"{name}.py").write_text(ROLLOUT.format(reward=reward))
        return importlib.import_module(name)

    (tmp_path / "script.py").write_text(ROLLOUT.format(reward=1.0))
    script = runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
    await art.train(home[0], script["rollout"], script["scenarios"], steps=1, **size)
    for steps, module in enumerate([imported("same", 1.0), imported("other", 2.0)], 2):
        await art.train(home[0], module.rollout, module.scenarios, steps=steps, **size)
    assert [row.get("data/code_changed") for row in home[0].store.history()] == [None, None, 1]
    assert capsys.readouterr().out.count("has changed after step") == 1


async def test_a_terminal_prints_warnings_once(home, capsys):
    async def without_signal(model, scenario):
        trajectory = await say(model, scenario)
        trajectory.reward = 1.0
        return trajectory

    await art.train(home[0], say, SCENARIOS, steps=1, groups_per_step=2, rollouts_per_group=2)
    await art.train(home[0], without_signal, SCENARIOS, steps=4, groups_per_step=2, rollouts_per_group=2)
    printed = capsys.readouterr().out
    assert printed.count("has changed after step 1") == 1
    assert printed.count("The reward is constant. Every reward of the last 2 steps was 1") == 1
    marks = [row.get("data/code_changed") for row in home[0].store.history()]
    assert marks == [None, 1, None, None], "the first step with the new code"
    await art.train(home[0], without_signal, SCENARIOS, steps=4, groups_per_step=2, rollouts_per_group=2)
    printed = capsys.readouterr().out
    assert "has 4 steps already" in printed and "The reward is constant" not in printed  # of an earlier session


async def test_code_is_compared_with_the_session_that_trained_the_previous_step(home):
    async def broken(model, scenario):
        raise ValueError("not finished")

    async def repaired(model, scenario):
        return await say(model, scenario)

    options = {"groups_per_step": 2, "rollouts_per_group": 2, "show": False}
    marks = lambda: [row.get("data/code_changed") for row in home[0].store.history()]
    await art.train(home[0], say, SCENARIOS, steps=1, **options)
    with pytest.raises(ValueError, match="not finished"):
        await art.train(home[0], broken, SCENARIOS, steps=3, **options)
    await art.train(home[0], say, SCENARIOS, steps=2, **options)
    assert marks() == [None, None], "the other code trained no step"
    with pytest.raises(ValueError, match="not finished"):
        await art.train(home[0], broken, SCENARIOS, steps=3, **options)
    await art.train(home[0], repaired, SCENARIOS, steps=4, **options)
    assert marks() == [None, None, 1, None]


JOINED = """
import asyncio, sys
import art_nb as art

async def rollout(model, scenario):
    print("rollout", flush=True)
    await asyncio.sleep(600)

model = art.TrainableModel(name="tiny", project="tests", base_model=sys.argv[1])
asyncio.run(model.register(art.LocalBackend(path=sys.argv[2], verbose=False)))
art.train(model, rollout, [1], steps=9, show=False).join()
"""


@pytest.mark.skipif(os.name != "posix", reason="a signal")
def test_an_interrupted_script_says_how_to_continue(tiny_model_dir, tmp_path):
    command = [sys.executable, "-c", JOINED, str(tiny_model_dir), str(tmp_path)]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while process.stdout.readline() != "rollout\n":
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGINT)
    said, complaint = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in complaint
    assert "Interrupted in step 1." in said
    assert "run it again to continue from the last checkpoint" in said
    assert "add run.join()" not in complaint


# rollouts that fail


async def crash(model, scenario):
    raise ValueError("boom")


async def hang(model, scenario):
    await asyncio.sleep(60)


async def lie(model, scenario):
    return "a trajectory"


async def spoil(model, scenario):
    return art.Trajectory(messages_and_choices=[], reward=math.nan)


# rollouts ahead of their step


class Slow:
    """Two replies a rollout; of odd scenarios the second comes after the next step has been trained."""

    def __init__(self):
        self.begun = []  # (scenario, steps trained by then)

    async def __call__(self, model, scenario):
        step = await model.get_step()
        self.begun.append((scenario, step))
        first = await say(model, scenario)
        end = time.monotonic() + 200
        while scenario % 2 and await model.get_step() == step < 2 and time.monotonic() < end:
            await asyncio.sleep(0.01)
        second = await say(model, scenario)
        entries = first.messages_and_choices + second.messages_and_choices
        return art.Trajectory(messages_and_choices=entries, reward=second.reward)


def versions(trajectory):
    return [choice.model_extra["policy_version"] for choice in trajectory.messages_and_choices[1::2]]


async def test_rollouts_start_a_step_early_and_continue_during_it(home, tiny_model_dir):
    model, _ = home
    rollout, plan = Slow(), {"steps": 3, "groups_per_step": 2, "scenarios": [0, 2, 1, 3, 4, 6]}
    run = await train(
        model,
        rollout,
        max_staleness=1,
        learning_rate=0.05,
        seed=next(seed for seed in range(99) if {*scenarios_of_step([0, 2, 1, 3, 4, 6], 1, 2, seed)} == {1, 3}),
        **plan,
    )
    assert {step for scenario, step in rollout.begun if scenario in (1, 3)} == {0}
    steps = {step: [t for group in model.store.read_groups("train", step) for t in group] for step in (1, 2, 3)}
    assert {tuple(versions(t)) for t in steps[1]} == {(0, 0)}
    assert {tuple(versions(t)) for t in steps[2]} == {(0, 1)}, "one reply by each policy"
    assert {(t.initial_policy_version, t.final_policy_version) for t in steps[2]} == {(0, 1)}
    assert [row["train/staleness_max"] for row in run.history] == [0, 1, 1]
    assert run.history[1]["train/staleness"] == 0.5
    policy = load_policy(tiny_model_dir, dtype=torch.float32)
    for trajectory in steps[2][:2]:  # each logprob is that of the policy that it names
        for choice in trajectory.messages_and_choices[1::2]:
            extra = choice.model_extra
            weights = policy.cast(read_adapter(model.store.checkpoint_dir(extra["policy_version"])))
            ids = extra["prompt_token_ids"] + extra["token_ids"]
            told = [entry.logprob for entry in choice.logprobs.content]
            exact = sequence_logprobs(policy, ids, [(weights, None)])[-len(told) :]
            assert exact.tolist() == pytest.approx(told, abs=0.01)


async def test_what_was_begun_ahead_ends_with_the_run(home):
    gate = Gate()
    run = train(home[0], gate, steps=5, max_staleness=2)
    await until(lambda: gate.started == 24)
    run.stop()
    assert gate.cancelled == gate.started == 24
    gate.open.set()
    run.options.on_step = Run.pause
    run.start()
    await until(lambda: run.status == "paused")
    with run.progress.lock:
        assert run.progress.started == 8, "those of the first run are forgotten"
    run.stop()


@pytest.mark.parametrize(
    ("failing", "kind", "said"),
    [
        (crash, "ValueError", "boom"),
        (hang, "RolloutError", "after 0.5 s"),
        (lie, "RolloutError", "returned str"),
        (spoil, "RolloutError", "reward is nan"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_failed_rollout_is_recorded_and_the_run_continues(home, failing, kind, said):
    model, backend = home
    events, count = heard(backend, RolloutDone), iter(range(100))
    said_before = {scenario: await say(model, scenario) for scenario in SCENARIOS}  # takes no time in a rollout

    async def rollout(model, scenario):
        if next(count) % 4 == 0:
            return await failing(model, scenario)
        return said_before[scenario].model_copy(deep=True) if failing is hang else await say(model, scenario)

    run = await train(model, rollout, timeout_s=0.5 if failing is hang else 200)
    assert (run.status, run.step) == ("done", 2)
    for step in (1, 2):
        groups = model.store.read_groups("train", step)
        errors = [error for group in groups for error in group.exceptions]
        assert [len(group) + len(group.exceptions) for group in groups] == [4, 4]
        assert [error.type.rpartition(".")[2] for error in errors] == [kind] * 2
        assert all(said in error.message and "Traceback" in error.traceback for error in errors)
    assert sum(said in (event.error or "") for event in events) == 4
    assert run.history[0]["train/exception_rate"] == 0.25


@pytest.mark.parametrize(("limit", "fails"), [(3, True), (4, False), (0.49, True), (0.5, False)])
async def test_more_failures_than_borne_end_the_run_with_the_reason(home, limit, fails):
    model, backend = home
    events, count = heard(backend, Failed), iter(range(100))

    async def rollout(model, scenario):
        return await (crash if next(count) % 2 == 0 else say)(model, scenario)

    run = train(model, rollout, steps=1, max_exceptions=limit)
    if not fails:
        assert (await run).status == "done"
        return
    with pytest.raises(ValueError, match="boom"):
        await run
    assert (run.status, run.step, str(run.error)) == ("failed", 0, "boom")
    [event] = events
    assert event.where == "step 1"
    assert event.message.startswith("ValueError: boom; failure 4 of 8 rollouts; max_exceptions=")
    assert "in crash" in event.traceback
    with pytest.raises(ValueError, match="boom"):
        run.join()
    assert (await train(model, steps=1)).step == 1


@pytest.mark.parametrize("leave", [SystemExit, KeyboardInterrupt])
async def test_a_rollout_that_leaves_the_program_fails_the_run_only(home, leave):
    async def rollout(model, scenario):
        raise leave

    run = train(home[0], rollout)
    with pytest.raises(TrainError, match="from within"):
        await asyncio.wait_for(run, 200)
    assert run.status == "failed"


async def test_a_rollout_that_is_not_async(home):
    with pytest.raises(RolloutError, match="not async: it returned a float"):
        await train(home[0], lambda model, scenario: 1.0)


async def test_closing_the_backend_fails_the_run(tiny_model_dir, tmp_path):
    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        gate = Gate()
        run = train(model, gate)
        await until(lambda: gate.started)
        await backend.close()
        gate.open.set()
        with pytest.raises(Exception, match="(?i)registered|closed|within|cancelled"):
            await asyncio.wait_for(run, 200)
    assert run.status == "failed"


# nothing to learn


async def test_the_reason_why_nothing_is_learned_is_printed_once(home, capsys):
    model, backend = home
    backend.runtime(model).verbose = True
    warned, reports = heard(backend, Warned), heard(backend, SignalReport)

    async def flat(model, scenario):
        trajectory = await say(model, scenario)
        trajectory.reward = 1.0
        return trajectory

    run = await train(model, flat)
    lines = [line for line in capsys.readouterr().out.splitlines() if "Nothing is learned" in line]
    assert [("no variance" in line, "step 1" in line) for line in lines] == [(True, True)]
    assert ["no variance" in event.message for event in warned] == [True, True]
    assert "step 2 (2 steps so far)" in [*run.progress.notes.values()][-1]  # the live cell
    assert [event.trainable_groups for event in reports] == [0, 0]
    assert (run.status, run.step, run.history[-1]["data/step_num_gradient_steps"]) == ("done", 2, 0)


async def test_a_silent_model_is_said_too(home, capsys):
    async def dicts(model, scenario):
        return art.Trajectory(messages_and_choices=[{"role": "user", "content": "x"}], reward=scenario)

    home[1].runtime(home[0]).verbose = True
    await train(home[0], dicts, steps=1)
    assert "no choice" in capsys.readouterr().out


async def test_a_run_that_has_all_steps_says_so_before_its_old_warnings(home, capsys):
    async def constant(model, scenario):
        trajectory = await say(model, scenario)
        trajectory.reward = 0.0
        return trajectory

    await train(home[0], constant)
    capsys.readouterr()
    events = heard(home[1], Warned)
    run = await train(home[0], constant)
    assert "has 2 steps already" in capsys.readouterr().out
    html = as_html(run.progress)
    assert html.index("has 2 steps already") < html.index("those of the earlier run") < html.index("reward is constant")
    assert not events  # a note of this run only, not of its directory


# resume


async def test_a_new_backend_continues_step_and_scenarios(tiny_model_dir, tmp_path):
    def told(seen):
        async def rollout(model, scenario):
            seen.append(scenario)
            return await say(model, scenario)

        return rollout

    whole, parts = [], []
    async with at_home(tiny_model_dir, tmp_path / "a") as (model, _):
        await train(model, told(whole), steps=4)
    for steps in (1, 3, 4):
        async with at_home(tiny_model_dir, tmp_path / "b") as (model, _):
            run = train(model, told(parts), steps=steps)
            assert (await run).step == steps
    assert parts == whole
    assert [row["step"] for row in model.store.history() if "train/reward" in row] == [1, 2, 3, 4]
    async with at_home(tiny_model_dir, tmp_path / "b") as (model, _):
        assert [row["step"] for row in (await train(model, steps=4)).history] == [1, 2, 3, 4]


def test_scenarios_come_once_an_epoch():
    picked = [s for step in range(9) for s in scenarios_of_step(SCENARIOS, step, 4, seed=1)]
    epochs = [picked[i : i + 12] for i in (0, 12, 24)]
    assert all(sorted(epoch) == SCENARIOS for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert scenarios_of_step("ab", 0, 5) != ["a"] * 5


def test_an_epoch_is_shuffled_once(monkeypatch):
    shuffled, shuffle = [], random.Random.sample
    monkeypatch.setattr(random.Random, "sample", lambda self, *args: shuffled.append(args) or shuffle(self, *args))
    for step in range(50):
        scenarios_of_step(range(100_000), step, 8, seed="of this test")
    assert len(shuffled) == 1


# the kernel stays the user's


async def test_the_event_loop_stays_responsive(home):
    """No event of a run is told before this loop has run once more: what happens on this loop would wait for ever."""
    model, backend = home
    loop, turns, told = asyncio.get_running_loop(), [], []

    def needs_the_loop(event):
        turned = threading.Event()
        loop.call_soon_threadsafe(lambda: (turns.append(event), turned.set()))
        told.append(turned.wait(200))

    for kind in (RolloutDone, GradientStep, StepDone):
        backend.bus.subscribe(needs_the_loop, kind)
    await train(model, steps=2, groups_per_step=4)
    assert {type(event) for event in turns} == {RolloutDone, GradientStep, StepDone}
    assert told == [True] * len(turns)


async def test_nothing_is_left_behind(tiny_model_dir, tmp_path):
    async with at_home(tiny_model_dir, tmp_path / "first") as (model, _):  # what a first use starts once a process
        await train(model, steps=1)
    before = set(threading.enumerate())
    async with at_home(tiny_model_dir, tmp_path / "second") as (model, backend):
        url = model.inference_base_url
        await train(model, steps=1)
        train(model, Gate(), steps=5).stop()
        if url.startswith("http://127.0.0.1"):
            async with httpx.AsyncClient(timeout=200) as client:
                assert (await client.get(url.removesuffix("/v1") + "/health")).status_code == 200
    others = lambda: [t for t in {*threading.enumerate()} - before if not t.name.startswith("asyncio_")]
    await until(lambda: not others())
    if url.startswith("http://127.0.0.1"):
        async with httpx.AsyncClient(timeout=200) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(url.removesuffix("/v1") + "/health")


async def test_each_step_is_a_line_of_a_file(home, capsys):
    await art.train(home[0], say, SCENARIOS, steps=2, groups_per_step=2, rollouts_per_group=4)
    shown = capsys.readouterr()
    lines = [line.partition(":")[0] for line in shown.out.splitlines() if line.startswith("Step")]
    assert lines[:2] == ["Step 1 of 2", "Step 2 of 2"]
    assert "RolloutError" not in shown.err
    assert issubclass(RolloutError, art.ArtError)


def test_a_notebook_completes_the_options_of_a_step():
    from IPython.core.completer import provisionalcompleter
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.user_ns["art"] = art
    with provisionalcompleter():
        texts = {found.text for found in shell.Completer.completions("art.train(model, rollout, scenarios, kl_", 40)}
    assert {"kl_coef=", "kl_reference="} <= texts


def test_the_default_learning_rate_is_one_value():
    command_line = parser().parse_args(["train", "script.py"]).learning_rate
    default = inspect.signature(art.train).parameters["learning_rate"].default
    assert default == StepConfig().learning_rate == command_line
