"""pydantic-ai in a session. The scenario is on standard input, and the address in environment variables."""

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel


def weather(city: str) -> str:
    """Return the weather in a city."""
    return "sunny"


async def ask_expert(question: str) -> str:
    """Ask the expert on the weather."""
    return await answer(question, [weather])


async def answer(question, tools, stream=False):
    agent = Agent(OpenAIChatModel(os.environ["OPENAI_MODEL"]), tools=tools)  # the provider reads OPENAI_BASE_URL
    if not stream:
        return (await agent.run(question)).output
    async with agent.run_stream(question) as result:
        return await result.get_output()


scenario = json.loads(input())
form = scenario["form"]
work = answer(scenario["question"], [ask_expert if form == "two_agents" else weather], stream=form == "stream")
with ThreadPoolExecutor(1) as pool:
    text = pool.submit(asyncio.run, work).result() if form == "thread" else asyncio.run(work)
print(json.dumps({"reward": float("sunny" in text)}))
