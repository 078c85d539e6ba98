"""The task of langgraph.ipynb and ../node_agent/node-agent.ipynb: a question that one of two tools answers."""

import json
import random
import re
from typing import Any

import art_nb as art

SYSTEM = "You answer questions about a shop. Use the tools."
ITEMS = (
    "rice milk bread tea salt sugar butter cheese flour corn wine beer meat fish soup oil pepper garlic ginger juice "
    "chocolate cotton paper glass wood steel gold sand paint glue"
).split()
UNSEEN_ITEMS = "coffee honey water pasta cream silk wool iron coal soap copper silver".split()
QUESTIONS = {
    "price": ["What does the {} cost?", "How much is the {}?", "Tell me the price of the {}."],
    "stock": ["How much {} is left?", "How much {} do you have?", "Tell me the stock of the {}."],
}


def new_task(seed, items=ITEMS):
    """Return a question about the first of three items, the shop, the tool that the question needs, and its result."""
    dice = random.Random(seed)
    names = dice.sample(items, 3)
    shop = {name: {"price": f"{dice.randint(2, 99)} euros", "stock": f"{dice.randint(2, 99)} left"} for name in names}
    tool = dice.choice(list(QUESTIONS))
    question = dice.choice(QUESTIONS[tool]).format(names[0])
    return {"question": question, "shop": shop, "tool": tool, "fact": shop[names[0]][tool]}


def look_up(task, tool, item):
    """Return the result of a tool."""
    return task["shop"].get(item, {}).get(tool, f"There is no {item}.")


def score(answer, task):
    """Return the reward: 1 for the right fact, 0.5 if the answer has other text too, and 0 for another fact or none."""
    has_fact = re.findall(r"\d+ (?:euros|left)", answer) == [task["fact"]]
    right = answer.strip() == task["fact"]
    return {"reward": (has_fact + right) / 2, "metrics": {"right": right}}


def schema(name, description) -> Any:
    """Return the schema of a tool, as LangChain writes it."""
    parameters = {"properties": {"item": {"type": "string"}}, "required": ["item"], "type": "object"}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: list[Any] = [
    schema("price", "Return the price of an item."),
    schema("stock", "Return how much of an item is left."),
]


def example(number):
    """Return a conversation for the warm-up. Each task appears three times, once with the wrong tool."""
    task = new_task(number // 3)
    (wrong,) = {*QUESTIONS} - {task["tool"]}
    tool, item = task["tool"] if number % 3 else wrong, next(iter(task["shop"]))
    fact = look_up(task, tool, item)
    call = {"id": "call_1", "type": "function", "function": {"name": tool, "arguments": json.dumps({"item": item})}}
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": fact},
        {"role": "assistant", "content": fact},
    ]
    return art.Trajectory(tools=TOOLS, messages_and_choices=messages)
