"""Unsloth's own model as the learner (`make test-unsloth`): the contract, our numbers, a process left as it was."""

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("unsloth")

import torch

from art_nb.learners.base import Learner, StepConfig
from art_nb.learners.unsloth import UnslothLearner
from art_nb.policy.adapters import copy_adapter, masters
from art_nb.policy.loading import load_policy
from art_nb.policy.packing import WeightedRow, micro_batches


def rows(seed=0, groups=3, size=4):
    """Groups of rows with a common beginning, of many lengths."""
    draw = np.random.default_rng(seed)
    made = []
    for group in range(groups):
        start = draw.integers(3, 200, 5 + 9 * group)
        for i in range(size):
            tokens = np.concatenate([start, draw.integers(3, 200, 3 + 4 * i)]).astype(np.int32)
            sampled = np.arange(len(tokens)) >= len(start)
            logprobs = np.where(sampled, -5.5, np.nan).astype(np.float32)
            made.append(WeightedRow(tokens, sampled, logprobs, group=group, advantage=float(i) - 1.5, coef=1 / 30))
    return made


@pytest.fixture(scope="module")
def pair(tiny_model_dir):
    """Our learner and Unsloth's, of one model in fp32, with the same adapter."""
    ours, theirs = (load_policy(tiny_model_dir, dtype=torch.float32) for _ in range(2))
    draw = torch.Generator().manual_seed(1)
    for a, b in zip(masters(ours).values(), masters(theirs).values(), strict=True):
        with torch.no_grad():
            b.copy_(a.add_(0.05 * torch.randn(a.shape, generator=draw)))
    return Learner(ours), UnslothLearner(theirs, tiny_model_dir)


@pytest.mark.parametrize("share", [True, False], ids=["common prefixes", "rows alone"])
def test_each_token_has_its_position(pair, share):
    batches = micro_batches(rows(), 256, share)
    for learner in pair:
        learner.policy.cast_masters()
        learner.activate_adapter()
    for batch in batches:
        (a, h), (b, g) = (learner.logprobs(batch) for learner in pair)
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)
        torch.testing.assert_close(h, g, atol=2e-5, rtol=0)
    wrong = micro_batches(rows(), 256)
    for batch in wrong:  # what it would cost to count along the pack
        batch.positions_S = torch.arange(len(batch.positions_S))
    batches = micro_batches(rows(), 256)
    gaps = [pair[0].logprobs(a)[0] - pair[1].logprobs(b)[0] for a, b in zip(batches, wrong, strict=True)]
    assert max(float(gap.abs().max()) for gap in gaps) > 1e-3


@pytest.mark.parametrize("options", [{}, {"kl_coef": 0.1, "loss": "ppo"}], ids=["cispo", "ppo with a KL term"])
def test_a_step_is_our_step(pair, options):
    ours, theirs = (learner.step(rows(), StepConfig(learning_rate=1e-3, **options)) for learner in pair)
    assert ours["loss/train"] == pytest.approx(theirs["loss/train"], abs=1e-5)
    assert ours["loss/grad_norm"] == pytest.approx(theirs["loss/grad_norm"], rel=1e-3)
    for name, tensor in copy_adapter(pair[0].policy).items():
        torch.testing.assert_close(tensor, copy_adapter(pair[1].policy)[name], atol=2e-4, rtol=0)


def test_the_drift_is_measured_from_another_adapter(pair):
    config, other = StepConfig(learning_rate=0.0, kl_shaping=0.5), copy_adapter(pair[0].policy)
    far = {name: tensor * 2 for name, tensor in other.items()}
    found = [
        [learner.step(rows(), config, weights=weights)["loss/kl_policy_ref"] for weights in (None, other, far)]
        for learner in pair
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    base, here, there = found[1]
    assert abs(here) < 1e-5 < 1e-3 < min(abs(base), abs(there))


async def test_unsloth_keeps_the_contract(keeps_contract):
    await keeps_contract(learner="unsloth")


UNLOADED = """
import sys, torch
from art_nb.policy.lora import sequence_logprobs
from art_nb.policy.loading import load_policy
from art_nb.policy.isolation import import_isolated
if sys.argv[2] == "with": import_isolated("unsloth")
print(sequence_logprobs(load_policy(sys.argv[1]), list(range(3, 60))).tolist())
"""


def test_our_learner_computes_the_same_with_unsloth_loaded(tiny_model_dir):
    command = [sys.executable, "-c", UNLOADED, tiny_model_dir]
    said = [subprocess.run([*command, how], capture_output=True, text=True, check=True) for how in ("without", "with")]
    assert said[0].stdout.splitlines()[-1] == said[1].stdout.splitlines()[-1]
