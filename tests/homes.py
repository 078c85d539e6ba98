"""A registered model on a backend of its own, and what its bus says."""
from contextlib import asynccontextmanager

import art_nb as art


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
