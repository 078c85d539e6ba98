"""`request_overrides`: the fields of an agent's requests are replaced from outside, and nothing else is."""

import pytest
from openai import AsyncOpenAI
from support.registered import at_home, heard

import art_nb as art
from art_nb.core.events import Warned
from art_nb.core.types import TrainError
from art_nb.models.clients import httpx
from art_nb.rollouts.trajectories import choices

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Riga"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": CITY | {"additionalProperties": False}}}
OPTIONS = {"groups_per_step": 1, "rollouts_per_group": 4, "show": False, "steps": 1}


async def greedy(model, scenario):
    """An agent that knows nothing of the training: its own client, at temperature 0."""

    async def attempt():
        async with AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key) as client:
            reply = await client.chat.completions.create(
                model=model.get_inference_name(),
                messages=[{"role": "user", "content": scenario}],
                temperature=0,
                max_tokens=6,
            )
        sampled = reply.choices[0].model_extra["token_ids"]
        art.current_trajectory(require=True).reward = sum(sampled) % 11

    return await art.trajectory(attempt())


def temperatures(groups):
    return {choice.temperature for group in groups for trajectory in group for choice in choices(trajectory)}


async def test_a_greedy_agent_trains_with_overrides_and_not_without(tiny_model_dir, tmp_path):
    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        warned = heard(backend, Warned)
        run = await art.train(model, greedy, ["Go"], **OPTIONS)
        assert temperatures(run.groups) == {0}
        assert run.history[-1]["data/step_num_gradient_steps"] == 0
        assert any("request_overrides=dict(temperature=1)" in event.message for event in warned)
        run = await art.train(model, greedy, ["Go"], request_overrides={"temperature": 1}, **OPTIONS | {"steps": 2})
        assert temperatures(run.groups) == {1}
        assert run.history[-1]["data/step_num_gradient_steps"] == 1
        assert run.groups[0].trajectories[0].exchanges.chat_completions[0].request["temperature"] == 0, "as it was sent"


async def test_the_doctor_and_the_evaluation_take_them(tiny_model_dir, tmp_path):
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        report = await art.doctor(model, greedy, ["Go"], groups=1, show_progress=False)
        assert report["tokens"].verdict == "fail" and "request_overrides" in report["tokens"].advice
        fields = {"temperature": 1}
        report = await art.doctor(model, greedy, ["Go"], groups=1, request_overrides=fields, show_progress=False)
        assert report["tokens"].verdict == "ok"
        evaluation = await art.evaluate(model, greedy, ["Go"] * 4, request_overrides=fields, log=False)
        assert temperatures([evaluation.trajectories]) == {1}


async def test_a_judge_and_other_models_keep_their_fields(tiny_model_dir, tmp_path):
    seen = []

    async def judge(group):
        reply = await greedy(group.trajectories[0].metadata.pop("model"), "Judge")
        seen.extend(choice.temperature for choice in choices(reply))
        return group

    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        other = art.TrainableModel(name="other", project="tests", base_model=str(tiny_model_dir))
        await other.register(backend)

        async def rollout(model, scenario):
            trajectory = await greedy(model, scenario)
            with art.no_capture():
                trajectory.metrics["quiet"] = choices(await greedy(model, "Judge"))[0].temperature
            trajectory.metrics["other"] = choices(await greedy(other, scenario))[0].temperature
            trajectory.metadata["model"] = model
            return trajectory

        group = art.TrajectoryGroup([])
        options = OPTIONS | {"after_each": judge, "request_overrides": {"temperature": 1}}
        run = await art.train(model, rollout, ["Go"], **options)
        (group,) = run.groups
        assert {choices(t)[0].temperature for t in group} == {1}
        assert {(t.metrics["quiet"], t.metrics["other"]) for t in group} == {(0, 0)}
        assert seen == [0]


async def test_every_api_and_a_program_in_another_process(tiny_model_dir, tmp_path):
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        fields = {"temperature": 1, "max_completion_tokens": 3}
        bodies = {
            "/chat/completions": {"messages": [{"role": "user", "content": "Go"}], "temperature": 0, "max_tokens": 9},
            "/completions": {"prompt": "Go", "temperature": 0, "max_tokens": 9},
            "/responses": {"input": "Go", "temperature": 0, "max_output_tokens": 9},
            "/messages": {"messages": [{"role": "user", "content": "Go"}], "temperature": 0, "max_tokens": 9},
        }
        async with model.session(request_overrides=fields) as session:
            async with httpx.AsyncClient(base_url=session.base_url, timeout=60) as client:
                headers = {"authorization": f"Bearer {session.api_key}", "x-api-key": session.api_key}
                for path, body in bodies.items():
                    reply = await client.post(path, json={"model": "any", **body}, headers=headers)
                    assert reply.status_code == 200, reply.text
        replies = [choice for choice in choices(session.trajectory)]
        assert {reply.temperature for reply in replies} == {1}
        assert max(len(reply.token_ids) for reply in replies) <= 3


async def test_a_tool_choice_changes_requests_with_tools_only(tiny_model_dir, tmp_path):
    async def agent(model, scenario):
        client, name = model.openai_client(), model.get_inference_name()
        messages = [{"role": "user", "content": scenario}]
        with art.Trajectory() as trajectory:
            for options in ({"tools": [TOOL], "tool_choice": "none"}, {}):
                await client.chat.completions.create(model=name, messages=messages, max_tokens=160, **options)
        trajectory.reward = 0
        return trajectory

    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        options = {"groups": 1, "rollouts_per_group": 1, "show_progress": False}
        report = await art.doctor(model, agent, ["Go"], request_overrides={"tool_choice": "required"}, **options)
        assert report["rollouts"].verdict == "ok"
        assert report["tools"].verdict == "ok", report["tools"].finding


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temprature": 1}, "Did you mean 'temperature'"),
        ({"messages": []}, "'messages' is not a field that can be replaced"),
        ({"temperature": 3}, "temperature=3 is not a number from 0 to 2"),
        ({"stop": {1}}, "must be JSON"),
        (1, "expected a dict"),
    ],
)
async def test_mistakes_are_reported_before_a_rollout(tiny_model_dir, tmp_path, fields, message):
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        with pytest.raises(TrainError, match=message):
            art.train(model, greedy, ["Go"], request_overrides=fields, **OPTIONS)
        with pytest.raises(TrainError, match=message):
            model.session(request_overrides=fields)
