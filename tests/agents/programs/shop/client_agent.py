"""The agent of the shop with nothing but the OpenAI client."""

import json

from shop import SYSTEM, TOOLS, look_up, score

import art_nb as art


async def rollout(model, task):
    """Answer a question."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]
    trajectory, client, answer = art.Trajectory(tools=TOOLS, messages_and_choices=messages), model.openai_client(), ""
    for _ in range(3):
        completion = await client.chat.completions.create(
            model=model.get_inference_name(),
            messages=trajectory.messages(),
            tools=TOOLS,
            max_completion_tokens=40,
            logprobs=True,
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
    """Return the result of a call, which may be invalid."""
    try:
        return look_up(task, function.name, json.loads(function.arguments)["item"])
    except (KeyError, TypeError, ValueError) as wrong:
        return f"Invalid call: {wrong!r}"
