"""A cluster that `art-nb run --backend ray` serves, and the notebooks of its clients."""

import asyncio
import os
import signal

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from support.ray_parts import roll_out
from support.turns import endpoint_client, replies_before

import art_nb as art
from art_nb.backends.remote_server import BackendServer
from art_nb.core.types import ServeError
from art_nb.models.clients import SESSION_HEADER

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.timeout(600)]
CONVERSATIONS, TURNS, RUNNING, MANY = 16, 4, 4, 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(make_backend, make_model, tmp_path_factory):
    """A server with two replicas, and two notebooks that use the same model."""
    there, folder = make_backend(samplers=2, learners=1, max_running=RUNNING), tmp_path_factory.mktemp("near")
    with BackendServer(there, port=0) as server:
        address = {"base_url": f"http://127.0.0.1:{server.port}", "api_key": server.api_key, "verbose": False}
        backends = [art.Backend(**address, path=folder / name) for name in ("ann", "bob")]
        models = [make_model("remote") for _ in backends]
        for model, backend in zip(models, backends, strict=True):
            await model.register(backend)
        yield there, models
        for backend in backends:
            await backend.close()


def table_of(backend):
    (runtime,) = backend._runtimes.values()
    return runtime.sampler.table


async def homes_during(work, table):
    """The replicas of each new session while some work runs, and the result of the work."""
    task, homes, earlier = asyncio.ensure_future(work), {}, {*table._homes}
    while not task.done():
        for replica in table.serving():
            for session in replica.sessions - earlier:
                homes.setdefault(session, set()).add(replica.number)
        await asyncio.sleep(0.001)
    return homes, await task


async def by_agent(model, scenario=None):
    """A conversation of an agent that knows only a base URL and a key."""
    async with model.session() as session:
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        messages = [{"role": "user", "content": "A1 B2 C3 " * 4}]
        for turn in range(TURNS):
            reply = await client.chat.completions.create(model="any", messages=messages, max_tokens=6)
            messages += [reply.choices[0].message.model_dump(include={"role", "content"})]
            messages += [{"role": "user", "content": f"line {turn}"}]
        await client.close()
    return session.trajectory


def by_client(model):
    return roll_out(model, groups=2, rollouts=CONVERSATIONS // 2, turns=TURNS, tokens=6)


def by_agents(model):
    groups = [art.TrajectoryGroup(by_agent(model) for _ in range(CONVERSATIONS // 2)) for _ in range(2)]
    return art.gather_trajectory_groups(groups, pbar_desc=None, max_exceptions=CONVERSATIONS)


@pytest.mark.parametrize("play", [by_client, by_agents])
async def test_each_conversation_stays_on_its_replica(served, play):
    there, (model, _) = served
    ray, replicas = there._connection.ray, table_of(there).serving()
    replies = lambda: [ray.get(replica.actor.stats.remote())["replies"] for replica in replicas]
    before = replies()
    homes, groups = await homes_during(play(model), table_of(there))
    assert not any(group.exceptions for group in groups)
    assert len(homes) == CONVERSATIONS and {len(numbers) for numbers in homes.values()} == {1}
    counts = [sum(numbers == {replica.number} for numbers in homes.values()) for replica in replicas]
    assert min(counts) > 0
    assert [after - n for after, n in zip(replies(), before, strict=True)] == [TURNS * n for n in counts]


async def test_a_killed_replica_loses_no_rollout_of_a_remote_notebook(served):
    there, (model, _) = served
    playing = asyncio.ensure_future(roll_out(model, groups=2, rollouts=4, turns=4, tokens=60))
    victim = table_of(there).replicas[0]
    while victim.requests < 2:
        assert not playing.done()
        await asyncio.sleep(0.001)
    os.kill(victim.place.pid, signal.SIGKILL)
    groups = await playing
    assert not any(group.exceptions for group in groups)
    assert all(len(trajectory.messages_and_choices) == 9 for group in groups for trajectory in group)


async def test_a_notebook_with_many_rollouts_does_not_delay_another_one(served):
    """Each request is a session of its own, as with rollouts of one request."""
    there, models = served
    ann, bob = map(endpoint_client, models)

    async def ask(client, session, tokens):
        body = {"model": "remote", "messages": [{"role": "user", "content": "A1"}], "max_tokens": tokens}
        headers = {SESSION_HEADER: session}
        answer = await client.post("/chat/completions", json=body | {"ignore_eos": True}, headers=headers)
        assert answer.status_code == 200, answer.text

    (runtime,) = there._runtimes.values()
    is_busy = lambda: runtime.open_requests() >= MANY - 4 * RUNNING
    ask_one, ask_many = (lambda n: ask(ann, "one", 4)), (lambda n: ask(bob, f"many {n}", 200))
    replies = await replies_before(ask_one, ask_many, is_busy, MANY, running=2 * RUNNING)  # of both replicas
    assert replies < MANY // 2  # nearly all without turns; on a busy machine, the way to a replica takes time
    for client in (ann, bob):
        await client.aclose()


async def test_large_requests_and_wrong_keys_are_refused_and_requests_of_a_client_that_leaves_end(served):
    there, (model, _) = served
    (runtime,) = there._runtimes.values()
    async with endpoint_client(model) as client:
        large = await client.post("/chat/completions", content=b" " * ((16 << 20) + 1))
        assert large.status_code == 413
        wrong = await client.get("/models", headers={"authorization": "Bearer wrong"})
        assert wrong.status_code == 401
        body = {"model": "remote", "messages": [{"role": "user", "content": "A1"}], "max_tokens": 400}
        body |= {"ignore_eos": True, "n": 16}  # none ends before all of them have arrived
        requests = [
            asyncio.ensure_future(client.post("/chat/completions", json=body | {"stream": n % 2 == 0}))
            for n in range(20)
        ]
        while runtime.open_requests() < 20:
            assert not [request.result() for request in requests if request.done()]
            await asyncio.sleep(0.001)
        for request in requests:
            request.cancel()
        await asyncio.wait(requests)
    ray, replicas = there._connection.ray, table_of(there).serving()
    while runtime.open_requests() or any(ray.get(replica.actor.open_requests.remote()) for replica in replicas):
        await asyncio.sleep(0.05)


@pytest.mark.full
async def test_a_model_that_was_not_used_makes_room(cluster, make_backend, make_model, tmp_path, monkeypatch):
    cpus = 0.3 * cluster.ray.cluster_resources()["CPU"]
    there = make_backend(samplers=1, learners=1, cpus_per_actor=cpus, wait_for_nodes_s=10.0)
    with BackendServer(there, port=0) as server:
        address = {"base_url": f"http://127.0.0.1:{server.port}", "api_key": server.api_key, "verbose": False}
        async with art.Backend(**address, path=tmp_path) as backend:
            first, second = make_model("first"), make_model("second")
            await first.register(backend)
            with pytest.raises(ServeError, match="needed"):
                await second.register(backend)
            monkeypatch.setattr("art_nb.backends.remote_calls.IDLE_MODEL_S", 0.0)
            await second.register(backend)
            assert [runtime.name for runtime in there._runtimes.values()] == ["second"]
            with pytest.raises(ServeError, match="not loaded"):
                await first.get_step()
