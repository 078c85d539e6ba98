"""SFT on a file, then RL on the same adapter, over a dataset that is iterated batch by batch."""

import asyncio
import json
import os
from pathlib import Path

from art_nb.local import LocalBackend
from art_nb.utils import iterate_dataset
from art_nb.utils.sft import train_sft_from_file

import art_nb as art

TRAINING_CONFIG = {"groups_per_step": 2, "num_epochs": 1, "rollouts_per_group": 4, "learning_rate": 1e-5}


async def rollout(model: art.Model, question: str) -> art.Trajectory:
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "user", "content": question}], reward=0, metadata={"scenario_id": question}
    )
    async with trajectory.track_duration("llm_completion"):
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages(), max_completion_tokens=6, temperature=1
        )
    trajectory.messages_and_choices.append(completion.choices[0])
    trajectory.reward = len(completion.choices[0].message.content or "") / 10
    return trajectory.finish()


async def main():
    rows = [
        {"messages": [{"role": "user", "content": f"{i} and 1?"}, {"role": "assistant", "content": str(i + 1)}]}
        for i in range(6)
    ]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    backend = LocalBackend(path=".art")
    model = art.TrainableModel(name="sum-001", project="sums", base_model=os.environ["IDIOM_MODEL"])
    await model.register(backend)
    await train_sft_from_file(model, "train.jsonl", epochs=1, batch_size=2, peak_lr=2e-4, schedule_type="linear")
    learnt = await model.get_step()
    training = iterate_dataset(
        [f"{i} and 2?" for i in range(4)],
        groups_per_step=TRAINING_CONFIG["groups_per_step"],
        num_epochs=TRAINING_CONFIG["num_epochs"],
        initial_step=0,
    )
    for batch in training:
        groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(rollout(model, question) for _ in range(TRAINING_CONFIG["rollouts_per_group"]))
                for question in batch.items
            ),
            pbar_desc=f"train gather epoch {batch.epoch}",
        )
        result = await backend.train(model, groups, learning_rate=TRAINING_CONFIG["learning_rate"])
        await model.log(groups, metrics=result.metrics, step=result.step, split="train")
    for items, epoch, step, epoch_step in iterate_dataset(list("abc"), groups_per_step=3, use_tqdm=False):
        assert sorted(items) == list("abc")
        assert (epoch, step, epoch_step) == (0, 0, 0)
    print("step", await model.get_step() - learnt)


if __name__ == "__main__":
    asyncio.run(main())
