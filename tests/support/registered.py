"""A registered model on a backend of its own, what it answers and saves, what its bus says."""

import asyncio
import time
from contextlib import asynccontextmanager

import art_nb as art
from art_nb.core.events import AdapterServed, Failed, GradientStep, SignalReport, StepDone, Warned

QUESTION = [{"role": "user", "content": "free: A1 B1"}]


async def until(truth, timeout_s=200):
    """Wait for something to become true."""
    end = time.monotonic() + timeout_s
    while not truth():
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.01)


async def ask(model, name=None, **options):
    """A reply to QUESTION, as a choice."""
    options = {"max_tokens": 8, "logprobs": True} | options
    reply = (
        await model.openai_client()
        .with_options(max_retries=0)
        .chat.completions.create(model=name or model.get_inference_name(), messages=QUESTION, **options)
    )
    return reply.choices[0]


def better_and_worse(choices, rewards=None):
    """Replies to QUESTION as a group."""
    rewards = rewards or [float(i % 3) for i in range(len(choices))]
    return art.TrajectoryGroup(
        [
            art.Trajectory(messages_and_choices=[*QUESTION, choice], reward=reward)
            for choice, reward in zip(choices, rewards, strict=True)
        ]
    )


async def a_group(model, seed=0, size=6, rewards=None, **options):
    """Replies of which some are better."""
    return better_and_worse([await ask(model, seed=100 * seed + i, **options) for i in range(size)], rewards)


def saved_adapter(model, step):
    """What tells the adapter of a step from others."""
    from art_nb.policy import adapter_files

    return adapter_files.read_training_json(model.store.checkpoint_dir(step))["adapter"]


def heard(backend, *kinds):
    """A list that fills with events."""
    events = []
    backend.bus.subscribe(events.append, *kinds)
    return events


@asynccontextmanager
async def at_home(directory, path, name="tiny", **fields):
    """A registered model and its backend."""
    model = art.TrainableModel(name=name, project="tests", base_model=str(directory), **fields)
    async with art.LocalBackend(path=path, verbose=False) as backend:
        await model.register(backend)
        yield model, backend


def check_two_steps(run, events):
    """Check the state of a finished run of two steps, and the events that its backend has sent."""
    assert (run.status, run.step) == ("done", 2)
    assert not [event for event in events if isinstance(event, Failed | Warned)]
    assert [event.step for event in events if isinstance(event, StepDone)] == [1, 2]
    order = [type(event) for event in events if isinstance(event, SignalReport | GradientStep | AdapterServed)]
    assert order == [SignalReport, GradientStep, GradientStep, AdapterServed] * 2
