"""The sessions of rollouts end with them, so that a new replica gets its share of the conversations at once."""

import asyncio
from collections import Counter
from contextlib import suppress

import pytest
from support.server_parts import Scripted, endpoint

import art_nb as art
from art_nb.distributed.routing import SESSION_HEADER, ReplicaRecord, RouterEndpoint, RouterTransport, RoutingTable
from art_nb.models.clients import SessionHeaders, ShardedTransport, httpx
from art_nb.rollouts.gather import call_after_rollout, current_rollout, in_rollout

BODY = {"model": "base", "messages": [{"role": "user", "content": "A1"}], "max_tokens": 40}


@pytest.fixture
def make_replica():
    """A maker of replicas, which are endpoints whose samplers follow a script."""
    started = []

    def make(number):
        server = endpoint(Scripted(str(number)))
        server.start()
        started.append(server)
        return ReplicaRecord(number, server.base_url, server.api_key, "serving")

    yield make
    for server in started:
        server.stop()


def groups_of(client, replies, count=4, size=8, turns=2, fail=False):
    """Groups of conversations. Each one notes its replica and waits for the others, so that all are open at once."""
    open_rollouts, all_open = [], asyncio.Event()

    async def rollout():
        open_rollouts.append(current_rollout())
        for _ in range(turns):
            response = await client.post("/v1/chat/completions", json=BODY)
            reply = response.json()["choices"][0]["message"]["content"]
            replies[current_rollout()].append(reply)
            if len(open_rollouts) == count * size:
                all_open.set()
            await all_open.wait()
        if fail:
            raise ValueError("lost the game")
        return art.Trajectory(messages_and_choices=[*BODY["messages"]], reward=0.0)

    return [art.TrajectoryGroup(rollout() for _ in range(size)) for _ in range(count)]


class Replies(dict):
    def __missing__(self, rollout):
        return self.setdefault(rollout, [])


async def play(client, **options):
    """Roll out groups as ART's explicit loop does. Return how many conversations each replica had."""
    replies = Replies()
    await art.gather_trajectory_groups(groups_of(client, replies, **options), pbar_desc=None, max_exceptions=1000)
    assert all(len({*texts}) == 1 and len(texts) == 2 for texts in replies.values())  # each one has stayed
    return Counter(texts[0] for texts in replies.values())


@pytest.mark.parametrize("fail", [False, True])
async def test_a_new_replica_gets_its_share_at_once(make_replica, fail):
    table = RoutingTable()
    table.replicas = {0: make_replica(0), 1: make_replica(1)}
    async with httpx.AsyncClient(transport=RouterTransport(table), base_url="http://replicas", timeout=60) as client:
        assert await play(client, fail=fail) == {"0": 16, "1": 16}
        assert [len(replica.sessions) for replica in table.replicas.values()] == [0, 0]
        table.replicas[1].state = "lost"
        table.replicas[1] = make_replica(1)
        assert await play(client, fail=fail) == {"0": 16, "1": 16}
    assert not table._homes


async def test_the_client_of_another_process_names_its_rollouts_and_those_that_have_ended(make_replica):
    table = RoutingTable()
    table.replicas = {0: make_replica(0), 1: make_replica(1)}
    router = RouterEndpoint(table)
    router.start()
    hooks, headers = {"request": [SessionHeaders()]}, {"authorization": f"Bearer {router.api_key}"}
    options = {"base_url": router.base_url.removesuffix("/v1"), "headers": headers, "event_hooks": hooks}
    async with httpx.AsyncClient(transport=ShardedTransport(), timeout=60, **options) as client:
        assert await play(client) == {"0": 16, "1": 16}
        table.replicas[1].state = "lost"
        table.replicas[1] = make_replica(1)
        counts = await play(client)  # the first request ends the earlier sessions; some others may arrive before it
        assert abs(counts["0"] - counts["1"]) <= 8
        await client.post("/v1/chat/completions", json=BODY)
    assert not table._homes
    router.stop()


async def test_a_rollout_that_is_canceled_ends_its_session(make_replica):
    table = RoutingTable()
    table.replicas = {0: make_replica(0)}

    async def rollout(client):
        await client.post("/v1/chat/completions", json=BODY)
        await asyncio.Event().wait()

    async with httpx.AsyncClient(transport=RouterTransport(table), base_url="http://replicas", timeout=60) as client:
        groups = [art.TrajectoryGroup([rollout(client)])]
        gathering = asyncio.ensure_future(art.gather_trajectory_groups(groups, pbar_desc=None))
        while not table.replicas[0].sessions or table.replicas[0].requests:
            await asyncio.sleep(0.01)
        gathering.cancel()
        with suppress(asyncio.CancelledError):
            await gathering
    assert not table.replicas[0].sessions


async def test_the_session_of_a_header_stays(make_replica):
    table = RoutingTable()
    table.replicas = {0: make_replica(0)}
    async with httpx.AsyncClient(transport=RouterTransport(table), base_url="http://replicas", timeout=60) as client:
        await client.post("/v1/chat/completions", json=BODY, headers={SESSION_HEADER: "mine"})
    assert table.replicas[0].sessions == {"mine"}


def test_callbacks_of_a_rollout_are_called_once():
    called = []
    call_after_rollout("key", lambda: called.append("outside"))
    with in_rollout("a"):
        for name in ("first", "second"):
            call_after_rollout("key", lambda name=name: called.append(name))
        call_after_rollout("other", lambda: called.append("other"))
        assert not called
    assert sorted(called) == ["first", "other"]


async def test_a_task_that_outlives_its_rollout_ends_what_it_begins():
    called, ended = [], asyncio.Event()

    async def late():
        await ended.wait()
        call_after_rollout("key", lambda: called.append("late"))

    with in_rollout("a"):
        task = asyncio.ensure_future(late())
    ended.set()
    await task
    assert called == ["late"]
