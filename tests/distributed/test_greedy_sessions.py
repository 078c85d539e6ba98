"""One session with 100 requests does not delay the request of another one, on the endpoint of a replica."""

import asyncio

import pytest
from support.turns import replies_before

from art_nb.distributed.routing import SESSION_HEADER, ReplicaRecord, RouterEndpoint, RoutingTable
from art_nb.models.clients import httpx
from art_nb.policy.device import DeviceThread
from art_nb.policy.loading import load_policy
from art_nb.samplers.transformers import TransformersSampler
from art_nb.serving.endpoint import Endpoint
from art_nb.tokens.chat import ChatFormat

MANY, RUNNING = 100, 4


@pytest.fixture(scope="module")
def replica(tiny_model_dir):
    """The endpoint of a replica that samples four replies at the same time."""
    policy, worker = load_policy(tiny_model_dir, device="cpu"), DeviceThread()
    sampler = worker.call(TransformersSampler, policy, worker, max_running=RUNNING)
    endpoint = Endpoint(sampler, ChatFormat(policy.tokenizer), lambda name: None, lambda: ["tiny"])
    endpoint.start()
    yield endpoint
    endpoint.stop()
    worker.call(sampler.close)
    worker.close()


def keep_serving(suspect):
    """Under load, a server closes connections whose request is late. A backend checks the replica and keeps it."""
    suspect.state = "serving"


@pytest.fixture
def router(replica):
    """The endpoint that other programs use, in front of the replica."""
    table = RoutingTable(on_suspect=keep_serving)
    table.replicas = {0: ReplicaRecord(0, replica.base_url, replica.api_key, "serving")}
    router = RouterEndpoint(table)
    router.start()
    yield router
    router.stop()


def client_of(router):
    headers = {"authorization": f"Bearer {router.api_key}"}
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=router.base_url, headers=headers, timeout=120, limits=limits)


async def ask(client, session, done, tokens=120, **fields):
    message = {"role": "user", "content": "A1"}
    body = {"model": "tiny", "messages": [message], "max_tokens": tokens, "ignore_eos": True} | fields
    answer = await client.post("/chat/completions", json=body, headers={SESSION_HEADER: session} if session else {})
    assert answer.status_code == 200, answer.text
    done.append(session)


@pytest.mark.parametrize("session", ["greedy", ""], ids=["session", "no session"])
async def test_a_greedy_session_delays_another_one_by_two_replies_of_each_slot(router, replica, session):
    """All requests without a session are one session."""
    is_busy = lambda: replica.service.sampler.stats()["waiting"] >= MANY // 2
    async with client_of(router) as client:
        ask_one, ask_many = (lambda _: ask(client, "single", [], tokens=4)), (lambda _: ask(client, session, []))
        assert await replies_before(ask_one, ask_many, is_busy, MANY, RUNNING) <= 2 * RUNNING


@pytest.mark.parametrize("stream", [False, True])
async def test_the_requests_of_a_client_that_leaves_do_not_run(router, replica, stream):
    sampler, done = replica.service.sampler, []
    async with client_of(router) as client:
        many = [asyncio.ensure_future(ask(client, "greedy", done, tokens=400, stream=stream)) for _ in range(MANY)]
        while sampler.stats()["waiting"] < MANY // 2:
            await asyncio.sleep(0.01)
        for request in many:
            request.cancel()
        await asyncio.wait(many)
    async with client_of(router) as client:
        await ask(client, "single", done, tokens=4)
        while sampler.stats()["running"] + sampler.stats()["waiting"]:
            await asyncio.sleep(0.01)
    assert done == ["single"]
    assert not router.live and not replica.service.live


async def test_keys_and_sizes(router, replica):
    async with client_of(router) as client:
        large = await client.post("/chat/completions", content=b" " * ((16 << 20) + 1))
        assert large.status_code == 413
    for endpoint in (router, replica):
        async with httpx.AsyncClient(base_url=endpoint.base_url) as client:
            for headers in ({}, {"authorization": "Bearer wrong"}):
                assert (await client.get("/models", headers=headers)).status_code == 401
