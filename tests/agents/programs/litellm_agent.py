"""LiteLLM in a session. The scenario is on standard input, and the address in environment variables."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

from litellm import completion, stream_chunk_builder

PARAMETERS = {"weather": "city", "ask_expert": "question"}


def schema(name):
    parameters = {"type": "object", "properties": {PARAMETERS[name]: {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call(name, arguments):
    return answer(json.loads(arguments)["question"], "weather") if name == "ask_expert" else "sunny"


def answer(question, tool, stream=False):
    options = {"model": f"openai/{os.environ['OPENAI_MODEL']}", "tools": [schema(tool)]}
    messages = [{"role": "user", "content": question}]
    while True:
        reply = completion(messages=messages, stream=stream, **options)
        message = (stream_chunk_builder([*reply]) if stream else reply).choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump())
        for made in message.tool_calls:
            result = call(made.function.name, made.function.arguments)
            messages.append({"role": "tool", "tool_call_id": made.id, "content": result})


scenario = json.loads(input())
form = scenario["form"]
with ThreadPoolExecutor(1) as pool:
    run = (lambda *args: pool.submit(answer, *args).result()) if form == "thread" else answer
    text = run(scenario["question"], "ask_expert" if form == "two_agents" else "weather", form == "stream")
print(json.dumps({"reward": float("sunny" in text)}))
