"""SIGKILL in the middle of rollouts, gradient steps, checkpoints and starts: the run goes on as if nothing was."""
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import art_nb as art
from art_nb import checkpoints
from art_nb.policy import fingerprint
from art_nb.store import whole_checkpoint

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the children are forked from one warm process")
HERE = Path(__file__).parent
ALONE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass
class Life:
    """What a child said until its end."""

    lines: list[list[str]]
    status: int
    times: list[float]

    def steps(self, kind):
        return [int(words[1]) for words in self.lines if words[0] == kind]

    def lasting(self):
        """For each kind of line, how long it was followed by nothing of another kind, at most."""
        kinds, found = [words[0] for words in self.lines], {}
        for i, kind in enumerate(kinds[:-1]):
            after = next((j for j in range(i + 1, len(kinds)) if kinds[j] != kind), i)
            found[kind] = max(found.get(kind, 0.0), self.times[after] - self.times[i])
        return found


class Nursery:
    """The warm process and the children it forks, one at a time."""

    def __init__(self, log):
        command = [sys.executable, str(HERE / "crash_parts.py")]
        env = os.environ | ALONE | {"PYTHONPATH": str(HERE.parent)}
        self.process = subprocess.Popen(command, env=env, text=True, stderr=log, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)
        self._read()

    def _read(self):
        words = self.process.stdout.readline().split()
        assert words, "the warm process is dead"
        return words

    def live(self, job, kill_at=None, nth=1, delay_s=0.0, by=signal.SIGKILL):
        """Let a child do a job; kill it some time after it has said `kill_at` for the nth time."""
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        pid, lines, times, seen = int(self._read()[1]), [["child"]], [time.monotonic()], 0
        while lines[-1][0] != "ended":
            seen += lines[-1][0] == kill_at
            if lines[-1][0] == kill_at and seen == nth:
                time.sleep(delay_s)
                os.kill(pid, by)
            lines.append(self._read())
            times.append(time.monotonic())
        return Life(lines[:-1], int(lines[-1][1]), times)

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    with open(tmp_path_factory.mktemp("log") / "stderr", "w") as log:
        made = Nursery(log)
        yield made
        made.close()


def the_job(do, name, path, base_model, **more):
    return {"do": do, "name": name, "path": str(path), "base_model": str(base_model), **more}


def raw_rows(store):
    """The lines of history.jsonl as they stand; the last may be torn."""
    file = store.path / "history.jsonl"
    *lines, last = file.read_bytes().split(b"\n") if file.exists() else [b""]
    return [json.loads(line) for line in lines], last


def check_disk(store):
    """Everything that a kill may not harm; returns the last finished step."""
    steps = store.steps_saved()
    for step in steps:
        folder = store.checkpoint_dir(step)
        assert whole_checkpoint(folder)
        told = checkpoints.facts(folder)
        assert (told["step"], told["adapter"]) == (step, fingerprint(checkpoints.read_adapter(folder)))
        assert int(load_file(folder / "optimizer.safetensors")["steps"]) <= step
    rows, _ = raw_rows(store)
    of_rows = [row["step"] for row in rows]
    assert of_rows == sorted(set(of_rows)), "no row is doubled or out of order"
    assert of_rows[-1:] <= steps[-1:]
    for step in store.steps("train"):
        assert len(store.read_groups("train", step)) == 2
    assert [event for event in store.events()] or not steps[1:]
    return max(steps, default=0)


MOMENTS = ["child", "AdapterServed", "registered", "RolloutStarted", "CheckpointSaved", "AdapterServed", "RolloutDone",
           "GradientStep", "CheckpointSaved", "StepDone"]      # what the child has just said


def test_a_killed_run_goes_on_from_its_last_finished_step(nursery, tmp_path, tiny_model_dir):
    rng, job = random.Random(0), the_job("train", "run", tmp_path, tiny_model_dir, steps=10**6)
    store, reached, mid_save = art.RunStore(tmp_path / "crash" / "models" / "run"), 0, 0
    lasting = nursery.live(job | {"name": "timed", "steps": 3}).lasting()
    for n in range(50):
        moment = MOMENTS[n % len(MOMENTS)]
        often = 1 if moment in ("child", "registered") else rng.randint(1, 6)
        life = nursery.live(job, moment, often, rng.random() * lasting[moment])
        assert life.status == signal.SIGKILL
        if life.steps("registered"):
            assert life.steps("registered") == [reached], "it began where the last one ended"
        last_said = max([reached, *life.steps("CheckpointSaved")])
        reached = check_disk(store)
        assert reached in (last_said, last_said + 1), "what was said to be saved is saved"
        mid_save += any(path.suffix in (".tmp", ".old") for path in store.path.rglob(".*"))
    assert mid_save, "some kills came in the middle of writing"
    last = nursery.live(job | {"steps": reached + 2})
    assert last.lines[-1] == ["finished"]
    assert last.steps("registered") == [reached]
    assert check_disk(store) == reached + 2 >= 20
    assert raw_rows(store)[1] == b"", "no torn line is left"
    assert [path.name for path in store.path.rglob(".*")] == [], "no half written file is left"
    rows = [row["step"] for row in store.history()]
    assert rows[-2:] == [reached + 1, reached + 2]


def test_a_learner_that_was_killed_ends_with_the_very_same_weights(nursery, tmp_path, tiny_model_dir):
    steps, rng = 16, random.Random(1)
    place = {"path": tmp_path, "base_model": tiny_model_dir, "steps": steps}
    assert nursery.live(the_job("record", "recorder", **place)).lines[-1] == ["finished"]
    place["recorded"] = str(tmp_path / "crash" / "models" / "recorder")
    assert nursery.live(the_job("feed", "whole", **place)).lines[-1] == ["finished"]
    moments, lives = ["GradientStep", "AdapterServed", "CheckpointSaved", "registered"], 0
    job = the_job("feed", "killed", **place)
    while nursery.live(job, moments[lives % 4], delay_s=rng.random() * 0.02).status:
        lives += 1
    assert lives >= 6
    whole, killed = (art.RunStore(tmp_path / "crash" / "models" / name) for name in ("whole", "killed"))
    assert whole.steps_saved() == killed.steps_saved() == list(range(steps + 1))
    for step in range(steps + 1):
        for name in ("adapter_model", "optimizer"):
            files = [store.checkpoint_dir(step) / f"{name}.safetensors" for store in (whole, killed)]
            assert files[0].read_bytes() == files[1].read_bytes()
    adapters = {checkpoints.facts(whole.checkpoint_dir(step))["adapter"] for step in range(steps + 1)}
    assert len(adapters) == steps + 1, "every step learnt something"
