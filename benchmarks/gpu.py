"""Measure this device (`make gpu`): parity, sampling rates, sync, trainer, learning and memory.

Each row is printed as a line of JSON. On a machine without CUDA, the same code runs on the CPU with small sizes, and
the first row reports this."""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from shapes import ids
from transformers import AutoModelForCausalLM, Qwen3Config

from art_nb.backends.engines import choose_sampler
from art_nb.core.types import BackendMissing
from art_nb.learners.base import Learner, StepConfig
from art_nb.learners.unsloth import UnslothLearner, unsloth_version
from art_nb.models.weights import fetch
from art_nb.policy.adapters import adapter
from art_nb.policy.device import DeviceThread
from art_nb.policy.loading import load_policy
from art_nb.policy.lora import Policy, sequence_logprobs
from art_nb.policy.packing import WeightedRow
from art_nb.samplers.base import SamplingParams
from art_nb.samplers.transformers import TransformersSampler
from art_nb.samplers.vllm import VLLMSampler, vllm_params, vllm_version

CUDA = torch.cuda.is_available()
SHAPES = {
    "Qwen3-0.6B": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "Qwen3-4B": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
    "two small layers": dict(hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=2),
}


def synchronized_time() -> float:
    """Return the time after the device has finished its work."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def engine_status(which: Callable[[], str]) -> tuple[bool, str]:
    """Return whether an engine is available, and its version or the error message."""
    try:
        return True, which()
    except BackendMissing as error:
        return False, str(error)


def device(arguments) -> dict:
    """Return the device and the installed packages."""
    name = torch.cuda.get_device_name() if CUDA else "CPU only, with small sizes; no GPU was measured"
    return {
        "device": name,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "vllm": engine_status(vllm_version)[1],
        "unsloth": engine_status(unsloth_version)[1],
        "auto": choose_sampler("auto", "cuda" if CUDA else "cpu")[1],
    }


class Sampling:
    """A sampler of one kind with a nonzero adapter, and the policy that it is compared with."""

    def __init__(self, kind: str, directory: Path):
        self.worker, self.policy = DeviceThread(), load_policy(directory)
        with torch.no_grad():
            for layer in self.policy.layers.values():
                layer.B.normal_(0, 1e-3)
        make = {"embedded": lambda: TransformersSampler(self.policy, self.worker, max_model_len=2048)} | {
            way: lambda way=way: VLLMSampler(self.policy, self.worker, directory, max_model_len=2048, way=way)
            for way in ("merged", "swapped")
        }
        self.sampler = self.worker.call(make[kind])
        self.sampler.load("made@1", adapter(self.policy))

    async def replies(self, n: int, new: int, key: str | None, prompt: int = 128) -> list:
        """Return prompts and replies of `n` concurrent requests."""

        async def sample(i):
            params = SamplingParams(max_tokens=new, ignore_eos=True, seed=i)
            return ids(i, prompt), [s async for s in self.sampler.generate(ids(i, prompt), params, key)]

        return await asyncio.gather(*(sample(i) for i in range(n)))

    def rate(self, n: int, new: int, key: str | None) -> float:
        """Return tokens per second including prompt processing: the median of three runs after one warm-up run."""

        def once():
            start = synchronized_time()
            asyncio.run(self.replies(n, new, key))
            return n * new / (synchronized_time() - start)

        return statistics.median([once() for _ in range(4)][1:])

    def offline(self, n: int, new: int) -> float:
        """Return the same rate for vLLM's engine alone, which receives all requests at once."""
        engine = self.sampler._engine

        def batch(seed):
            start = synchronized_time()
            for i in range(n):
                params = vllm_params(SamplingParams(max_tokens=new, ignore_eos=True, seed=i), frozenset(), 2048)
                engine.add_request(f"{seed}.{i}", {"prompt_token_ids": ids(i, 128)}, params)
            while engine.has_unfinished_requests():
                engine.step()
            return n * new / (synchronized_time() - start)

        return statistics.median([self.worker.call(batch, seed) for seed in range(4)][1:])

    def close(self) -> None:
        """Close the sampler and its thread."""
        self.worker.call(self.sampler.close)
        self.worker.close()


def kinds() -> list[str]:
    """Return the kinds of samplers that are available."""
    return ["embedded"] + (["merged", "swapped"] if engine_status(vllm_version)[0] else [])


def measure_each_sampler(arguments, measure: Callable[[Sampling], dict]) -> dict:
    """Run a measurement on each kind of sampler. If one fails, its result is the error."""
    results = {}
    for kind in kinds():
        try:
            with closing(Sampling(kind, arguments.model)) as side:
                results[kind] = measure(side)
        except Exception as error:
            results[kind] = {"error": f"{type(error).__name__}: {error}"}
    return results


def parity(arguments) -> dict:
    """Return the mean and largest difference in nats between the logprobs of sampler and policy, with an adapter."""

    def gaps(side: Sampling) -> dict:
        pairs = asyncio.run(side.replies(8, 32, "made@1"))
        side.worker.call(side.policy.cast_masters)
        differences = [
            np.array([s.logprob for s in reply])
            - side.worker.call(sequence_logprobs, side.policy, prompt + [s.token_id for s in reply])[len(prompt) - 1 :]
            .cpu()
            .numpy()
            for prompt, reply in pairs
        ]
        return {
            "mean": float(abs(np.concatenate(differences)).mean()),
            "max": float(abs(np.concatenate(differences)).max()),
        }

    return measure_each_sampler(arguments, gaps)


