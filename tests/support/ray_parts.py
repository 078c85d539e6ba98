"""Conversations, rows and waits for the tests of `RayBackend`."""

import asyncio
import time

import numpy as np

import art_nb as art
from art_nb.learners.base import step_rows
from art_nb.policy.packing import WeightedRow
from art_nb.tokens.rows import TokenRow


async def conversation(model, scenario=None, turns=3, tokens=12, pause_s=0.0):
    """A conversation whose reward is the share of the letter e."""
    client, messages = model.openai_client(), [{"role": "user", "content": "A1 B2 C3 " * 4}]
    trajectory = art.Trajectory(messages_and_choices=[*messages], reward=0.0)
    for turn in range(turns):
        completion = await client.chat.completions.create(
            model=model.get_inference_name(),
            messages=trajectory.messages(),
            max_tokens=tokens,
            logprobs=True,
            extra_body={"ignore_eos": True},
        )
        trajectory.messages_and_choices += [completion.choices[0], {"role": "user", "content": f"line {turn}"}]
        trajectory.reward += (completion.choices[0].message.content or "").count("e") + turn * 0.1
        await asyncio.sleep(pause_s)
    trajectory.reward += np.random.default_rng(abs(hash(str(trajectory.messages())))).normal()
    return trajectory


async def roll_out(model, groups=3, rollouts=4, **options):
    """Groups of conversations. Failed rollouts are counted as exceptions."""
    return await art.gather_trajectory_groups(
        [art.TrajectoryGroup(conversation(model, **options) for _ in range(rollouts)) for _ in range(groups)],
        pbar_desc=None,
        max_exceptions=groups * rollouts,
    )


async def wait_until(condition, timeout_s=240):
    """Wait for something to become true."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.002)


def some_rows(n=10, groups=4, seed=0):
    """Rows of different lengths with advantages, as a step has them."""
    random, rows = np.random.default_rng(seed), []
    for i in range(n):
        tokens, sampled, logprobs = random_tokens(random, 12 + 5 * (i % 4))
        rows.append(WeightedRow(tokens, sampled, logprobs, i % groups, float(random.normal()), 0.01 * (1 + i % 3)))
    return rows


def random_tokens(random, length):
    """Random tokens, which of them were sampled, and random logprobs."""
    tokens = random.integers(3, 250, length).astype(np.int32)
    sampled = np.arange(length) > 6
    return tokens, sampled, np.where(sampled, random.normal(-3, 1, length), np.nan).astype(np.float32)


def weighed_rows(config, seed=0, groups=4, size=4):
    """The rows of a step with random rewards. Some trajectories have two rows, and one group has equal rewards."""
    random = np.random.default_rng(seed)
    rewards = [[1.0] * size if group == 1 else random.normal(size=size).tolist() for group in range(groups)]
    rows = [
        [
            TokenRow(*random_tokens(random, 12 + 3 * ((group + i) % 5)), trajectory=i, truncated=i == 0)
            for i in range(size)
            for _ in range(1 + (i == 2))
        ]
        for group in range(groups)
    ]
    return step_rows(rewards, rows, config)


def largest_difference(one, other):
    """The largest difference between two adapters."""
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)
