"""Anthropic's SDK in a session. The scenario is on standard input, and the address in environment variables."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

from anthropic import Anthropic

PARAMETERS = {"weather": "city", "ask_expert": "question"}


def schema(name):
    properties = {PARAMETERS[name]: {"type": "string"}}
    return {"name": name, "input_schema": {"type": "object", "properties": properties, "required": [*properties]}}


def call(name, arguments):
    return answer(arguments["question"], "weather") if name == "ask_expert" else "sunny"


def answer(question, tool, stream=False):
    client, messages = Anthropic(), [{"role": "user", "content": question}]
    while True:
        request = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 500, "tools": [schema(tool)]}
        if stream:
            with client.messages.stream(**request, messages=messages) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**request, messages=messages)
        uses = [block for block in message.content if block.type == "tool_use"]
        if not uses:
            return message.content[-1].text
        results = [{"type": "tool_result", "tool_use_id": u.id, "content": call(u.name, u.input)} for u in uses]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]


scenario = json.loads(input())
form = scenario["form"]
with ThreadPoolExecutor(1) as pool:
    run = (lambda *args: pool.submit(answer, *args).result()) if form == "thread" else answer
    text = run(scenario["question"], "ask_expert" if form == "two_agents" else "weather", form == "stream")
print(json.dumps({"reward": float("sunny" in text)}))
