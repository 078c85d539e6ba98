"""Replies that a grammar or a list of choices restricted: the learner scores the distribution of the sampler."""

import numpy as np
import pytest
import torch
from support.registered import QUESTION

import art_nb as art
from art_nb.backends.steps import add_masks, match_temperature
from art_nb.learners.base import StepConfig, step_rows
from art_nb.models.gguf import CHATML_TURNS
from art_nb.tokens.rows import group_rows

OFFER = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Riga"]}, "high": {"type": "boolean"}}}
CITY |= {"required": ["city"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": CITY}}
REQUESTS = {
    "choice": {"extra_body": {"guided_choice": ["A1", "A10", "B2 or C3"]}},
    "regex": {"extra_body": {"guided_regex": "[ab]{1,3}c?"}},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}},
    "call": {"tools": [TOOL], "tool_choice": "required"},
    "warm": {"extra_body": {"guided_regex": "[a-z ]{4}"}, "temperature": 0.7},
}


@pytest.fixture
async def home(tiny_model_dir, tmp_path):
    config = {"chat_template": OFFER + CHATML_TURNS}
    model = art.TrainableModel(name="s", project="tests", base_model=str(tiny_model_dir), _internal_config=config)
    async with art.LocalBackend(path=tmp_path, verbose=False, dtype="float32") as backend:
        await model.register(backend)
        yield model, backend


async def group_of(model, requests, n=6):
    """Replies to the same prompt, `n` of each request."""
    trajectories = []
    for seed, request in enumerate(requests):
        reply = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=QUESTION, max_tokens=24, n=n, seed=seed, **request
        )
        trajectories += [art.Trajectory(messages_and_choices=[*QUESTION, choice]) for choice in reply.choices]
    for i, trajectory in enumerate(trajectories):
        trajectory.reward, trajectory.tools = float(i % 3), requests[0].get("tools")
    return art.TrajectoryGroup(trajectories)


def scored(runtime, group, share):
    """The logprobs of the sampler and of the learner for each trained token, and the number of masked tokens."""
    config = StepConfig(share_prefixes=share)
    rows = [group_rows(group)]
    weighted = step_rows([[trajectory.reward for trajectory in group.trajectories]], rows, config)
    match_temperature(runtime, rows, weighted, config)
    add_masks(runtime, rows, weighted)
    batches = runtime.learner.batches(weighted, config)
    logprobs = [
        (batch.old_E, logprobs_N[batch.node_E])
        for batch, logprobs_N in zip(batches, runtime.learner.scored(batches, config.temperature), strict=True)
    ]
    masked = sum(len(batch.restricted_M) for batch in batches if batch.masks is not None)
    return *(torch.cat(part) for part in zip(*logprobs, strict=True)), masked


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("share", [True, False])
async def test_sampler_and_learner_agree(home, kind, share):
    model, backend = home
    group = await group_of(model, [REQUESTS[kind]])
    sampler, learner, masked = scored(backend.runtime(model), group, share)
    assert masked and torch.isfinite(sampler).all()
    assert torch.allclose(sampler, learner, atol=1e-4)
    assert (sampler.exp() / learner.exp() - 1).abs().max() < 1e-3


async def test_replies_with_other_guides_and_without_one_share_their_prompt(home):
    model, backend = home
    requests = [REQUESTS["choice"], {}, REQUESTS["regex"], {"extra_body": {"guided_regex": "[AB][0-9 ]*"}}]
    group = await group_of(model, requests, n=4)
    runtime = backend.runtime(model)
    sampler, learner, masked = scored(runtime, group, share=True)
    assert torch.isfinite(sampler).all() and torch.allclose(sampler, learner, atol=1e-4)
    assert 0 < masked < len(sampler)


async def test_a_step_on_restricted_replies_keeps_their_ratio(home):
    model, backend = home
    group = await group_of(model, [REQUESTS["json"]])
    events = []
    backend.bus.subscribe(events.append)
    result = await backend.train(model, [group], learning_rate=1e-6)
    assert result.metrics["loss/importance_ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert result.metrics["offpolicy/logprob_diff_max"] < 1e-3
    assert not result.metrics.get("offpolicy/unknown_logprobs")
    assert not [event for event in events if getattr(event, "key", "") == "temperatures"]


async def test_a_reply_whose_guide_is_unknown_is_trained_with_ratio_1(home):
    model, backend = home
    group = await group_of(model, [REQUESTS["regex"]])
    for trajectory in group.trajectories:
        trajectory.messages_and_choices[-1].model_extra.update(cut=True, guide=None)  # as vLLM marks it
    sampler, _, masked = scored(backend.runtime(model), group, share=True)
    assert torch.isnan(sampler).all() and not masked


async def test_a_learned_choice_becomes_more_likely(home):
    """The gradient of a restricted reply changes the restricted distribution, step by step."""
    model, backend = home

    async def share_of_b():
        reply = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=QUESTION, n=64, max_tokens=2, extra_body={"guided_regex": "[AB]"}
        )
        trajectories = [art.Trajectory(messages_and_choices=[*QUESTION, choice]) for choice in reply.choices]
        for trajectory, choice in zip(trajectories, reply.choices, strict=True):
            trajectory.reward = float(choice.message.content == "B")
        return art.TrajectoryGroup(trajectories), np.mean([trajectory.reward for trajectory in trajectories])

    shares = []
    for _ in range(9):
        group, share = await share_of_b()
        shares.append(share)
        await backend.train(model, [group], learning_rate=2e-2)
    assert np.mean(shares[-3:]) > shares[0] + 0.12  # the share of 64 replies varies by 0.06
