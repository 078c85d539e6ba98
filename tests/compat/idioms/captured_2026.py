"""Agent code that knows nothing of training: its calls are captured, the reward is set from inside."""

import asyncio
import os

from openai import AsyncOpenAI

import art_nb as art


async def agent(client: AsyncOpenAI, name: str, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    for _ in range(2):
        completion = await client.chat.completions.create(model=name, messages=messages, max_completion_tokens=5)
        messages += [completion.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And?"}]
    with art.no_capture():
        await client.chat.completions.create(model=name, messages=messages, max_completion_tokens=2)
    answer = messages[-2]["content"] or ""
    art.current_trajectory(require=True).reward = len(answer) / 10
    art.current_trajectory().metrics["letters"] = len(answer)
    return answer


async def main():
    model = art.TrainableModel(name="captured", project="capture", base_model=os.environ["IDIOM_MODEL"])
    backend = art.LocalBackend()
    await model.register(backend)
    client = AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key)
    for _ in range(2):
        groups = [
            await art.trajectory_group(
                [art.trajectory(agent(client, model.get_inference_name(), question)) for _ in range(4)],
                metadata={"question": question},
            )
            for question in ("Who?", "Why?")
        ]
        result = await backend.train(model, groups, learning_rate=1e-5)
        assert result.metrics["data/step_trainable_assistant_tokens"] > 0
        await model.log(groups, metrics=result.metrics, step=result.step, split="train")
    print("step", await model.get_step())


if __name__ == "__main__":
    asyncio.run(main())
