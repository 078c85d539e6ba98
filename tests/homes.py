"""A registered model on a backend of its own, what it answers and saves, what its bus says."""
import asyncio
import time
from contextlib import asynccontextmanager

import art_nb as art

QUESTION = [{"role": "user", "content": "free: A1 B1"}]


async def until(truth, timeout_s=30):
    """Wait for something to become true."""
    end = time.monotonic() + timeout_s
    while not truth():
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.01)


async def ask(model, name=None, **options):
    """A reply to QUESTION, as a choice."""
    options = {"max_tokens": 8, "logprobs": True} | options
    reply = await model.openai_client().with_options(max_retries=0).chat.completions.create(
        model=name or model.get_inference_name(), messages=QUESTION, **options)
    return reply.choices[0]


def saved_adapter(model, step):
    """What tells the adapter of a step from others."""
    from art_nb import checkpoints

    return checkpoints.facts(model.store.checkpoint_dir(step))["adapter"]


def heard(backend, *kinds):
    """A list that fills with events."""
    events = []
    backend.bus.subscribe(events.append, *kinds)
    return events


@asynccontextmanager
async def at_home(directory, path, name="tiny"):
    """A registered model and its backend."""
    model = art.TrainableModel(name=name, project="tests", base_model=str(directory))
    async with art.LocalBackend(path=path, verbose=False) as backend:
        await model.register(backend)
        yield model, backend
