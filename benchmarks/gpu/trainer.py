"""The trainer: tokens per second, model FLOPs utilization and memory at the shapes of models, and Unsloth."""

import re
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from shapes import ids
from transformers import AutoModelForCausalLM

from art_nb.backends.planning import apply_plan
from art_nb.learners.base import Learner, StepConfig
from art_nb.learners.unsloth import UnslothLearner, unsloth_version
from art_nb.policy.kernels import has_flash, multiplies_bf16
from art_nb.policy.loading import default_dtype, load_policy
from art_nb.policy.lora import Policy
from art_nb.policy.memory_plan import MemoryPlan, MemorySettings, free_memory, model_shape, plan_memory
from art_nb.policy.packing import WeightedRow
from gpu.common import (
    CUDA,
    DEVICE,
    REPEATS,
    Empty,
    against_plan,
    device_name,
    engine_status,
    median_seconds,
    model_config,
    reset_peak,
    synchronized_time,
)

RANK = 16
DTYPE = default_dtype(DEVICE)
PEAKS = {  # dense bf16 FLOP/s from NVIDIA's data sheets; "T4" is its fp16 peak
    "T4": 65e12,
    "L4": 121e12,
    "A100": 312e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
}


def training_rows(count: int, length: int, seed: int = 0) -> list[WeightedRow]:
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


def model_flops(policy: Policy, rows: list[WeightedRow]) -> float:
    """Return the floating-point operations that a training step requires, without recomputation.

    The model FLOPs utilization (MFU) is this number per second, divided by the peak of the device. The formula is that
    of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), 6N + 12LHQT per token, with three changes:

    - Frozen weights need 4 operations per token instead of 6, because they have no gradients. Adapters need 6.
    - Attention counts the pairs of a causal mask, T(T + 1)/2, instead of T².
    - The head counts the trained tokens only, because no other logits are computed.
    """
    config, tokens = policy.model.config, sum(len(row.tokens) for row in rows)
    frozen = sum(layer.weight.numel() for layer in policy.layers.values())
    adapters = sum(layer.A.numel() + layer.B.numel() for layer in policy.layers.values())
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    pairs = sum(len(row.tokens) * (len(row.tokens) + 1) // 2 for row in rows)
    head, trained = policy.model.get_output_embeddings().weight.numel(), sum(int(row.sampled.sum()) for row in rows)
    return (4 * frozen + 6 * adapters) * tokens + 12 * width * pairs + 4 * head * trained


def nominal_peak() -> float | None:
    """Return the dense bf16 FLOP/s of the data sheet, or `None` if the device is not in `PEAKS`."""
    words = set(re.split(r"[\s-]+", device_name()))
    known = [name for name in PEAKS if words.issuperset(name.split())]
    return PEAKS[max(known, key=len)] if known else None


def measured_peak() -> float:
    """Measure the FLOP/s of a matrix product."""
    size = 8192 if CUDA else 512
    dtype = DTYPE if multiplies_bf16(DEVICE) else torch.float32
    a = torch.randn(size, size, device=DEVICE, dtype=dtype)
    return 2 * size**3 / median_seconds(lambda _: a @ a, 9)


def random_learner(name: str, length: int) -> tuple[Learner, MemoryPlan]:
    """Return a learner with random weights in the shape of a model, and the memory plan that it follows."""
    config = model_config(name)
    settings = MemorySettings(
        dtype=DTYPE,
        device=DEVICE.type,
        rank=RANK,
        sampler=None,
        max_model_len=length,
        masks=CUDA and not has_flash(DEVICE, DTYPE),
    )
    plan = plan_memory(model_shape(config, name), free_memory(DEVICE), settings)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    policy = Policy(model, rank=RANK)
    apply_plan(plan, policy)
    return Learner(policy), plan


def train_shape(name: str, length: int) -> dict:
    """Return tokens per second of whole optimizer steps at the shape of a model, its MFU, and memory."""
    before = reset_peak()
    learner, plan = random_learner(name, length)
    batch = training_rows(4, length)
    config = StepConfig(learning_rate=1e-6, tokens_per_batch=plan.tokens_per_batch)
    seconds = median_seconds(lambda _: learner.step(batch, config))
    memory, flops, nominal = against_plan(plan, before), model_flops(learner.policy, batch) / seconds, nominal_peak()
    return {
        "rows": f"4 x {length}",
        "checkpointing": learner.policy.checkpointing,
        "tokens/s": 4 * length / seconds,
        "TFLOP/s": flops / 1e12,
        "MFU": flops / nominal if nominal else None,
        "share of measured peak": flops / measured_peak(),
        **memory,
    }


def trainer(model: Path, names: tuple[str, ...], length: int) -> Iterator[dict]:
    """Yield a result for each shape. A shape that does not fit has an error."""
    results = {}
    for name in names:
        try:
            results[name] = train_shape(name, length if CUDA else 64)
        except Exception as error:  # the other shapes must still be measured
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    yield results


small_shapes = partial(trainer, names=("Qwen3-0.6B", "Qwen3-4B"), length=16_384)
shape_7b = partial(trainer, names=("Qwen2.5-7B",), length=4096)
shape_14b = partial(trainer, names=("Qwen2.5-14B",), length=4096)


def unsloth(model: Path) -> Iterator[dict]:
    """Compare Unsloth with our learner on the same rows: difference of the logprobs, and speed of whole steps."""
    available, reason = engine_status(unsloth_version)
    if not available:
        raise Empty(reason)
    batch, results = training_rows(8, 512 if CUDA else 64), {}
    ours, theirs = Learner(load_policy(model)), UnslothLearner(load_policy(model), model)
    for name, learner in (("ours", ours), ("unsloth", theirs)):
        times = []
        for _ in range(1 + REPEATS):
            start = synchronized_time()
            results[name] = {"loss": learner.step(batch, StepConfig(learning_rate=0.0))["loss/train"]}
            times.append(synchronized_time() - start)
        results[name]["tokens/s"] = sum(len(r.tokens) for r in batch) / statistics.median(times[1:])
    a, b = (torch.cat([t.logprobs_E for _, t in learner.seen]) for learner in (ours, theirs))
    yield results | {"mean": float((a - b).abs().mean()), "max": float((a - b).abs().max())}
