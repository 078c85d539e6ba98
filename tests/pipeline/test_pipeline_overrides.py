"""`request_overrides` of `PipelineTrainer`: they change the requests of its rollouts, not those of its evaluations."""

import pytest
from openai import AsyncOpenAI
from support.registered import at_home

import art_nb as art
from art_nb.core.types import TrainError
from art_nb.pipeline.settings import make_group_rollout_fn
from art_nb.pipeline.trainer import PipelineTrainer
from art_nb.rollouts.trajectories import choices
from art_nb.runs.sessions import read_sessions

SMALL = {"num_rollout_workers": 1, "min_batch_size": 1, "max_batch_size": 1, "max_steps": 1, "show": False}


async def greedy(model, scenario, config):
    """An agent that knows nothing of the training: its own client, at temperature 0."""
    async with AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key) as client:
        reply = await client.chat.completions.create(
            model=model.get_inference_name(),
            messages=[{"role": "user", "content": f"free: {scenario}"}],
            temperature=0,
            max_tokens=6,
            logprobs=True,
        )
    config.append(reply.choices[0].model_extra["temperature"])
    return art.Trajectory(
        messages_and_choices=[{"role": "user", "content": f"free: {scenario}"}, reply.choices[0]], reward=len(config)
    )


async def evaluation(model, step, config):
    return [await greedy(model, 0, []) for _ in range(2)]


def temperatures(groups):
    return {choice.temperature for group in groups for trajectory in group for choice in choices(trajectory)}


async def custom(model, scenario, config):
    """A group function of the user."""
    return await art.TrajectoryGroup(greedy(model, scenario, config) for _ in range(3))


@pytest.mark.parametrize("rollout_fn", [make_group_rollout_fn(greedy, n=3), custom], ids=["made", "custom"])
async def test_the_rollouts_take_them_and_the_evaluations_do_not(tiny_model_dir, tmp_path, rollout_fn):
    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        options = SMALL | {"eval_fn": evaluation, "request_overrides": {"temperature": 1}}
        run = await PipelineTrainer(model, backend, rollout_fn, range(40), [], **options).train()
        assert run.step == 1
        assert temperatures(run.groups) == {1}
        assert temperatures(model.store.read_groups("val", 0)) == {0}
        assert read_sessions(model.store)[-1]["options"]["request_overrides"] == {"temperature": 1}


async def test_without_them_the_agent_keeps_its_temperature(tiny_model_dir, tmp_path):
    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        run = await PipelineTrainer(model, backend, custom, range(40), [], **SMALL).train()
        assert temperatures(run.groups) == {0}


async def test_mistakes_are_reported_before_a_rollout(tiny_model_dir, tmp_path):
    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        for fields, message in (({"temprature": 1}, "Did you mean 'temperature'"), (1, "expected a dict")):
            with pytest.raises(TrainError, match=message):
                PipelineTrainer(model, backend, custom, range(4), [], request_overrides=fields, **SMALL)
