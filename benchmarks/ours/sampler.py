"""Our sampler alone, with and without an adapter."""

import asyncio
import time
from pathlib import Path

import torch
from shapes import ids
from talk import serve

from art_nb.learners.base import Learner
from art_nb.learners.checkpoints import save_checkpoint
from art_nb.policy.adapters import copy_adapter
from art_nb.policy.device import DeviceThread, use_device
from art_nb.policy.loading import load_policy
from art_nb.samplers.base import SamplingParams
from art_nb.samplers.transformers import TransformersSampler

HELD = {}


def setup(model: str, adapter_path: str) -> dict:
    """Load the model. Save a nonzero adapter as a PEFT directory, and load it."""
    policy = load_policy(model)
    with torch.no_grad():
        for layer in policy.layers.values():
            layer.B.normal_(0, 1e-3, generator=torch.Generator().manual_seed(0))
    policy.cast_masters()  # the adapter is the trained one, as in a training run
    save_checkpoint(Path(adapter_path), Learner(policy), step=0, base_model=model)
    worker = DeviceThread()
    worker.call(use_device, policy.device)
    HELD["sampler"] = TransformersSampler(policy, worker)
    HELD["sampler"].load("bench", copy_adapter(policy))
    return {"threads": torch.get_num_threads(), "dtype": str(policy.dtype)}


def sample(n: int, prompt: int, new: int, seed: int, with_adapter: bool = False) -> dict:
    """Sample `n` prompts at once. Return the total seconds, and tokens and seconds after all have their first token."""
    params, times = SamplingParams(max_tokens=new, ignore_eos=True), []

    async def first_token_time(i: int) -> float:
        first = None
        stream = HELD["sampler"].generate(ids(seed + i, prompt), params, "bench" if with_adapter else None)
        async for _ in stream:
            times.append(time.perf_counter())
            first = first or times[-1]
        return first

    async def last_first_token() -> float:
        return max(await asyncio.gather(*(first_token_time(i) for i in range(n))))

    start = time.perf_counter()
    first = asyncio.run(last_first_token())
    return {
        "seconds": times[-1] - start,
        "tokens": len(times),
        "decode_seconds": times[-1] - first,
        "decode_tokens": sum(t > first for t in times),
    }


if __name__ == "__main__":
    serve({"setup": setup, "sample": sample})
