"""Agent frameworks through a session: the same task with a tool, in every framework and in several ways of calling it.

`make test-agents` runs these tests. The sampler follows a script, so that the replies do not depend on a model:
the first reply calls the tool, the second one has the answer.
"""

import asyncio
import json
import os
from contextlib import suppress
from types import SimpleNamespace

import pytest
from support.agent_parts import ANSWER, CALL, NO_TELEMETRY, QUESTION, SCHEMA, Script, served_model
from support.server_parts import Scripted

import art_nb as art

pytest.importorskip("anthropic", reason="make test-agents installs the frameworks")
pytestmark = pytest.mark.timeout(300)
os.environ |= NO_TELEMETRY


@pytest.fixture(scope="module")
def model():
    with served_model(Script()) as model:
        yield model


def weather(city: str) -> str:
    """Return the weather in a city.

    Args:
        city: Name of the city.
    """
    calls.append(city)
    return "sunny"


calls: list[str] = []


async def anthropic_sdk(session, stream):
    from anthropic import AsyncAnthropic

    tool = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
    messages = [{"role": "user", "content": QUESTION}]
    async with AsyncAnthropic(base_url=session.address, api_key=session.api_key, max_retries=0) as client:
        while True:
            request = {"model": "claude", "max_tokens": 500, "messages": messages, "tools": [tool]}
            if stream:
                async with client.messages.stream(**request) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**request)
            messages.append({"role": "assistant", "content": message.content})
            uses = [block for block in message.content if block.type == "tool_use"]
            if not uses:
                return message.content[0].text
            assert message.stop_reason == "tool_use"
            results = [{"type": "tool_result", "tool_use_id": u.id, "content": weather(**u.input)} for u in uses]
            messages.append({"role": "user", "content": results})


def agents_model(session, responses):
    from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    return (OpenAIResponsesModel if responses else OpenAIChatCompletionsModel)(model="gpt-5", openai_client=client)


async def openai_agents(session, stream, responses=True):
    from agents import Agent, Runner, function_tool

    agent = Agent(name="guide", model=agents_model(session, responses), tools=[function_tool(weather)])
    if not stream:
        return (await Runner.run(agent, QUESTION)).final_output
    result = Runner.run_streamed(agent, QUESTION)
    async for _ in result.stream_events():
        pass
    return result.final_output


async def openai_agents_chat(session, stream):
    return await openai_agents(session, stream, responses=False)


def langchain_agent(session):
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI
    from openai import DefaultAsyncHttpxClient

    client = DefaultAsyncHttpxClient()  # LangChain's own client is kept for other event loops, where it fails
    address = {"base_url": session.base_url, "api_key": session.api_key}
    model = ChatOpenAI(model="gpt-5", max_retries=0, http_async_client=client, **address)
    return create_agent(model, tools=[weather])


async def langchain(session, stream):
    agent, question = langchain_agent(session), {"messages": [{"role": "user", "content": QUESTION}]}
    if not stream:
        return (await agent.ainvoke(question))["messages"][-1].content
    text = ""
    async for part, _ in agent.astream(question, stream_mode="messages"):
        text += part.content if part.type == "AIMessageChunk" else ""
    return text


async def langchain_thread(session, stream):
    question = {"messages": [{"role": "user", "content": QUESTION}]}
    result = await asyncio.to_thread(langchain_agent(session).invoke, question)
    return result["messages"][-1].content


async def pydantic_ai(session, stream):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=session.base_url, api_key=session.api_key)
    agent = Agent(OpenAIChatModel("gpt-5", provider=provider), tools=[weather])
    if not stream:
        return (await agent.run(QUESTION)).output
    async with agent.run_stream(QUESTION) as result:
        return await result.get_output()


async def litellm(session, stream):
    from litellm import acompletion

    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    options = {"model": "openai/gpt-5", "api_base": session.base_url, "api_key": session.api_key, "tools": [tool]}
    messages = [{"role": "user", "content": QUESTION}]
    message = (await acompletion(messages=messages, **options)).choices[0].message
    call = message.tool_calls[0]
    result = weather(**json.loads(call.function.arguments))
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": result}]
    if not stream:
        return (await acompletion(messages=messages, **options)).choices[0].message.content
    chunks = await acompletion(messages=messages, stream=True, **options)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


