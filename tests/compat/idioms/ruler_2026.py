"""RULER instead of a reward: a judge behind an OpenAI-compatible address, groups scored as they finish."""

import asyncio
import os

import art_nb as art
from art_nb.rewards import ruler, ruler_score_group

JUDGE = {"api_base": os.environ["IDIOM_JUDGE"], "api_key": "none"}


class ProjectTrajectory(art.Trajectory):
    topic: str = ""


async def rollout(model: art.Model, topic: str) -> ProjectTrajectory:
    traj = ProjectTrajectory(
        reward=0.0,
        messages_and_choices=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": topic}],
        topic=topic,
    )
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=traj.messages(), max_completion_tokens=6
    )
    traj.messages_and_choices.append(completion.choices[0])
    return traj


async def main():
    counting = [
        [{"role": "user", "content": "Count to 3."}, {"role": "assistant", "content": text}]
        for text in ("1 2 3", "one, two", "no")
    ]
    for score in await ruler(counting, "openai/judge", extra_litellm_params=JUDGE):
        print(score.trajectory_id, score.score, score.explanation)
    model = art.TrainableModel(name="judged", project="ruler", base_model=os.environ["IDIOM_MODEL"])
    backend = art.LocalBackend()
    await model.register(backend)
    for _ in range(await model.get_step(), 2):
        groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model, topic) for _ in range(3)) for topic in ("the sea", "a cat")),
            pbar_desc="gather",
            max_exceptions=0,
            after_each=lambda group: ruler_score_group(
                group, "openai/judge", extra_litellm_params=JUDGE, rubric="Shorter is better.", swallow_exceptions=True
            ),
        )
        assert all(t.topic and t.metrics["ruler_score"] == t.reward for group in groups for t in group)
        assert all("independent_reward" in t.metrics for group in groups for t in group)
        result = await backend.train(model, groups, learning_rate=1e-5)
        await model.log(groups, metrics=result.metrics, step=result.step, split="train")
    print("step", await model.get_step())


if __name__ == "__main__":
    asyncio.run(main())
