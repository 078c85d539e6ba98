"""Questions about a shop, which an agent answers with two tools, and the agent with the OpenAI client."""

import json
import random
import re

import art_nb as art

SYSTEM = "You answer questions about a shop. Use the tools."
ITEMS = (
    "rice milk bread tea salt sugar butter cheese flour corn wine beer meat fish soup oil pepper garlic ginger juice "
    "chocolate cotton paper glass wood steel gold sand paint glue"
).split()
UNSEEN_ITEMS = "coffee honey water pasta cream silk wool iron coal soap copper silver".split()
QUESTIONS = {
    ("price",): ["What does the {} cost?", "How much is the {}?", "Tell me the price of the {}."],
    ("stock",): ["How much {} is left?", "How much {} do you have?", "Tell me the stock of the {}."],
    ("price", "stock"): [
        "What does the {} cost, and how much is left?",
        "How much is the {}, and how much do you have?",
        "Tell me the price and the stock of the {}.",
    ],
}


def task(seed, items=ITEMS):
    "A question, a shop with three items, and the facts that a right answer consists of."
    dice = random.Random(seed)
    names = dice.sample(items, 3)
    shop = {name: {"price": f"{dice.randint(2, 99)} euros", "stock": f"{dice.randint(2, 99)} left"} for name in names}
    asked = dice.choice(list(QUESTIONS))
    question = dice.choice(QUESTIONS[asked]).format(names[0])
    return {"question": question, "shop": shop, "facts": [shop[names[0]][tool] for tool in asked]}


def look_up(task, tool, item):
    "The result of a tool."
    return task["shop"].get(item, {}).get(tool, f"There is no {item}.")


def score(answer, task):
    "The reward: how many facts are right, of all facts that are asked for or given."
    given, right = set(re.findall(r"\d+ (?:euros|left)", answer)), set(task["facts"])
    reward = len(given & right) / len(given | right)
    return {"reward": reward, "metrics": {"right": reward == 1}}


def schema(name, description):
    "The schema of a tool, as LangChain writes it."
    parameters = {"properties": {"item": {"type": "string"}}, "required": ["item"], "type": "object"}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [schema("price", "Return the price of an item."), schema("stock", "Return how much of an item is left.")]


def begin(task):
    "A trajectory with the system prompt and the question."
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]
    return art.Trajectory(tools=TOOLS, messages_and_choices=messages)


def example(number):
    "A conversation for the warm-up. Each question appears three times: with one tool, the other one, and both."
    asked, tools = task(number // 3), [*QUESTIONS][number % 3]
    trajectory, item, facts = begin(asked), next(iter(asked["shop"])), []
    for tool in tools:
        function = {"name": tool, "arguments": json.dumps({"item": item})}
        call = {"id": f"call_{tool}", "type": "function", "function": function}
        facts.append(look_up(asked, tool, item))
        trajectory.messages_and_choices += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": facts[-1]},
        ]
    trajectory.messages_and_choices.append({"role": "assistant", "content": ", ".join(facts)})
    return trajectory


async def rollout(model, task):
    "The agent with nothing but the OpenAI client."
    trajectory, client, answer = begin(task), model.openai_client(), ""
    for _ in range(3):
        completion = await client.chat.completions.create(
            model=model.get_inference_name(),
            messages=trajectory.messages(),
            tools=TOOLS,
            max_completion_tokens=40,
            logprobs=True,
            **{key: task[key] for key in ("seed",) if key in task},
        )
        trajectory.messages_and_choices.append(completion.choices[0])
        message = completion.choices[0].message
        if not message.tool_calls:
            answer = message.content or ""
            break
        for call in message.tool_calls:
            result = call_tool(task, call.function)
            trajectory.messages_and_choices.append({"role": "tool", "tool_call_id": call.id, "content": result})
    result = score(answer, task)
    trajectory.reward, trajectory.metrics = result["reward"], result["metrics"]
    return trajectory.finish()


def call_tool(task, function):
    "The result of a call, which may be invalid."
    try:
        return look_up(task, function.name, json.loads(function.arguments)["item"])
    except (KeyError, TypeError, ValueError) as wrong:
        return f"Invalid call: {wrong!r}"
