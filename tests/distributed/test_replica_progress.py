"""The progress of a replica whose sampler hangs, and of one that computes for a long time."""

import asyncio
import sys
import threading

import pytest
from support.registered import until

from art_nb.backends.loading import LoadSettings
from art_nb.distributed.replicas import STALL_CHECKS, ModelSpec, Replica, StallCheck
from art_nb.policy.device import DeviceThread
from art_nb.samplers.base import SamplingParams


@pytest.fixture
def replica(tiny_model_dir):
    """A replica in this process, without Ray."""
    replica = Replica()
    replica.spec = ModelSpec(
        name="ttt", weights=str(tiny_model_dir), base_model="tiny", settings=LoadSettings(device="cpu")
    )
    replica.worker = DeviceThread()
    replica.worker.call(replica._load)
    yield replica
    replica.worker.call(replica.sampler.close)
    replica.worker.close()


async def reply(replica):
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    return [token async for token in replica.sampler.generate([5, 6, 7], params, None)]


def before_decoding(replica, work):
    """Let the sampler's thread do something before each iteration."""
    decode = replica.sampler._decode

    def decode_later():
        work()
        decode()

    replica.sampler._decode = decode_later


async def check_often(replica, times):
    """Whether the replica was stuck at one of several checks."""
    check, stuck = StallCheck(), []
    for _ in range(times):
        stuck.append(check.is_stuck(replica.progress()))
        await asyncio.sleep(0.05)
    return any(stuck)


async def test_a_sampler_that_waits_forever_is_stuck(replica):
    await reply(replica)
    gate = threading.Event()
    before_decoding(replica, gate.wait)
    asking = asyncio.ensure_future(reply(replica))
    await until(lambda: replica.progress().busy)
    assert await check_often(replica, 3 * STALL_CHECKS)
    gate.set()
    assert len(await asking) == 2
    assert not replica.progress().busy
    assert not await check_often(replica, 3 * STALL_CHECKS)


@pytest.mark.skipif(sys.platform != "linux", reason="measures the CPU time of a thread")
async def test_one_long_iteration_is_no_hang(replica):
    await reply(replica)
    done = threading.Event()

    def compute():
        while not done.is_set():
            sum(range(1000))

    before_decoding(replica, compute)
    asking = asyncio.ensure_future(reply(replica))
    await until(lambda: replica.progress().busy)
    before = replica.progress()
    assert not await check_often(replica, 3 * STALL_CHECKS)
    assert replica.progress().iterations == before.iterations
    done.set()
    assert len(await asking) == 2