def rates(arguments) -> dict:
    """Return tokens per second of each sampler without and with an adapter, vLLM's engine alone, and the sync time."""
    n, new = (256, 256) if CUDA else (16, 32)

    def measured(side: Sampling) -> dict:
        row = {"without": side.rate(n, new, None), "with": side.rate(n, new, "made@1")}
        if hasattr(side.sampler, "_engine"):
            row["engine alone"] = side.offline(n, new)
        times = []
        for step in range(2, 7):  # like after an optimizer step: load new weights, then sample one token
            start = synchronized_time()
            side.sampler.load(f"made@{step}", adapter(side.policy))
            asyncio.run(side.replies(1, 1, f"made@{step}"))
            times.append(synchronized_time() - start)
        return row | {"new weights to first token, s": statistics.median(times)}

    return measure_each_sampler(arguments, measured)


def rows(count: int, length: int, seed: int = 0) -> list[WeightedRow]:
    """Return rows of one length. The second half of each row is trained."""
    sampled = np.arange(length) >= length // 2
    logprobs = np.where(sampled, -8.0, np.nan).astype(np.float32)
    return [
        WeightedRow(
            np.array(ids(seed + i, length), np.int32),
            sampled,
            logprobs,
            group=i,
            advantage=float(i % 2) * 2 - 1,
            coef=2 / (count * length),
        )
        for i in range(count)
    ]


def peak_flops(dev: torch.device) -> float:
    """Measure the FLOP/s of a bf16 matrix product."""
    size = 8192 if CUDA else 1024
    a = torch.randn(size, size, device=dev, dtype=torch.bfloat16)
    times = []
    for _ in range(10):
        start = synchronized_time()
        a @ a
        times.append(synchronized_time() - start)
    return 2 * size**3 / statistics.median(times[3:])


def trainer(arguments) -> dict:
    """Return tokens per second of optimizer steps (LoRA rank 16, random weights), and the share of the peak."""
    results, length, dev = {}, 16_384 if CUDA else 128, torch.device("cuda" if CUDA else "cpu")
    for name in ("Qwen3-0.6B", "Qwen3-4B") if CUDA else ("two small layers",):
        config = Qwen3Config(
            **SHAPES[name],
            num_key_value_heads=SHAPES[name]["num_attention_heads"] // 2,
            head_dim=128,
            vocab_size=151_936,
            tie_word_embeddings=True,
        )
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        with torch.device(dev):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        learner, times = Learner(Policy(model, rank=16)), []
        weights = sum(layer.weight.numel() for layer in learner.policy.layers.values())
        batch = rows(4, length)
        for _ in range(4):
            start = synchronized_time()
            learner.step(batch, StepConfig(learning_rate=1e-6, tokens_per_batch=length))
            times.append(synchronized_time() - start)
        speed = 4 * length / statistics.median(times[1:])
        results[name] = {
            "tokens a second": speed,
            "of peak": 4 * weights * speed / peak_flops(dev),
            "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if CUDA else None,
        }
        del learner, model
    return results


def unsloth(arguments) -> dict:
    """Compare Unsloth with our learner on the same rows: difference of the logprobs, and speed of whole steps."""
    if not engine_status(unsloth_version)[0]:
        return {"missing": engine_status(unsloth_version)[1]}
    batch, results = rows(8, 512 if CUDA else 64), {}
    ours, theirs = Learner(load_policy(arguments.model)), UnslothLearner(load_policy(arguments.model), arguments.model)
    for name, learner in (("ours", ours), ("unsloth", theirs)):
        times = []
        for _ in range(4):
            start = synchronized_time()
            results[name] = {"loss": learner.step(batch, StepConfig(learning_rate=0.0))["loss/train"]}
            times.append(synchronized_time() - start)
        results[name]["tokens a second"] = sum(len(r.tokens) for r in batch) / statistics.median(times[1:])
    a, b = (torch.cat([t.logprobs_E for _, t in learner.seen]) for learner in (ours, theirs))
    return results | {"mean": float((a - b).abs().mean()), "max": float((a - b).abs().max())}


def learning(arguments) -> dict:
    """Train tic-tac-toe like `make demo`."""
    demo = Path(__file__).parents[1] / "examples" / "tic_tac_toe" / "demo.py"
    size = [] if CUDA else ["--steps", "1", "--games", "8"]
    command = [sys.executable, demo.name, *size]
    process = subprocess.run(command, cwd=demo.parent, capture_output=True, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


CHECKS = {check.__name__: check for check in (device, parity, rates, trainer, unsloth, learning)}


def main() -> None:
    """Run the checks one after the other. If a check fails, its row contains the error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a directory of weights; SmolLM2-135M if left out")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=[*CHECKS])
    arguments = parser.parse_args()
    arguments.model = arguments.model or fetch("smollm2-135m")
    for name in arguments.only:
        start = time.time()
        try:
            result = CHECKS[name](arguments)
        except Exception as error:  # a row that fails must not end the other measurements
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"row": name, "seconds": round(time.time() - start, 1), **result}), flush=True)


if __name__ == "__main__":
    main()
