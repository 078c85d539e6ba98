"""An agent that asks a helper: the helper's conversation shares the reward as an additional history."""

import asyncio
import os
import random

from art_nb.local import LocalBackend

import art_nb as art

random.seed(7)


async def say(model, messages):
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_completion_tokens=5
    )
    return completion.choices[0]


async def rollout(model: art.Model, task: str) -> art.Trajectory:
    trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": task}])
    plan = await say(model, trajectory.messages())
    trajectory.messages_and_choices.append(plan)
    helper = art.Trajectory(messages_and_choices=[{"role": "user", "content": f"Check: {plan.message.content}"}])
    checked = await say(model, helper.messages())
    trajectory.additional_histories.append(
        art.trajectories.LegacyHistory(messages_and_choices=[*helper.messages_and_choices, checked])
    )
    trajectory.messages_and_choices.append({"role": "user", "content": f"It said: {checked.message.content}"})
    trajectory.messages_and_choices.append(await say(model, trajectory.messages()))
    trajectory.reward = random.random()
    trajectory.log(f"asked once about {task}")
    return trajectory


async def main():
    model = art.TrainableModel(name="pair", run_name="pair-001", project="agents", base_model=os.environ["IDIOM_MODEL"])
    backend = LocalBackend(path=".art")
    await model.register(backend)
    for _ in range(2):
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup((rollout(model, task) for _ in range(3)), metadata={"task": task})
            for task in ("plan", "pack")
        )
        assert all(len(trajectory.additional_histories) == 1 for group in groups for trajectory in group)
        result = await backend.train(model, groups, learning_rate=1e-5)
        assert result.metrics["data/step_trainable_assistant_tokens"] > 0
        await model.log(groups, metrics=result.metrics, step=result.step, split="train")
    print("step", await model.get_step())
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main())
