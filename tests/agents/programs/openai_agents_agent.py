"""OpenAI's Agents SDK: `openai_agents_agent.py chat|responses`, with a scenario on standard input.

The address is in environment variables.
"""

import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"

from agents import Agent, Runner, function_tool, set_default_openai_api


@function_tool
def weather(city: str) -> str:
    """Return the weather in a city."""
    return "sunny"


@function_tool
async def ask_expert(question: str) -> str:
    """Ask the expert on the weather."""
    return await answer(question, [weather])


async def answer(question, tools, stream=False):
    agent = Agent(name="guide", model=os.environ["OPENAI_MODEL"], tools=tools)
    if not stream:
        return (await Runner.run(agent, question)).final_output
    result = Runner.run_streamed(agent, question)
    async for _ in result.stream_events():
        pass
    return result.final_output


set_default_openai_api("responses" if sys.argv[1] == "responses" else "chat_completions")
scenario = json.loads(input())
form = scenario["form"]
work = answer(scenario["question"], [ask_expert if form == "two_agents" else weather], stream=form == "stream")
with ThreadPoolExecutor(1) as pool:
    text = pool.submit(asyncio.run, work).result() if form == "thread" else asyncio.run(work)
print(json.dumps({"reward": float("sunny" in text)}))
