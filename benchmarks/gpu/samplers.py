"""Samplers: parity with the policy, tokens per second, new weights, and the memory of shared weights."""

import asyncio
import statistics
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import torch
from shapes import ids

from art_nb.policy.adapters import copy_adapter
from art_nb.policy.device import DeviceThread
from art_nb.policy.loading import load_policy
from art_nb.policy.lora import sequence_logprobs
from art_nb.samplers.base import SamplingParams
from art_nb.samplers.transformers import TransformersSampler
from art_nb.samplers.vllm import VLLMSampler, vllm_params, vllm_version
from gpu.common import CUDA, Empty, engine_status, median_seconds, peak_bytes, reset_peak, synchronized_time, used_bytes

LENGTH = 2048  # tokens of a conversation


class Sampling:
    """A sampler of one kind with a nonzero adapter, and the policy that it is compared with."""

    def __init__(self, kind: str, directory: Path, **options):
        self.worker, self.policy = DeviceThread(), load_policy(directory)
        with torch.no_grad():
            for layer in self.policy.layers.values():
                layer.B.normal_(0, 1e-3)
        self.policy.cast_masters()  # the adapter is the trained one, as in a training run
        make = (
            (lambda: TransformersSampler(self.policy, self.worker, max_model_len=LENGTH))
            if kind == "embedded"
            else lambda: VLLMSampler(
                self.policy, self.worker, directory, max_model_len=LENGTH, adapter_mode=kind, **options
            )
        )
        self.sampler = self.worker.call(make)
        self.sampler.load("made@1", copy_adapter(self.policy))

    async def replies(self, n: int, new: int, key: str | None, prompt: int = 128) -> list:
        """Return prompts and replies of `n` concurrent requests."""

        async def sample(i):
            params = SamplingParams(max_tokens=new, ignore_eos=True, seed=i)
            return ids(i, prompt), [s async for s in self.sampler.generate(ids(i, prompt), params, key)]

        return await asyncio.gather(*(sample(i) for i in range(n)))

    def rate(self, n: int, new: int, key: str | None) -> float:
        """Return tokens per second including prompt processing: the median of the runs after one warm-up run."""
        return n * new / median_seconds(lambda _: asyncio.run(self.replies(n, new, key)))

    def offline(self, n: int, new: int) -> float:
        """Return the same rate for vLLM's engine alone, which receives all requests at once."""
        engine = self.sampler._engine

        def batch(number):
            for i in range(n):
                params = vllm_params(SamplingParams(max_tokens=new, ignore_eos=True, seed=i), frozenset(), LENGTH)
                engine.add_request(f"{number}.{i}", {"prompt_token_ids": ids(i, 128)}, params)
            while engine.has_unfinished_requests():
                engine.step()

        return n * new / median_seconds(lambda number: self.worker.call(batch, number))

    def close(self) -> None:
        """Close the sampler and its thread."""
        self.worker.call(self.sampler.close)
        self.worker.close()


def parity(side: Sampling) -> dict:
    """Return the mean and largest difference in nats between the logprobs of sampler and policy, with an adapter."""
    pairs = asyncio.run(side.replies(8, 32 if CUDA else 4, "made@1"))
    side.worker.call(side.policy.cast_masters)
    differences = []
    for prompt, reply in pairs:
        tokens, sampled = prompt + [s.token_id for s in reply], np.array([s.logprob for s in reply])
        logprobs = side.worker.call(sequence_logprobs, side.policy, tokens)[len(prompt) - 1 :]
        differences.append(abs(sampled - logprobs.cpu().numpy()))
    joined = np.concatenate(differences)
    return {"mean": float(joined.mean()), "max": float(joined.max())}


def rates(side: Sampling) -> dict:
    """Return tokens per second of a sampler without and with an adapter, and of vLLM's engine alone."""
    n, new = (256, 256) if CUDA else (4, 8)
    row = {"requests": n, "without": side.rate(n, new, None), "with": side.rate(n, new, "made@1")}
    return row | ({"engine alone": side.offline(n, new)} if hasattr(side.sampler, "_engine") else {})


def sync(side: Sampling) -> dict:
    """Return the seconds to load new weights, and until the first token that is sampled with them."""
    load, first = [], []
    for step in range(2, 7):  # like after an optimizer step
        start = synchronized_time()
        side.sampler.load(f"made@{step}", copy_adapter(side.policy))
        load.append(synchronized_time() - start)
        asyncio.run(side.replies(1, 1, f"made@{step}"))
        first.append(synchronized_time() - start)
    return {"load, s": statistics.median(load), "first token, s": statistics.median(first)}


def each_sampler(model: Path) -> Iterator[dict]:
    """Yield the rows `parity`, `rates` and `sync`. Each has a result for each sampler that is available, or why not."""
    available, reason = engine_status(vllm_version)
    measures, results = (parity, rates, sync), [{}, {}, {}]
    for kind in ("embedded", "merged", "swapped"):
        try:
            if kind != "embedded" and not available:
                raise Empty(reason)
            with closing(Sampling(kind, model)) as side:
                for measure, result in zip(measures, results):
                    result[kind] = measure(side)
        except Empty as error:
            for result in results:
                result[kind] = {"empty": str(error)}
        except Exception as error:  # the other samplers must still be measured
            for result in results:
                result.setdefault(kind, {"error": f"{type(error).__name__}: {error}"})
    yield from results


def shared(model: Path, share: bool = True) -> Iterator[dict]:
    """Yield the memory of vLLM with the policy's weights, or with a copy of its own."""
    available, reason = engine_status(vllm_version)
    if not available:
        raise Empty(reason)
    before = reset_peak()
    with closing(Sampling("swapped", model, shared=share)) as side:
        asyncio.run(side.replies(4, 4, "made@1"))
        used, peak = used_bytes() - before, peak_bytes() - before
        yield {
            "used GB": used / 1e9,
            "peak GB": peak / 1e9,
            "copied parameters": len(getattr(side.sampler, "unshared_parameters", [])),
        }


own_copy = partial(shared, share=False)
