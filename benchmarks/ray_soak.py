"""A run of `RayBackend` in which a random replica or rank is killed at intervals: `ray_soak.py [--minutes 30]`.

The tiny model trains on a new cluster of this machine (Linux only). The script prints its progress to stderr, and one
JSON object in the last line of stdout: the steps, the failed rollouts, the memory of this process, the objects in Ray's
store, and the processes that remain after `close`. Its exit status is 1 if something is left or has failed.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import art_nb as art
from art_nb.core.events import RolloutDone, StepDone, Warned
from art_nb.distributed import supervision
from art_nb.distributed.placement import connect_cluster
from art_nb.models.tiny import save_tiny_model

SAMPLE_S = 10.0


async def rollout(model, scenario):
    """A conversation of three turns whose reward is the number of letters e."""
    trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": f"A1 B2 {scenario}"}], reward=0.0)
    for turn in range(3):
        reply = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages(), max_tokens=20, logprobs=True
        )
        trajectory.messages_and_choices += [reply.choices[0], {"role": "user", "content": f"line {turn}"}]
        trajectory.reward += (reply.choices[0].message.content or "").count("e") + 0.01 * random.random()
    return trajectory


def own_memory_mb() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def cluster_processes() -> list[str]:
    """Return the first word of each process of the cluster, which all have its access token in their environment."""
    token, found = f"RAY_AUTH_TOKEN={os.environ['RAY_AUTH_TOKEN']}".encode(), []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if int(directory.name) != os.getpid() and token in (directory / "environ").read_bytes().split(b"\0"):
                found.append((directory / "cmdline").read_text().replace("\0", " ").split(" ")[0])
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def store_objects() -> int:
    """Return the number of objects in the store of the cluster, from a file that Ray writes every 10 seconds."""
    from ray._private import worker

    file, end = Path(worker._global_node.get_logs_dir_path(), "debug_state.txt"), time.monotonic() + 60
    while time.monotonic() < end:  # at first, and while Ray writes it, the file is not complete
        text = file.read_text() if file.exists() else ""
        if found := re.search(r"num local (?:plasma )?objects: (\d+)", text):
            return int(found[1])
        time.sleep(0.2)
    raise RuntimeError(f"{file} does not contain the number of objects: does this version of Ray write it?")


class Soak:
    """The run and what was observed."""

    def __init__(self, backend, model, run, seed):
        self.backend, self.model, self.run, self.random = backend, model, run, random.Random(seed)
        self.counts, self.samples, self.errors, self.ended = Counter(), [], [], []
        self.start = self.latest_step = time.monotonic()
        self.longest_step_s, self.stopping = 0.0, False
        run.bus.subscribe(self._observe, StepDone, RolloutDone)
        backend.bus.subscribe(self._observe, Warned)

    def _observe(self, event) -> None:
        if isinstance(event, StepDone):
            now = time.monotonic()
            self.longest_step_s, self.latest_step = max(self.longest_step_s, now - self.latest_step), now
        self.counts[type(event).__name__] += 1
        if isinstance(event, RolloutDone) and event.error and not self.stopping:
            self.errors.append(event.error)

    def kill_one(self) -> None:
        """Kill a random replica or rank."""
        runtime = self.backend.runtime(self.model)
        places = [("replica", replica.facts["place"]) for replica in runtime.replicas.table.serving()]
        places += [("rank", facts["place"]) for facts in runtime.group.facts]
        kind, place = self.random.choice(places)
        try:
            os.kill(place.pid, signal.SIGKILL)
        except ProcessLookupError:  # it was lost a moment ago
            return
        self.counts[f"killed {kind}"] += 1

    def sample(self) -> None:
        """Record the memory and the objects, and start the run again if it has failed."""
        elapsed_s = time.monotonic() - self.start
        self.samples.append((round(elapsed_s), self.run.step, round(own_memory_mb()), store_objects()))
        time_s, step, memory_mb, objects = self.samples[-1]
        text = f"{time_s} s: step {step}, {memory_mb} MB, {objects} objects, {dict(self.counts)}"
        print(text, file=sys.stderr, flush=True)
        if self.run.status == "failed":
            self.ended.append(str(self.run.error))
            self.run.start()

    async def last(self, minutes: float, kill_every_s: float) -> None:
        """Train for some minutes."""
        next_kill = kill_every_s
        while (elapsed_s := time.monotonic() - self.start) < 60 * minutes:
            if elapsed_s >= next_kill:
                self.kill_one()
                next_kill += kill_every_s
            await asyncio.to_thread(self.sample)
            await asyncio.sleep(SAMPLE_S)
        self.stopping = True  # rollouts of later steps are canceled
        await asyncio.to_thread(self.run.stop, True)

    def result(self) -> dict:
        """Return what was observed until the run has stopped."""
        memory = [sample[2] for sample in self.samples]
        return {
            "minutes": round((time.monotonic() - self.start) / 60, 1),
            "steps": self.run.step,
            "longest_step_s": round(self.longest_step_s, 1),
            "killed": {kind: self.counts[f"killed {kind}"] for kind in ("replica", "rank")},
            "rollouts": self.counts["RolloutDone"],
            "failed_rollouts": len(self.errors),
            "errors": sorted({error.splitlines()[-1][:200] for error in self.errors}),
            "runs_that_failed": self.ended,
            "warnings": self.counts["Warned"],
            "asked_again": self.backend.runtime(self.model).replicas.table.counts["asked again"],
            "memory_mb": {"first": memory[0], "middle": memory[len(memory) // 2], "last": memory[-1]},
            "samples": self.samples,
        }


async def soak(options: argparse.Namespace, folder: str) -> dict:
    """Run the soak test and return its result."""
    connection = connect_cluster("local")
    idle = store_objects()
    backend = art.RayBackend(
        samplers=options.samplers, learners=options.learners, path=f"{folder}/runs", device="cpu", verbose=False
    )
    model = art.TrainableModel(name="soak", project="soak", base_model=str(save_tiny_model(f"{folder}/tiny")))
    await model.register(backend)
    sizes = {"steps": 10**9, "groups_per_step": 2, "rollouts_per_group": 4, "max_staleness": 1}
    test = Soak(backend, model, art.train(model, rollout, range(1000), show=False, **sizes), options.seed)
    await test.last(options.minutes, options.kill_every_s)
    result = test.result()
    await backend.close()
    del test, backend
    end = time.monotonic() + 30
    while time.monotonic() < end and (store_objects() > idle or any(map(is_actor, cluster_processes()))):
        await asyncio.sleep(0.5)
    result |= {"objects_left": store_objects() - idle, "actors_left": sum(map(is_actor, cluster_processes()))}
    connection.close()
    await asyncio.sleep(2)
    return result | {"processes_left": cluster_processes()}


def is_actor(name: str) -> bool:
    """Return whether the name of a process is that of one of our actors."""
    return name.startswith(("ray::Replica", "ray::Rank"))


def main() -> int:
    """Parse the options, run the test and print its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kill-every-s", type=float, default=60.0)
    parser.add_argument("--samplers", type=int, default=2)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # a place that loses three replicas in ten minutes would stay empty
        with mock.patch.object(supervision, "MAX_LOSSES", 10**6):
            result = asyncio.run(soak(options, folder))
    print(json.dumps(result))
    left = result["objects_left"] or result["actors_left"] or result["processes_left"]
    return int(bool(left or result["failed_rollouts"] or result["runs_that_failed"]))


if __name__ == "__main__":
    sys.exit(main())
