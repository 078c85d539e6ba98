"""The smallest run of all: answer maybe. Groups by prompt, the model's own client, both splits logged."""

import asyncio
import os
from itertools import permutations

import openai
from art_nb.local import LocalBackend

import art_nb as art


async def rollout(client: openai.AsyncOpenAI, model: art.TrainableModel, prompt: str) -> art.Trajectory:
    messages: art.Messages = [{"role": "user", "content": prompt}]
    chat_completion = await client.chat.completions.create(
        messages=messages, model=model.name, max_tokens=6, timeout=100
    )
    choice = chat_completion.choices[0]
    content = choice.message.content or ""
    reward = {"yes": 0.5, "no": 0.75, "maybe": 1.0}.get(content, len(content) / 100)
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=reward)


def with_quotes(word):
    return f"'{word}'"


async def main():
    backend = LocalBackend()
    model = art.TrainableModel(
        name="010",
        project="yes-no-maybe",
        base_model=os.environ["IDIOM_MODEL"],
        _internal_config={"peft_args": {"r": 4, "lora_alpha": 8}},
    )
    await model.register(backend)
    prompts = [
        f"{prefix} with {', '.join(map(with_quotes, words) if quoted else words)}"
        for prefix in ("respond", "just respond")
        for quoted in (True, False)
        for words in permutations(["yes", "no", "maybe"], 2)
    ][:3]
    client = model.openai_client()
    for _ in range(await model.get_step(), 2):
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(rollout(client, model, prompt) for _ in range(4)) for prompt in prompts
        )
        await model.train(groups, config=art.TrainConfig(learning_rate=1e-4))
        val = await art.gather_trajectories(
            (rollout(client, model, prompt) for prompt in prompts), pbar_desc="val", max_exceptions=3
        )
        await model.log(val)
    print("step", await model.get_step())
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main())
