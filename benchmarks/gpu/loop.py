"""The whole loop: rollouts through the endpoint, idle share, drift, memory, two engines, two devices, learning."""

import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from openai import AsyncOpenAI
from shapes import between, opening

import art_nb as art
from art_nb.core.types import BackendMissing
from art_nb.learners.settings import StepConfig
from art_nb.rollouts.trajectories import get_messages
from gpu.common import CUDA, REPEATS, Empty, against_plan, reset_peak
from gpu.trainer import training_rows

STEPS = 6 if CUDA else 2
SIZES = {"groups_per_step": 8, "rollouts_per_group": 8} if CUDA else {"groups_per_step": 2, "rollouts_per_group": 2}
SHAPE = {"prompt": 128, "turns": 2, "new": 64, "gap": 40} if CUDA else {"prompt": 32, "turns": 2, "new": 4, "gap": 20}


async def converse(client: AsyncOpenAI, name: str, seed: int, number: int) -> art.Trajectory:
    """Return a conversation in the sizes of `SHAPE`. The reward is arbitrary."""
    entries = opening(seed, SHAPE["prompt"])
    for turn in range(SHAPE["turns"]):
        if turn:
            entries.append(between(seed + 1000 * turn + number, SHAPE["gap"]))
        completion = await client.chat.completions.create(
            model=name,
            messages=get_messages(entries),
            max_completion_tokens=SHAPE["new"],
            logprobs=True,
            extra_body={"ignore_eos": True},
        )
        entries.append(completion.choices[0])
    return art.Trajectory(messages_and_choices=entries, reward=float(number % 2))


class Session:
    """A model that is registered with a new `LocalBackend`, and an event loop."""

    def __init__(self, weights: Path, **options):
        self.directory = tempfile.TemporaryDirectory(prefix="art-nb-gpu-", ignore_cleanup_errors=True)
        self.loop, self.numbers = asyncio.new_event_loop(), count()
        self.model = art.TrainableModel(name="bench", project="gpu", base_model=str(weights))
        self.backend = art.LocalBackend(path=self.directory.name, verbose=False, plan=True, **options)

    def __enter__(self):
        try:
            self.loop.run_until_complete(self.model.register(self.backend))
        except BackendMissing as error:
            raise Empty(str(error)) from error
        self.runtime = self.backend.runtime(self.model)
        return self

    def __exit__(self, *_):
        self.loop.run_until_complete(self.backend.close())
        self.loop.close()
        self.directory.cleanup()

    def train(self, steps: int, **options) -> list[dict]:
        """Train `steps` more steps with `art.train` and return their metrics."""

        async def rollout(model, seed):
            return await converse(model.openai_client(), model.get_inference_name(), seed, next(self.numbers))

        run = art.train(
            self.model,
            rollout,
            range(100_000),
            steps=self.runtime.step + steps,
            learning_rate=1e-4,
            show=False,
            **SIZES,
            **options,
        )
        run.join()
        return run.history[-steps:]


def rollouts(session: Session) -> dict:
    """Return rollouts per second through the endpoint: over HTTP, and in this process without a socket."""
    n, endpoint = 64 if CUDA else 4, session.runtime.endpoint
    endpoint.start()

    def rate(client: AsyncOpenAI) -> float:
        async def play(seed):
            await asyncio.gather(*(converse(client, session.model.name, seed + i, i) for i in range(n)))

        start = time.perf_counter()
        session.loop.run_until_complete(play(next(session.numbers) * n))
        return n / (time.perf_counter() - start)

    http = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, timeout=300)
    clients = {"over HTTP": http, "in process": session.model.openai_client()}
    result = {
        name: statistics.median([rate(client) for _ in range(1 + REPEATS)][1:]) for name, client in clients.items()
    }
    return {f"rollouts/s {name}": value for name, value in result.items()} | {
        "sampled tokens/s over HTTP": result["over HTTP"] * SHAPE["turns"] * SHAPE["new"],
        "concurrent": n,
        **SHAPE,
    }


class Utilization:
    """The share of time in which a kernel runs, as `nvidia-smi` reports it every 200 ms."""

    def __enter__(self):
        command = [
            "nvidia-smi",
            "--query-gpu=utilization.gpu",
            "--format=csv,noheader,nounits",
            "-lms",
            "200",
            "-i",
            "0",
        ]
        found = CUDA and shutil.which(command[0])
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if found else None
        return self

    def __exit__(self, *_):
        text = ""
        if self.process:
            self.process.terminate()
            text = self.process.communicate()[0]
        percents = [float(line) for line in text.split() if line.isdigit()]
        self.share = statistics.mean(percents) / 100 if percents else None