AGENTS = [anthropic_sdk, openai_agents, openai_agents_chat, langchain, langchain_thread, pydantic_ai, litellm]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_run_agent_redirects_every_framework(model, agent, stream):
    """The agents are connected to an address at which there is no server."""
    calls.clear()
    elsewhere = SimpleNamespace(base_url="http://127.0.0.1:9/v1", address="http://127.0.0.1:9", api_key="secret")
    trajectory, answer = await art.run_agent(model, agent, elsewhere, stream)
    assert calls == ["Rome"]
    assert answer == ANSWER
    assert len(trajectory.exchanges.in_order()) == 2
    assert not trajectory.additional_histories
    choices = [entry for entry in trajectory.messages_and_choices if not isinstance(entry, dict)]
    assert [bytes(choice.token_ids[:-1]).decode() for choice in choices] == [CALL, ANSWER]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_a_tool_is_called_and_every_turn_is_recorded(model, agent, stream):
    calls.clear()
    async with model.session() as session:
        answer = await agent(session, stream)
    assert calls == ["Rome"]
    assert answer == ANSWER
    assert len(session.trajectory.exchanges.in_order()) == 2
    assert not session.trajectory.additional_histories
    question, call, result, final = [m for m in session.trajectory.messages() if m["role"] != "system"]
    assert question["role"] == "user"
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
    assert "sunny" in result["content"]
    assert final["content"] == ANSWER
    choices = [entry for entry in session.trajectory.messages_and_choices if not isinstance(entry, dict)]
    assert [bytes(choice.token_ids[:-1]).decode() for choice in choices] == [CALL, ANSWER]


async def test_smolagents_requires_a_call_in_every_turn(model):
    """Its agent ends with a call of a tool of its own, and it runs in a thread."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    calls.clear()
    async with model.session() as session:
        served = OpenAIServerModel(model_id="gpt-5", api_base=session.base_url, api_key=session.api_key)
        agent = ToolCallingAgent(tools=[tool(weather)], model=served, max_steps=3)
        answer = await asyncio.to_thread(agent.run, QUESTION)
    assert (answer, calls) == (ANSWER, ["Rome"])
    assert len(session.trajectory.exchanges.in_order()) == 2


@pytest.mark.parametrize("responses", [True, False], ids=["responses", "chat"])
async def test_openai_agents_fail_at_the_token_limit_with_the_responses_api(model, responses):
    from agents import Agent, ModelBehaviorError, ModelSettings, Runner

    async with model.session() as session:
        limit = ModelSettings(max_tokens=3)
        agent = Agent(name="guide", model=agents_model(session, responses), model_settings=limit)
        if responses:
            with pytest.raises(ModelBehaviorError, match="incomplete"):
                await Runner.run(agent, QUESTION)
        else:
            assert len((await Runner.run(agent, QUESTION)).final_output) == 3
    assert len(session.trajectory.exchanges.in_order()) == 1  # the error comes after the reply


async def test_pydantic_ai_asks_again_if_a_reply_is_empty():
    from pydantic_ai import Agent, UnexpectedModelBehavior
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    with served_model(Scripted("")) as model:
        counts = []
        for output_type in (str, str | None):
            async with model.session() as session:
                provider = OpenAIProvider(base_url=session.base_url, api_key=session.api_key)
                agent = Agent(OpenAIChatModel("gpt-5", provider=provider), output_type=output_type)
                with suppress(UnexpectedModelBehavior):
                    assert not (await agent.run(QUESTION)).output
            counts.append(len(session.trajectory.exchanges.in_order()))
    assert counts[0] > counts[1] == 1


async def test_agents_of_many_sessions_do_not_mix(model):
    """Twenty agents of two frameworks at the same time, each with its own key."""

    async def rollout(i):
        async with model.session() as session:
            await (openai_agents if i % 2 else anthropic_sdk)(session, stream=i % 3 == 0)
        return session.trajectory

    trajectories = await asyncio.gather(*map(rollout, range(20)))
    assert [len(t.exchanges.in_order()) for t in trajectories] == [2] * 20
    kinds = ["responses" if i % 2 else "messages" for i in range(20)]
    assert [t.exchanges.in_order()[0].protocol for t in trajectories] == kinds


async def test_errors_have_the_type_of_the_client(model):
    from anthropic import AsyncAnthropic, AuthenticationError, BadRequestError

    async with model.session() as session:
        client = AsyncAnthropic(base_url=session.address, api_key=session.api_key, max_retries=0)
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
        messages = [{"role": "user", "content": [image]}]
        with pytest.raises(BadRequestError, match="image"):
            await client.messages.create(model="m", max_tokens=5, messages=messages)
        count = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "Hi"}])
        assert count.input_tokens == len("<user>Hi<assistant>")
    with pytest.raises(AuthenticationError, match="no open session"):
        await client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "Hi"}])
    assert not session.trajectory.exchanges
