"""smolagents in a session. The scenario is on standard input, and the address in environment variables."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """Return the weather in a city.

    Args:
        city: The city.
    """
    return "sunny"


@tool
def ask_expert(question: str) -> str:
    """Ask the expert on the weather.

    Args:
        question: The question.
    """
    return answer(question, [weather])


def answer(question, tools, stream=False):
    served = OpenAIServerModel(model_id=os.environ["OPENAI_MODEL"])
    agent = ToolCallingAgent(
        tools=tools, model=served, max_steps=3, stream_outputs=stream, verbosity_level=LogLevel.OFF
    )
    return agent.run(question)


scenario = json.loads(input())
form = scenario["form"]
tools = [ask_expert if form == "two_agents" else weather]
with ThreadPoolExecutor(1) as pool:
    run = (lambda *args: pool.submit(answer, *args).result()) if form == "thread" else answer
    text = run(scenario["question"], tools, form == "stream")
print()  # the stream is shown without a line break at its end
print(json.dumps({"reward": float("sunny" in text)}))
