"""A run that is started several times: one heartbeat thread, and one session at a time."""

import asyncio
import threading

import pytest
from support.registered import at_home, until

import art_nb as art
from art_nb.core.types import TrainError


@pytest.fixture
async def home(tiny_model_dir, tmp_path):
    async with at_home(tiny_model_dir, tmp_path) as pair:
        yield pair


async def waiting(model, scenario):
    await asyncio.Event().wait()


def heartbeats():
    return [thread for thread in threading.enumerate() if thread.name.startswith("art-nb-beat")]


async def test_a_run_that_starts_again_at_once_has_one_heartbeat(home):
    """Each session ends at once, because no step is left. The thread of its heartbeat may still write then."""
    run = art.train(home[0], waiting, [0], steps=0, show=False)
    for _ in range(30):
        run._over.wait()
        run.start()
    run._over.wait()
    run.options.steps = 1
    run.start()
    await until(lambda: len(heartbeats()) == 1, timeout_s=20)
    run.stop()


async def test_two_threads_that_start_a_run_start_it_once(home):
    run = art.train(home[0], waiting, [0], steps=1, show=False, start=False)
    for _ in range(20):
        gate, refused = threading.Barrier(4), []

        def press(gate=gate, refused=refused):
            gate.wait()
            try:
                run.start()
            except TrainError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=press) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(refused) == 3
        assert all("being trained already" in message for message in refused)
        run.stop()