def idle(steps: list[dict], sampler_s: float, utilization: float | None) -> dict:
    """Return the share of the steps in which neither the sampler nor the learner worked, and the parts of a step.

    Within the work of an engine, the device can also wait for the host. `nvidia-smi` includes this.
    """
    names = {"rollouts": "rollout", "training": "backend_train", "new weights": "sync", "checkpoint": "save"}
    wall, training = (sum(step[f"time/step_{name}_s"] for step in steps) for name in ("wall", "backend_train"))
    parts = {name: statistics.median(step[f"time/step_{key}_s"] for step in steps) for name, key in names.items()}
    return {
        "idle share": 1 - (sampler_s + training) / wall,
        "idle share, nvidia-smi": None if utilization is None else 1 - utilization,
        "seconds per step": wall / len(steps),
        **{f"{name}, s": value for name, value in parts.items()},
    }


def drift(steps: list[dict]) -> dict:
    """Return the differences between the sampler's and the learner's logprobs of each step, in nats."""
    names = ("logprob_diff_mean", "logprob_diff_max", "kl_sampler")
    return {name: [step[f"offpolicy/{name}"] for step in steps] for name in names}


def timed_steps(session: Session, **options) -> tuple[dict, list[dict]]:
    """Run a step as a warm-up, then measured ones. Return the row `idle` and the metrics of all steps."""
    warm = session.train(1, **options)
    busy = session.runtime.sampler.stats()["busy_s"]
    with Utilization() as utilization:
        steps = session.train(STEPS, **options)
    return idle(steps, session.runtime.sampler.stats()["busy_s"] - busy, utilization.share), warm + steps


def memory(session: Session, before: int) -> dict:
    """Train rows of the planned length and compare the peak memory with the plan. `before`: bytes before loading."""
    runtime, plan = session.runtime, session.runtime.plan
    length = plan.max_model_len if CUDA else 64
    config = StepConfig(learning_rate=0.0, tokens_per_batch=plan.tokens_per_batch)
    runtime.worker.call(runtime.learner.step, training_rows(2, length), config)
    return {"row of tokens": length, **against_plan(plan, before)}


def loop(model: Path) -> Iterator[dict]:
    """Yield the rows `rollouts`, `idle`, `drift` and `memory` of one registered model."""
    before = reset_peak()
    with Session(model) as session:
        yield {"sampler": type(session.runtime.sampler).__name__, **rollouts(session)}
        shares, steps = timed_steps(session)
        yield shares
        yield drift(steps)
        yield memory(session, before)


def vllm_unsloth(model: Path) -> Iterator[dict]:
    """Yield the idle share, the drift and the memory with vLLM as the sampler and Unsloth as the learner."""
    before = reset_peak()
    with Session(model, sampler="vllm", learner="unsloth") as session:
        shares, steps = timed_steps(session)
        yield shares | drift(steps) | memory(session, before)


def two_devices(model: Path) -> Iterator[dict]:
    """Yield the seconds of a step on one device and on two, where rollouts run during the training step."""
    if (found := torch.cuda.device_count()) < 2:
        raise Empty(f"two CUDA devices are needed, and this machine has {found}")
    result = {}
    for name, options in (("one", {}), ("two", {"sampler_device": "cuda:0", "learner_device": "cuda:1"})):
        with Session(model, **options) as session:
            shares, steps = timed_steps(session, max_staleness=1 if options else 0)
            result[name] = {"seconds per step": shares["seconds per step"], **drift(steps)}
    yield result


def learning(model: Path) -> Iterator[dict]:
    """Train tic-tac-toe like `make demo`."""
    demo = Path(__file__).parents[2] / "examples" / "tic_tac_toe" / "demo.py"
    size = [] if CUDA else ["--steps", "1", "--groups", "1", "--games", "4", "--warm-up", "8"]
    command = [sys.executable, demo.name, "--json", *size]
    process = subprocess.run(command, cwd=demo.parent, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(" | ".join(process.stderr.splitlines()[-2:])[-400:])
    yield json.loads(process.stdout.splitlines()[-1])
