"""The bytes that models of 0.6B to 14B parameters and their training rows need on a GPU, counted on fake tensors."""

from functools import cache

import numpy as np
import pytest
import torch
from support.fake_weights import CONFIGS, GB, LiveBytes, fake_model, fake_tensors, rows_of

from art_nb.learners.base import Learner
from art_nb.policy import Policy, packing
from art_nb.policy.memory_plan import activation_bytes, model_shape

RANK = 16
# GB: the limit, which is today's number, and the target. Lower a limit when the code needs less memory.
# The target of the weights is one copy in bf16 and the adapter in fp32.
WEIGHTS = {
    "Qwen3-0.6B": (1.28, 1.24),
    "Qwen2.5-3B": (6.39, 6.30),
    "Qwen3-4B": (8.29, 8.18),
    "Gemma-3-4B": (7.98, 7.88),
    "Qwen2.5-7B": (15.53, 15.40),
    "Llama-3.1-8B": (16.37, 16.23),
    "Qwen2.5-14B": (30.03, 29.82),
}
# By model, number of rows, common tokens, own tokens of each row: the peak of a forward and backward pass, and the
# largest tensor. No target is lower than these numbers: the activations of all layers are kept.
ROWS = {
    ("Qwen3-0.6B", 1, 0, 16_384): ((24.2, 24.2), (0.65, 0.65)),
    ("Qwen2.5-3B", 1, 0, 4_096): ((17.3, 17.3), (0.65, 0.65)),
    ("Qwen3-4B", 1, 0, 16_384): ((77.2, 77.2), (0.65, 0.65)),
    ("Gemma-3-4B", 1, 0, 4_096): ((19.0, 19.0), (0.65, 0.65)),
    ("Qwen2.5-7B", 1, 0, 4_096): ((23.1, 23.1), (0.65, 0.65)),
    ("Qwen2.5-7B", 8, 4_096, 1_024): ((70.9, 70.9), (0.95, 0.95)),
    ("Llama-3.1-8B", 1, 0, 4_096): ((23.9, 23.9), (0.65, 0.65)),
    ("Qwen2.5-14B", 1, 0, 4_096): ((35.2, 35.2), (0.65, 0.65)),
}
# The same with checkpointing of the decoder layers.
CHECKPOINTED = {
    ("Qwen3-0.6B", 1, 0, 16_384): ((2.1, 2.5), (0.65, 0.65)),
    ("Qwen3-4B", 1, 0, 16_384): ((5.9, 6.0), (0.65, 0.65)),
    ("Qwen2.5-7B", 1, 0, 4_096): ((2.0, 2.0), (0.65, 0.65)),
    ("Qwen2.5-7B", 8, 4_096, 1_024): ((6.0, 8.0), (0.95, 0.95)),
    ("Qwen2.5-14B", 1, 0, 4_096): ((3.1, 3.5), (0.65, 0.65)),
}
CASES = [(case, False) for case in ROWS] + [(case, True) for case in CHECKPOINTED]


@cache
def measured(name, count, shared, own, checkpointing=False):
    """Return GB of the weights of a learner, of the peak of a step's gradients, of the largest tensor, and tokens."""
    with pytest.MonkeyPatch.context() as monkeypatch, fake_tensors(monkeypatch), LiveBytes() as live:
        learner = Learner(Policy(fake_model(name), rank=RANK))
        learner.policy.checkpointing = checkpointing
        [small], [batch] = (
            learner.packed(rows, 1 << 20, True) for rows in (rows_of(1, 0, 16), rows_of(count, shared, own))
        )
        with torch.no_grad():
            learner.logprobs(small)  # creates what is kept between steps
        weights = live.now
        live.peak, live.largest = live.now, 0
        learner.logprobs(batch, with_entropy=False)[0].sum().backward()
        assert all(p.grad is not None for p in learner.parameters())
        return weights / GB, (live.peak - weights) / GB, live.largest / GB, len(batch.tokens_S)


def check(report, table, name, pairs):
    """Report measured numbers with their limits and targets, and compare them with the limits."""
    columns = [f"{value:7.2f}  limit {limit:6.2f}  target {target:5.2f}" for value, (limit, target) in pairs]
    report(table, f"{name:62} {'  |'.join(columns)}")
    for value, (limit, _) in pairs:
        assert value <= limit


@pytest.mark.parametrize(("case", "checkpointing"), CASES, ids=lambda part: "-".join(map(str, np.atleast_1d(part))))
def test_rows_need_no_more_memory_than_before(case, checkpointing, report):
    name, count, shared, own = case
    _, peak, largest, tokens = measured(*case, checkpointing)
    assert tokens == shared + count * own
    words = f"{name}: {count} x {own:,} tokens" + (f" after {shared:,} common ones" if shared else "")
    words += ", checkpointing" if checkpointing else ""
    limits = (CHECKPOINTED if checkpointing else ROWS)[case]
    check(report, "GB of a training batch: peak, and largest tensor", words, list(zip((peak, largest), limits)))


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_need_no_more_memory_than_before(name, report):
    case = next(case for case in ROWS if case[0] == name)
    check(report, "GB of the weights of policy and learner", name, [(measured(*case)[0], WEIGHTS[name])])


@pytest.mark.parametrize(("case", "checkpointing"), CASES, ids=lambda part: "-".join(map(str, np.atleast_1d(part))))
def test_the_memory_plan_is_what_a_row_needs(case, checkpointing, report):
    name, count, shared, own = case
    with torch.device("cpu"):
        shape = model_shape(CONFIGS[name]())
    keys = count * (shared + own)
    plan = activation_bytes(shape, 2, shared + count * own, keys, checkpointing=checkpointing, chunk=128).total / GB
    peak = measured(*case, checkpointing)[1]
    report("GB of a training batch: planned and counted", f"{name:12} {case[1:]!s:20} {plan:7.2f} {peak:7.2f}")
    assert peak <= 1.03 * plan
    assert peak >= 0.9 * plan


def test_the_memory_plan_counts_masks(monkeypatch, report):
    monkeypatch.setattr(packing, "has_varlen", lambda q: False)
    case = ("Qwen3-4B", 1, 0, 16_384)
    with torch.device("cpu"):
        shape = model_shape(CONFIGS[case[0]]())
    plan = activation_bytes(shape, 2, 16_384, checkpointing=True, chunk=128, masks=True).total / GB
    peak = measured.__wrapped__(*case, checkpointing=True)[1]
    report("GB of a training batch: planned and counted", f"{case[0]:12} with masks           {plan:7.2f} {peak:7.2f}")
    assert plan == pytest.approx(peak, rel=0.05)
