"""DSPy in a session: `dspy_agent.py auto|litellm`, with the scenario on standard input and the address in variables."""

import asyncio
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

os.environ |= {"DSPY_CACHEDIR": tempfile.mkdtemp(), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

import dspy


def weather(city: str) -> str:
    """Return the weather in a city."""
    return "sunny"


def ask_expert(question: str) -> str:
    """Ask the expert on the weather."""
    return answer(question, [weather])


def answer(question, tools):
    return dspy.ReAct("question -> answer", tools=tools, max_iters=3)(question=question).answer


def native_answer(question, tools):
    """Answer with tool calls of the API, instead of a text format."""
    with dspy.context(adapter=dspy.ChatAdapter(use_native_function_calling=True)):
        return dspy.ReActV2("question -> answer", tools=tools, max_iters=3)(question=question).answer


async def streamed_answer(question, tools):
    agent = dspy.ReAct("question -> answer", tools=tools, max_iters=3)
    listener = dspy.streaming.StreamListener(signature_field_name="answer")
    parts = [part async for part in dspy.streamify(agent, stream_listeners=[listener])(question=question)]
    assert any(isinstance(part, dspy.streaming.StreamResponse) for part in parts)
    return parts[-1].answer


scenario = json.loads(input())
form, question = scenario["form"], scenario["question"]
address = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
name = "gpt-4.1" if form == "native" else os.environ["OPENAI_MODEL"]  # DSPy knows by the name which models call tools
model = dspy.LM(f"openai/{name}", engine=sys.argv[1], cache=False, **address)
dspy.configure(lm=model)
tools = [ask_expert if form == "two_agents" else weather]
if form == "stream":
    text = asyncio.run(streamed_answer(question, tools))
elif form == "native":
    text = native_answer(question, tools)
elif form == "thread":
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(answer, question, tools).result()
else:
    text = answer(question, tools)
print(json.dumps({"reward": float("sunny" in text)}))
