"""AutoGen in a session. The scenario is on standard input, and the address in environment variables."""

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor

os.environ["AUTOGEN_DISABLE_RUNTIME_TRACING"] = "true"

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": "unknown",
}


def weather(city: str) -> str:
    """Return the weather in a city."""
    return "sunny"


async def ask_expert(question: str) -> str:
    """Ask the expert on the weather."""
    return await answer(question, [weather])


async def answer(question, tools, stream=False):
    client = OpenAIChatCompletionClient(model=os.environ["OPENAI_MODEL"], model_info=INFO | {"family": "unknown"})
    agent = AssistantAgent("guide", client, tools=tools, max_tool_iterations=3, model_client_stream=stream)
    result = await agent.run(task=question)
    return result.messages[-1].content


scenario = json.loads(input())
form = scenario["form"]
work = answer(scenario["question"], [ask_expert if form == "two_agents" else weather], stream=form == "stream")
with ThreadPoolExecutor(1) as pool:
    text = pool.submit(asyncio.run, work).result() if form == "thread" else asyncio.run(work)
print(json.dumps({"reward": float("sunny" in text)}))
