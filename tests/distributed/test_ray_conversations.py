"""Conversations on four replicas: each stays, the load is equal, and the caches are as useful as on one process."""

import asyncio

import pytest
from support.ray_parts import roll_out, wait_until

import art_nb as art

CONVERSATIONS, TURNS, REPLICAS = 64, 6, 4


def converse(model):
    return roll_out(model, groups=8, rollouts=CONVERSATIONS // 8, turns=TURNS, tokens=6)


def cached_share(stats):
    return sum(s["cached_tokens"] for s in stats) / sum(s["prompt_tokens"] for s in stats)


@pytest.mark.full
async def test_conversations_stay_and_use_the_caches(make_backend, make_model, tmp_path):
    model = make_model("stays")
    async with art.LocalBackend(path=tmp_path, device="cpu", dtype="float32", verbose=False) as local:
        await model.register(local)
        assert not any(group.exceptions for group in await converse(model))
        expected = cached_share([local.runtime(model).sampler.stats()])
    model = make_model("stays-on-ray")
    async with make_backend(samplers=REPLICAS, learners=1) as backend:
        await model.register(backend)
        replicas = backend.runtime(model).sampler
        playing = asyncio.ensure_future(converse(model))
        await wait_until(lambda: sum(len(r.sessions) for r in replicas.table.serving()) == CONVERSATIONS)
        loads = [len(replica.sessions) for replica in replicas.table.serving()]
        groups = await playing
        stats = [backend._connection.ray.get(r.actor.stats.remote()) for r in replicas.table.serving()]
    assert not any(group.exceptions for group in groups)
    assert max(loads) - min(loads) <= 1
    assert sorted(s["replies"] for s in stats) == sorted(TURNS * load for load in loads)  # no conversation has moved
    print(f"cached share of the prompt tokens: {cached_share(stats):.3f}, in one process {expected:.3f}")
    assert cached_share(stats) >= 0.9 * expected
