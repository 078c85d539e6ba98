"""A graph of LangGraph in a session. The scenario is on standard input, and the address in environment variables."""

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor

os.environ["LANGSMITH_TRACING"] = "false"

from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


def weather(city: str) -> str:
    """Return the weather in a city."""
    return "sunny"


async def ask_expert(question: str) -> str:
    """Ask the expert on the weather."""
    return await answer(question, [weather])


def graph(tools):
    model = ChatOpenAI(model=os.environ["OPENAI_MODEL"]).bind_tools(tools)

    async def think(state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("think", think)
    builder.add_node("tools", ToolNode(tools))
    builder.add_edge(START, "think")
    builder.add_conditional_edges("think", tools_condition)
    builder.add_edge("tools", "think")
    return builder.compile()


async def answer(question, tools, stream=False):
    messages = {"messages": [{"role": "user", "content": question}]}
    if not stream:
        return (await graph(tools).ainvoke(messages))["messages"][-1].content
    parts = [part async for part, _ in graph(tools).astream(messages, stream_mode="messages")]
    return "".join(part.content for part in parts if part.type == "AIMessageChunk")


scenario = json.loads(input())
form = scenario["form"]
work = answer(scenario["question"], [ask_expert if form == "two_agents" else weather], stream=form == "stream")
with ThreadPoolExecutor(1) as pool:
    text = pool.submit(asyncio.run, work).result() if form == "thread" else asyncio.run(work)
print(json.dumps({"reward": float("sunny" in text)}))
