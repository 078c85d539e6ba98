"""A warm process that forks one child for each job it reads, and tells how the child ended. Children may be killed."""

import asyncio
import importlib
import io
import json
import os
import sys
import threading
from functools import partial

from support.registered import QUESTION
from support.warm import check_threads

import art_nb as art
from art_nb.core.events import AdapterServed, CheckpointSaved, GradientStep, RolloutDone, RolloutStarted, StepDone

KINDS = (RolloutStarted, RolloutDone, GradientStep, AdapterServed, CheckpointSaved, StepDone)


def say(*words):
    """One line in one write, so that a kill leaves no half line."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class WholeLines(io.TextIOBase):
    """A stream that writes each printed line with one call.

    `print` can write the line end separately, and the process can be killed in between.
    """

    def __init__(self):
        self.partial = threading.local()

    def write(self, text):
        *lines, self.partial.text = (getattr(self.partial, "text", "") + text).split("\n")
        for line in filter(str.strip, lines):
            say(line)
        return len(text)


async def registered(job):
    model = art.TrainableModel(name=job["name"], project="crash", base_model=job["base_model"])
    backend = art.LocalBackend(path=job["path"], verbose=False)
    await model.register(backend)
    backend.bus.subscribe(lambda event: say(type(event).__name__, getattr(event, "step", "")), *KINDS)
    say("registered", await model.get_step())
    return model, backend


async def rollout(model, scenario, seed=None):
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=QUESTION, max_tokens=6, logprobs=True, seed=seed
    )
    choice = reply.choices[0]
    return art.Trajectory(messages_and_choices=[*QUESTION, choice], reward=choice.model_extra["token_ids"][0] % 5)


async def train(job):
    """The real loop, until somebody ends it."""
    model, backend = await registered(job)
    await art.train(
        model,
        rollout,
        [0, 1],
        steps=job["steps"],
        groups_per_step=2,
        rollouts_per_group=3,
        learning_rate=1e-2,
        show=False,
    )
    await backend.close()


async def sft(job):
    """Supervised passes, each a step, until somebody ends it."""
    model, backend = await registered(job)
    reply = {"role": "assistant", "content": "A1"}
    for _ in range(await model.get_step(), job["steps"]):
        await model.train_sft([art.Trajectory(messages_and_choices=[*QUESTION, reply])] * 2)
    await backend.close()


async def record(job):
    """Groups for `feed`."""
    model, backend = await registered(job)
    for step in range(job["steps"]):
        said = [await rollout(model, None, 10 * step + i) for i in range(6)]
        model.store.write_groups("train", step, [art.TrajectoryGroup(said[:3]), art.TrajectoryGroup(said[3:])])
    await backend.close()


async def feed(job):
    """Train on recorded groups, from the step that was reached on."""
    model, backend = await registered(job)
    groups = art.open_run(job["recorded"])
    for step in range(await model.get_step(), job["steps"]):
        await backend.train(model, groups.read_groups("train", step), learning_rate=1e-2)
    await backend.close()


async def pipeline(job):
    """Rollouts, training and evaluation beside one another, until somebody ends it."""
    from art_nb.pipeline.settings import make_group_rollout_fn
    from art_nb.pipeline.trainer import PipelineTrainer

    async def play(model, scenario, config):
        trajectory = await rollout(model, scenario)
        config["played"] += 1
        return trajectory.model_copy(update={"reward": config["played"]})  # every group teaches

    model, backend = await registered(job)
    trainer = PipelineTrainer(
        model,
        backend,
        make_group_rollout_fn(play, n=2),
        range(job["scenarios"]),
        {"played": 0},
        num_rollout_workers=2,
        min_batch_size=2,
        max_batch_size=3,
        max_steps_off_policy=None,
        log_interval_seconds=0.2,
    )
    run = await trainer.train()
    say("over", run.status, run.step)
    await backend.close()


JOBS = {"train": train, "sft": sft, "record": record, "feed": feed, "pipeline": pipeline}


def warm():
    """Import what every child needs; nothing here may start a thread."""
    for name in ("backends", "pipeline_trainer", "store"):
        importlib.import_module(f"art_nb.{name}")
    for name in ("models.llama.modeling_llama", "generation", "models.auto.tokenization_auto"):
        importlib.import_module(f"transformers.{name}")
    check_threads()


def child(job):
    say("child", os.getpid())  # the child prints it: the parent can be slower than the first lines of its child
    sys.stdout = WholeLines()
    try:
        asyncio.run(JOBS[job["do"]](job))
        say("finished")
    finally:
        sys.stderr.flush()
        os._exit(0)


def main():
    warm()
    say("ready")
    for line in iter(partial(sys.stdin.readline), ""):
        pid = os.fork()
        if not pid:
            child(json.loads(line))
        say("ended", os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
