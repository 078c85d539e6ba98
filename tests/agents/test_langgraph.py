"""`art.langgraph` with the real LangChain and LangGraph: agents, streams, sub-agents, structured output and threads."""

import asyncio
import json
import os

import pytest
from support.agent_parts import NO_TELEMETRY, served_model
from support.server_parts import Scripted

import art_nb as art
from art_nb.core.types import RolloutError
from art_nb.tokens.rows import trajectory_rows

pytest.importorskip("langchain_openai", reason="make test-agents installs the frameworks")
from langchain.agents import create_agent
from langgraph.errors import GraphRecursionError

pytestmark = pytest.mark.timeout(300)
os.environ |= NO_TELEMETRY
init_chat_model, wrap_rollout = art.langgraph.init_chat_model, art.langgraph.wrap_rollout
WEATHER = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
DELEGATE = '<tool_call>{"name": "research", "arguments": {"task": "Find the altitude."}}</tool_call>'


class Script(Scripted):
    """A sampler that calls `research` for a question about altitudes, else `weather`, and then answers."""

    async def generate(self, prompt_ids, params, adapter):
        prompt = bytes(prompt_ids)
        wants = DELEGATE if b"How high" in prompt else WEATHER
        self.words = "It is so." if b"<tool>" in prompt or b"<system>Answer" in prompt else wants
        if b"Loop" in prompt:
            self.words = WEATHER
        async for token in super().generate(prompt_ids, params, adapter):
            yield token


@pytest.fixture(scope="module")
def model():
    with served_model(Script()) as model:
        yield model


def weather(city: str) -> str:
    """Return the weather in a city."""
    return "sunny"


def user(text):
    return {"messages": [{"role": "user", "content": text}]}


def contents(history):
    return [(message["role"], message.get("content") or "") for message in history.messages()]


ONE_CALL = [("user", "Rome?"), ("assistant", ""), ("tool", "sunny"), ("assistant", "It is so.")]


async def invoked(agent):
    await agent.ainvoke(user("Rome?"))


async def streamed(agent):
    async for _ in agent.astream(user("Rome?"), stream_mode="messages"):
        pass


async def observed(agent):
    names = [event["event"] async for event in agent.astream_events(user("Rome?"), version="v2")]
    assert "on_tool_end" in names


async def in_a_thread(agent):
    await asyncio.to_thread(agent.invoke, user("Rome?"))


