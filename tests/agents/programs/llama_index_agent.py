"""LlamaIndex in a session. The scenario is on standard input, and the address in environment variables."""

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def weather(city: str) -> str:
    """Return the weather in a city."""
    return "sunny"


async def ask_expert(question: str) -> str:
    """Ask the expert on the weather."""
    return await answer(question, [weather])


async def answer(question, tools, stream=False):
    llm = OpenAILike(
        model=os.environ["OPENAI_MODEL"],
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
    )
    return str(await FunctionAgent(tools=tools, llm=llm, streaming=stream).run(question))


scenario = json.loads(input())
form = scenario["form"]
work = answer(scenario["question"], [ask_expert if form == "two_agents" else weather], stream=form == "stream")
with ThreadPoolExecutor(1) as pool:
    text = pool.submit(asyncio.run, work).result() if form == "thread" else asyncio.run(work)
print(json.dumps({"reward": float("sunny" in text)}))
