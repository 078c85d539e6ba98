"""The speeds of this machine: sampler, learner, the split of a step, import time. Prints one JSON object.

Every figure is the median of `--repeats` runs after one that warms up.
Nothing here is asserted: a speed is a report."""
import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import art_nb as art
from art_nb.batches import TrainRow
from art_nb.learners import Learner, StepConfig
from art_nb.policy import Policy, load_policy
from art_nb.samplers import SamplingParams, TransformersSampler
from art_nb.weights import fetch
from art_nb.worker import Worker

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "tic_tac_toe"))
from tic_tac_toe import random_game, rollout


def median_of(repeats: int, measure: Callable[[], float]) -> float:
    "Median of `repeats` measurements after one that warms up."
    measure()
    return round(statistics.median(measure() for _ in range(repeats)), 3)


def random_tokens(rng, n: int) -> list[int]:
    return rng.integers(100, 40_000, n).tolist()


def sampler_speed(sampler: TransformersSampler, concurrent: int, prompt: int = 100, new: int = 64) -> float:
    "Sampled tokens a second, time of the prompts included."
    rng = np.random.default_rng()
    params = SamplingParams(max_tokens=new, ignore_eos=True)

    async def one() -> None:
        async for _ in sampler.generate(random_tokens(rng, prompt), params):
            pass

    async def everybody() -> None:
        await asyncio.gather(*(one() for _ in range(concurrent)))

    start = time.perf_counter()
    asyncio.run(everybody())
    return concurrent * new / (time.perf_counter() - start)


def group_rows(groups: int = 4, size: int = 8, prefix: int = 192, own: int = 48) -> list[TrainRow]:
    "Rows of groups with a common prompt: a packing ratio of 3.3."
    rng, rows = np.random.default_rng(0), []
    for group in range(groups):
        start = random_tokens(rng, prefix)
        for _ in range(size):
            tokens = np.array(start + random_tokens(rng, own), dtype=np.int32)
            sampled = np.arange(len(tokens)) >= prefix
            rows.append(TrainRow(tokens, sampled, np.where(sampled, -5, np.nan).astype(np.float32), group,
                                 float(rng.normal()), 1 / (groups * size * own)))
    return rows


def learner_speed(learner: Learner, rows: list[TrainRow], share: bool) -> float:
    "Logical tokens a second of a whole optimizer step."
    start = time.perf_counter()
    learner.step(rows, StepConfig(learning_rate=0.0, share_prefixes=share))
    return sum(len(row.tokens) for row in rows) / (time.perf_counter() - start)


def import_seconds() -> float:
    "A fresh process that imports art_nb, less one that imports nothing."
    def run(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start
    return run("import art_nb") - run("pass")


async def step_split(repeats: int, groups: int = 8, size: int = 8) -> dict[str, float]:
    "Seconds of a tic-tac-toe step of `groups` x `size` games: rollouts, train, sync, other."
    with tempfile.TemporaryDirectory() as path:
        model = art.TrainableModel(name="bench", project="bench", base_model="smollm2-135m")
        async with art.LocalBackend(path=path, verbose=False) as backend:
            await model.register(backend)
            await model.train_sft([random_game(seed) for seed in range(48)],
                                  art.TrainSFTConfig(learning_rate=1e-3, batch_size=16))
            run = art.train(model, rollout, range(1000), steps=repeats + 2, groups_per_step=groups,
                            rollouts_per_group=size, show=False)
            await run
            rows = run.history[1:]
    split = {"rollout_s": "time/step_rollout_s", "train_s": "time/step_backend_train_s", "sync_s": "time/step_sync_s",
             "wall_s": "time/step_wall_s"}
    found = {name: statistics.median(row[key] for row in rows) for name, key in split.items()}
    found["other_s"] = found["wall_s"] - found["rollout_s"] - found["train_s"] - found["sync_s"]
    return {name: round(value, 3) for name, value in found.items()}


def gemm_gflops() -> float:
    "A bf16 product of 2048 x 2048."
    a, b = torch.randn(2048, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()

    def once() -> float:
        start = time.perf_counter()
        a @ b
        return 2 * 2048 ** 3 / (time.perf_counter() - start) / 1e9
    return median_of(9, once)


def machine() -> dict:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    packages = ("torch", "transformers", "numpy")
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "load_before": os.getloadavg()[0],
            "system": platform.platform(), "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages}}


def policy_figures(policy: Policy, repeats: int) -> dict[str, float]:
    worker = Worker()
    sampler = TransformersSampler(policy, worker)
    figures = {f"sampler_tokens_per_s_{n}": median_of(repeats, lambda n=n: sampler_speed(sampler, n))
               for n in (1, 16, 64)}
    worker.close()
    learner, rows = Learner(policy), group_rows()
    for name, share in (("shared", True), ("plain", False)):
        speed = median_of(repeats, lambda share=share: learner_speed(learner, rows, share))
        figures[f"learner_tokens_per_s_{name}"] = speed
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    report = {"machine": machine(), "repeats": repeats, "model": "smollm2-135m", "bf16_gemm_gflops": gemm_gflops(),
              "import_s": median_of(repeats, import_seconds),
              **policy_figures(load_policy(fetch("smollm2-135m")), repeats),
              "step_64_games": asyncio.run(step_split(repeats))}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
