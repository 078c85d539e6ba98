"""Replies, rows and learners for the rehearsal of the GPU path."""

import copy

import numpy as np
from support.families import plain, random_adapter, tokenizer

import art_nb as art
from art_nb.learners.base import Learner
from art_nb.policy import Policy
from art_nb.policy.adapters import load_adapter
from art_nb.policy.packing import WeightedRow


def grouped_rows(groups=3, size=4, seed=0):
    """Return rows of several groups. The rows of a group have a common prefix and different lengths."""
    draw, rows = np.random.default_rng(seed), []
    for group in range(groups):
        prefix = draw.integers(3, 200, 10 + 8 * group)
        for i in range(size):
            tokens = np.concatenate([prefix, draw.integers(3, 200, 4 + 3 * i)]).astype(np.int32)
            sampled = np.arange(len(tokens)) >= len(prefix)
            logprobs = np.where(sampled, -5.5, np.nan).astype(np.float32)
            rows.append(WeightedRow(tokens, sampled, logprobs, group, advantage=i - 1.5, coef=1 / 40))
    return rows


def learner_on(device, family, dtype):
    """Return a learner whose adapter is the same on every device."""
    model = copy.deepcopy(plain(family)).to(dtype).to(device)
    model.tie_weights()
    policy = Policy(model, tokenizer())
    load_adapter(policy, {name: t.to(device) for name, t in random_adapter(policy, 5, 0.05).items()})
    return Learner(policy)


async def reply(model, seed, name="", **options):
    """Return a reply of the endpoint."""
    answer = await model.openai_client().chat.completions.create(
        model=name or model.get_inference_name(),
        messages=[{"role": "user", "content": f"A{seed % 3} free: B1 C2"}],
        logprobs=True,
        seed=seed,
        **{"max_tokens": 16, "extra_body": {"ignore_eos": True}} | options,
    )
    return answer.choices[0]


def groups_of(choices):
    """Return groups of trajectories with the given replies."""
    return [
        art.TrajectoryGroup(
            art.Trajectory(
                messages_and_choices=[{"role": "user", "content": f"A{g} free: B1 C2"}, choice], reward=float(i)
            )
            for i, choice in enumerate(choices[g::3])
        )
        for g in range(3)
    ]
