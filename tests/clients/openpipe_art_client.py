"""A training script for openpipe-art's ServerlessBackend, without any part of art_nb: yes, no, maybe in five steps.

Arguments: base URL, base model. The API key is in the environment. Before each step, and after a lost connection, it
prints a line and waits for one.
"""

import asyncio
import json
import os
import sys
from itertools import permutations

import art
import openai
from art.serverless.backend import ServerlessBackend
from art.serverless.client import ExperimentalTrainingConfig

WORTH = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
PROMPTS = [
    ask.format(*words)
    for ask in ("Pick one: {} / {} / {}", "Choose: {} / {} / {}", "{} / {} / {}?")
    for words in permutations(WORTH)
]


def tell(kind, **values):
    print(json.dumps({"kind": kind, **values}), flush=True)


def wait():
    assert sys.stdin.readline()


async def rollout(model, prompt):
    messages = [{"role": "system", "content": "Answer with one word."}, {"role": "user", "content": prompt}]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_completion_tokens=5
    )
    choice = completion.choices[0]
    word = (choice.message.content or "").strip(" .!\n").lower()
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=WORTH.get(word, 0.0))


async def train_until_answered(backend, model, groups):
    """Train one step. If the server is gone, wait until it is back and make the same call again."""
    while True:
        try:
            return await backend.train(model, groups, learning_rate=3e-4)
        except openai.APIConnectionError:
            tell("lost")
            wait()


async def train(backend, model):
    for step in range(5):
        tell("before", step=step)
        wait()
        assert await model.get_step() == step
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(rollout(model, prompt) for _ in range(8)) for prompt in PROMPTS[step::3]
        )
        rewards = [trajectory.reward for group in groups for trajectory in group]
        tell("training", step=step, reward=sum(rewards) / len(rewards))
        result = await train_until_answered(backend, model, groups)
        await model.log(groups, metrics=result.metrics, step=result.step, split="train")
        tell("trained", step=result.step, metrics=result.metrics, artifact=result.artifact_name)


async def likely_reply(model, name):
    completion = await model.openai_client().chat.completions.create(
        model=name, messages=[{"role": "user", "content": PROMPTS[0]}], max_tokens=4, temperature=0, logprobs=True
    )
    (choice,) = completion.choices
    return choice.policy_version, [entry.logprob for entry in choice.logprobs.content]


async def fail(backend, model):
    """A job whose token IDs are not of this model, and a job of supervised fine-tuning without its upload to W&B."""
    group = await art.TrajectoryGroup(rollout(model, PROMPTS[0]) for _ in range(2))
    group.trajectories[0].reward, group.trajectories[1].reward = 0.0, 1.0
    choice = group.trajectories[0].messages_and_choices[-1]
    choice.token_ids = [10**6] * len(choice.token_ids)
    try:
        await backend.train(model, [group])
    except RuntimeError as error:
        tell("failed", message=str(error))
    job = await backend._client.sft_training_jobs.create(
        model_id=model.id, training_data_url="wandb-artifact:///e/p/d:v0"
    )
    async for event in backend._client.sft_training_jobs.events.list(training_job_id=job.id):
        tell("sft", type=event.type, data=event.data)
    try:
        await backend.train(model, [group], learning_rate=-1.0)
    except openai.BadRequestError as error:
        tell("refused", message=str(error))


async def main():
    backend = ServerlessBackend(api_key=os.environ["ART_NB_API_KEY"], base_url=sys.argv[1])
    model = art.TrainableModel(name="maybe-001", project="yes-no-maybe", base_model=sys.argv[2])
    await model.register(backend)
    tell("registered", entity=model.entity, keys=sorted(ExperimentalTrainingConfig.__annotations__))
    await train(backend, model)
    names = [model.get_inference_name(step) for step in (None, 0, 3, 5)]
    tell("served", names=names, replies=[await likely_reply(model, name) for name in [*names, "maybe-001@3"]])
    await model.delete_checkpoints("val/reward")  # there is no such metric, so all but the latest are deleted
    checkpoints = [c.step async for c in backend._client.models.checkpoints.list(model_id=model.id)]
    try:
        await likely_reply(model, names[2])
        status = 200
    except openai.APIStatusError as error:
        status = error.status_code
    tell("deleted", checkpoints=checkpoints, status=status, step=await model.get_step())
    await fail(backend, model)
    await backend.delete(model)
    tell("end")
    await backend.close()


asyncio.run(main())
