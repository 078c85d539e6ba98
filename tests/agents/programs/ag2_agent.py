"""AG2 in a session. The scenario is on standard input, and the address in environment variables."""

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor

from ag2 import Agent
from ag2.config import OpenAIConfig


def weather(city: str) -> str:
    """Return the weather in a city."""
    return "sunny"


async def ask_expert(question: str) -> str:
    """Ask the expert on the weather."""
    return await answer(question, [weather])


async def answer(question, tools, stream=False):
    config = OpenAIConfig(os.environ["OPENAI_MODEL"], streaming=stream)  # the client reads OPENAI_BASE_URL
    reply = await Agent("guide", config=config, tools=tools).ask(question)
    return reply.body


scenario = json.loads(input())
form = scenario["form"]
work = answer(scenario["question"], [ask_expert if form == "two_agents" else weather], stream=form == "stream")
with ThreadPoolExecutor(1) as pool:
    text = pool.submit(asyncio.run, work).result() if form == "thread" else asyncio.run(work)
print(json.dumps({"reward": float("sunny" in text)}))
