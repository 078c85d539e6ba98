"""LangChain's agent in a session. The scenario is on standard input, and the address in environment variables."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

os.environ["LANGSMITH_TRACING"] = "false"

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def weather(city: str) -> str:
    """Return the weather in a city."""
    return "sunny"


def ask_expert(question: str) -> str:
    """Ask the expert on the weather."""
    return answer(question, [weather])


def answer(question, tools, stream=False):
    agent = create_agent(ChatOpenAI(model=os.environ["OPENAI_MODEL"]), tools=tools)
    messages = {"messages": [{"role": "user", "content": question}]}
    if not stream:
        return agent.invoke(messages)["messages"][-1].content
    parts = [part for part, _ in agent.stream(messages, stream_mode="messages") if part.type == "AIMessageChunk"]
    return "".join(part.content for part in parts)


scenario = json.loads(input())
form = scenario["form"]
tools = [ask_expert if form == "two_agents" else weather]
with ThreadPoolExecutor(1) as pool:
    run = (lambda *args: pool.submit(answer, *args).result()) if form == "thread" else answer
    text = run(scenario["question"], tools, form == "stream")
print(json.dumps({"reward": float("sunny" in text)}))
