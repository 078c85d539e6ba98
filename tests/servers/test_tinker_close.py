"""A model that is closed during a request ends soon, and a request that fails leaves no trace."""

import asyncio
import threading

import numpy as np
import pytest
from support.tinker_parts import request_message

from art_nb.servers import shared_model
from art_nb.servers.shared_model import SharedModel, TrainedAdapter
from art_nb.servers.tinker_forms import LoraForm
from art_nb.servers.tinker_training import TinkerModel, prepare_request


def items(count, length):
    """Items without a common prefix."""
    tokens = np.random.default_rng(0).integers(3, 250, (count, length)).tolist()
    return [(row[:-1], {"target_tokens": row[1:], "weights": [1.0] * (length - 1)}) for row in tokens]


@pytest.fixture
def shared(tiny_model_dir):
    model = SharedModel(str(tiny_model_dir), device="cpu", dtype="float32")
    yield model
    model.close()


@pytest.mark.timeout(300)
async def test_close_during_a_request_of_many_slices(shared, tmp_path, monkeypatch):
    """The request is canceled while its second slice runs. The slice ends, and no other one begins."""
    calls, running, resume = [], threading.Event(), threading.Event()
    accumulate = TrainedAdapter.accumulate

    def slow(*args):
        calls.append(args)
        if len(calls) == 2:
            running.set()
            resume.wait(120)
        return accumulate(*args)

    monkeypatch.setattr(shared_model, "SLICE_S", 1e-3)  # shorter than a micro-batch
    monkeypatch.setattr(TrainedAdapter, "accumulate", slow)
    model = TinkerModel("s:train:0", shared, first=1)
    await model.create(LoraForm(rank=4, seed=1), tmp_path / "run", {"session_id": "s"})
    adapter, errors = model.adapter, []
    message = request_message(model.id, 1, "cross_entropy", items(50, 200), {})

    async def request():
        try:
            await model.forward_backward(message)
        except BaseException as error:
            errors.append(str(error))

    model.jobs.add(1, request)
    model.jobs.add(2, request)
    await asyncio.to_thread(running.wait, 120)
    assert len(prepare_request(message, shared)[3]) > 5
    closing = asyncio.ensure_future(model.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    resume.set()
    await closing
    assert len(calls) == 2
    assert errors == ["The session has ended."]
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert adapter.copy_gradients() == [None] * len(adapter.parameters())