@pytest.mark.parametrize("run", [invoked, streamed, observed, in_a_thread])
async def test_an_agent_is_recorded_with_its_calls(model, run):
    @wrap_rollout(model)
    async def rollout(model, question):
        await run(create_agent(init_chat_model(), tools=[weather]))
        return art.Trajectory(reward=1.0, metadata={"question": question})

    trajectory = await rollout(model, "Rome?")
    assert contents(trajectory) == ONE_CALL and not trajectory.additional_histories
    assert trajectory.metadata == {"question": "Rome?"}
    assert [tool["function"]["name"] for tool in trajectory.tools] == ["weather"]
    calls = trajectory.messages()[1]["tool_calls"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Rome"}


async def test_the_older_agent_of_langgraph(model):
    from langgraph.prebuilt import create_react_agent

    async def rollout(model):
        await create_react_agent(init_chat_model(temperature=0.5), [weather]).ainvoke(user("Rome?"))
        return art.Trajectory(reward=1.0)

    assert contents(await wrap_rollout(model, rollout)(model)) == ONE_CALL


async def test_sub_agents_are_additional_histories(model):
    """A supervisor gives its task to two agents. Each of them has a conversation of its own."""

    async def research(task: str) -> str:
        """Ask two experts."""
        for expert in ("Answer as a climber.", "Answer as a pilot."):
            await create_agent(init_chat_model(), tools=[], system_prompt=expert).ainvoke(user(task))
        return "8849 m"

    @wrap_rollout
    async def rollout(model, question):
        await create_agent(init_chat_model(), tools=[research]).ainvoke(user(question))
        return art.Trajectory(reward=1.0)

    trajectory = await rollout(model, "How high is it?")
    assert [role for role, _ in contents(trajectory)] == ["user", "assistant", "tool", "assistant"]
    experts = [contents(history) for history in trajectory.additional_histories]
    assert [expert[0] for expert in experts] == [("system", "Answer as a climber."), ("system", "Answer as a pilot.")]
    assert all(expert[1:] == [("user", "Find the altitude."), ("assistant", "It is so.")] for expert in experts)


async def test_concurrent_rollouts_do_not_mix(model):
    @wrap_rollout(model)
    async def rollout(model, city):
        await create_agent(init_chat_model(), tools=[weather]).ainvoke(user(city))
        return art.Trajectory(reward=1.0, metadata={"city": city})

    trajectories = await asyncio.gather(*(rollout(model, f"City {i}?") for i in range(16)))
    for i, trajectory in enumerate(trajectories):
        assert contents(trajectory)[0] == ("user", f"City {i}?") and len(contents(trajectory)) == 4


async def test_structured_output(local, named):
    """The tiny model writes nonsense, but in the format."""
    model = named()
    await model.register(local)
    cities = {"city": {"type": "string", "enum": ["Rome", "Riga"]}}
    schema = {"title": "City", "type": "object", "properties": cities, "required": ["city"]}
    schema |= {"additionalProperties": False}

    @wrap_rollout(model)
    async def rollout(model):
        reader = init_chat_model(max_completion_tokens=40).with_structured_output(schema, method="json_schema")
        assert (await reader.ainvoke("Which city?"))["city"] in ("Rome", "Riga")
        return art.Trajectory(reward=1.0)

    assert trajectory_rows(await rollout(model))[0].guides  # the learner knows the format


async def test_an_endless_agent_is_a_failed_rollout_or_data(model):
    async def rollout(model, catch):
        agent = create_agent(init_chat_model(), tools=[weather])
        try:
            await agent.ainvoke(user("Loop"), {"recursion_limit": 5})
        except GraphRecursionError:
            if not catch:
                raise
            return art.Trajectory(reward=-1.0, messages_and_choices=[{"role": "assistant", "content": "Stopped."}])

    wrapped = wrap_rollout(model, rollout)
    with pytest.raises(GraphRecursionError):
        await wrapped(model, False)
    trajectory = await wrapped(model, True)
    assert contents(trajectory)[-1] == ("assistant", "Stopped.") and len(contents(trajectory)) > 4


async def test_a_chat_model_is_returned_unchanged_and_a_policy_can_be_given(model):
    chat_model = init_chat_model(model, max_retries=1)
    assert chat_model.temperature == 1.0 and chat_model.model_name == "ttt@3"
    assert init_chat_model(chat_model) is chat_model
    assert init_chat_model(model, temperature=0.2).temperature == 0.2
    assert (await chat_model.ainvoke("Rome?", tools=[])).content
    with pytest.raises(RolloutError, match="which model is trained"):
        init_chat_model()
    with pytest.raises(ValueError, match="model_provider"):
        init_chat_model(model, model_provider="anthropic")


async def test_a_rollout_that_records_itself_stays_as_it_is(model):
    @wrap_rollout(model)
    async def rollout(model):
        with art.Trajectory(reward=0.5) as trajectory:
            await init_chat_model().ainvoke("Rome?")
        return trajectory

    trajectory = await rollout(model)
    assert len(trajectory.exchanges.chat_completions) == 1 and not trajectory.additional_histories


async def test_token_ids_equal_those_of_the_openai_client(local, named):
    """The same request with a seed, through LangChain and through the OpenAI client."""
    model = named()
    await model.register(local)

    @wrap_rollout(model)
    async def with_langchain(model):
        await init_chat_model(seed=7, max_completion_tokens=8).ainvoke("Count.")
        return art.Trajectory(reward=1.0)

    async def with_client(model):
        messages = [{"role": "user", "content": "Count."}]
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages, temperature=1.0, seed=7, max_completion_tokens=8
        )
        return art.Trajectory(messages_and_choices=[*messages, completion.choices[0]], reward=1.0)

    rows = [trajectory_rows(await rollout(model))[0] for rollout in (with_langchain, with_client)]
    assert rows[0].tokens.tolist() == rows[1].tokens.tolist() and rows[0].sampled.any()
    assert rows[0].sampled.tolist() == rows[1].sampled.tolist()
