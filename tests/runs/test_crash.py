"""SIGKILL in the middle of rollouts, gradient steps, checkpoints and starts: the run goes on as if nothing was."""

import json
import os
import random
import signal

import pytest
from safetensors.numpy import load_file
from support.audit import count
from support.forked_runs import the_job

import art_nb as art
from art_nb.policy import adapter_files
from art_nb.policy.adapters import fingerprint
from art_nb.runs.store import is_complete_checkpoint

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the children are forked from one warm process")


def raw_rows(store):
    """The lines of history.jsonl as they stand; the last may be torn."""
    file = store.path / "history.jsonl"
    *lines, last = file.read_bytes().split(b"\n") if file.exists() else [b""]
    return [json.loads(line) for line in lines], last


def of_training(row):
    return "train/reward" in row or "sft/final_loss" in row


def check_disk(store, rows_lag=0):
    """Everything that a kill may not harm; returns the last finished step. A dead run's history may lag by a row."""
    steps = store.steps_saved()
    for step in steps:
        folder = store.checkpoint_dir(step)
        assert is_complete_checkpoint(folder)
        told = adapter_files.read_training_json(folder)
        assert (told["step"], told["adapter"]) == (step, fingerprint(adapter_files.read_adapter(folder)))
        assert int(load_file(folder / "optimizer.safetensors")["steps"]) <= step
    rows, _ = raw_rows(store)
    of_rows = [row["step"] for row in filter(of_training, rows)]
    last = max(steps, default=0)
    assert of_rows in [[*range(1, last + 1 - lag)] for lag in range(rows_lag + 1)], "no row is lost or doubled"
    for step in store.steps("train"):
        assert store.read_groups("train", step)
    assert [event for event in store.events()] or not steps[1:]
    return max(steps, default=0)


MOMENTS = [
    "child",
    "AdapterServed",
    "registered",
    "RolloutStarted",
    "CheckpointSaved",
    "AdapterServed",
    "RolloutDone",
    "GradientStep",
    "CheckpointSaved",
    "StepDone",
]  # what the child has just said


@pytest.mark.timeout(900)
def test_a_killed_run_resumes_from_its_last_finished_step(nursery, tmp_path, tiny_model_dir):
    rng, job = random.Random(0), the_job("train", "run", tmp_path, tiny_model_dir, steps=10**6)
    store, reached, mid_save = art.RunStore(tmp_path / "crash" / "models" / "run"), 0, 0
    lasting = nursery.live(job | {"name": "timed", "steps": 3}).lasting()
    kills = count(50, 10)
    for n in range(kills):
        moment = MOMENTS[n % len(MOMENTS)]
        often = 1 if moment in ("child", "registered") else rng.randint(1, 6)
        life = nursery.live(job, moment, often, rng.random() * lasting[moment])
        assert life.status == signal.SIGKILL
        if life.steps("registered"):
            assert life.steps("registered") == [reached], "it began where the last one ended"
        last_said = max([reached, *life.steps("CheckpointSaved")])
        reached = check_disk(store, rows_lag=1)
        assert reached in (last_said, last_said + 1), "what was said to be saved is saved"
        mid_save += any(path.suffix in (".tmp", ".old") for path in store.path.rglob(".*"))
    assert mid_save or kills < 50, "some kills came in the middle of writing"
    last = nursery.live(job | {"steps": reached + 2})
    assert last.lines[-1] == ["finished"]
    assert last.steps("registered") == [reached]
    assert check_disk(store) == reached + 2 >= kills // 3
    assert raw_rows(store)[1] == b"", "no torn line is left"
    assert [path.name for path in store.path.rglob(".*")] == [], "no half written file is left"
    rows = [row["step"] for row in store.history()]
    assert rows[-2:] == [reached + 1, reached + 2]


def test_a_learner_that_was_killed_ends_with_the_very_same_weights(nursery, tmp_path, tiny_model_dir):
    steps, rng = count(16, 8), random.Random(1)
    place = {"path": tmp_path, "base_model": tiny_model_dir, "steps": steps}
    assert nursery.live(the_job("record", "recorder", **place)).lines[-1] == ["finished"]
    place["recorded"] = str(tmp_path / "crash" / "models" / "recorder")
    assert nursery.live(the_job("feed", "whole", **place)).lines[-1] == ["finished"]
    moments, lives = ["GradientStep", "AdapterServed", "CheckpointSaved", "registered"], 0
    job = the_job("feed", "killed", **place)
    while nursery.live(job, moments[lives % 4], delay_s=rng.random() * 0.02).status:
        lives += 1
    assert lives >= steps // 2
    whole, killed = (art.RunStore(tmp_path / "crash" / "models" / name) for name in ("whole", "killed"))
    assert whole.steps_saved() == killed.steps_saved() == list(range(steps + 1))
    for step in range(steps + 1):
        for name in ("adapter_model", "optimizer"):
            files = [store.checkpoint_dir(step) / f"{name}.safetensors" for store in (whole, killed)]
            assert files[0].read_bytes() == files[1].read_bytes()
    adapters = {adapter_files.read_training_json(whole.checkpoint_dir(step))["adapter"] for step in range(steps + 1)}
    assert len(adapters) == steps + 1, "every step learnt something"
