"""Answer a question about the stock of a wholesaler: python agent.py QUESTION."""

import json
import os
import sys
from typing import Any

from openai import OpenAI

client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
MODEL = os.environ.get("STOCK_MODEL", "gpt-4o-mini")
SYSTEM = "You know the stock of a wholesaler. Look up every number with the tools. Reply with one short sentence."

STOCK = {"bolt": 300, "rope": 72}  # units of each item
PACKS = {"bolt": 50, "rope": 2}  # units in a pack


def tool(name, description) -> Any:
    parameters = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [tool("stock", "Units of an item in the warehouse."), tool("pack_size", "Units of an item in a pack.")]
TABLES = {"stock": STOCK, "pack_size": PACKS}


def run_tool(name, arguments):
    try:
        return str(TABLES[name][json.loads(arguments)["item"]])
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


def answer(question, max_turns=4):
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(max_turns):
        completion = client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, temperature=0.2, max_tokens=60
        )
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            if call.type == "function":
                result = run_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


if __name__ == "__main__":
    print(answer(" ".join(sys.argv[1:])))
