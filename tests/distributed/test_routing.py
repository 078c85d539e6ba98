"""The router: real endpoints, timeouts, broken connections, and several event loops."""

import asyncio
import threading

import pytest
from openai import APIStatusError, AsyncOpenAI
from support.server_parts import Scripted, endpoint

from art_nb.distributed.routing import SESSION_HEADER, ReplicaRecord, RouterEndpoint, RouterTransport, RoutingTable
from art_nb.models.clients import httpx

BODY = {"model": "base", "messages": [{"role": "user", "content": "A1"}], "max_tokens": 40}


@pytest.fixture
def make_table():
    """A maker of tables whose replicas are endpoints with samplers that follow a script."""
    started = []

    def make(*samplers):
        table = RoutingTable()
        for number, sampler in enumerate(samplers):
            server = endpoint(sampler)
            server.start()
            started.append(server)
            table.replicas[number] = ReplicaRecord(number, server.base_url, server.api_key, "serving")
        return table

    yield make
    for server in started:
        server.stop()


def client_of(table, patience_s=10.0, timeout=30.0):
    return httpx.AsyncClient(transport=RouterTransport(table, patience_s), base_url="http://replicas", timeout=timeout)


def ask(client, session="a", **options):
    return client.post("/v1/chat/completions", json=BODY | options, headers={SESSION_HEADER: session})


def text_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


async def broken_server(answer):
    """A server that writes some bytes for each request and then breaks the connection."""

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        await asyncio.sleep(0.05)  # the client reads the bytes first
        writer.transport.abort()

    return await asyncio.start_server(handle, "127.0.0.1", 0)


def put_first(table, server):
    """Make a server the replica that is chosen first, before the one in the table."""
    (other,) = table.replicas.values()
    port = server.sockets[0].getsockname()[1]
    other.number = 1
    table.replicas = {0: ReplicaRecord(0, f"http://127.0.0.1:{port}/v1", "key", "serving"), 1: other}


async def test_without_replicas_a_request_fails_with_503_after_its_patience():
    table = RoutingTable()
    async with client_of(table, patience_s=0.1) as client:
        response = await ask(client)
        assert response.status_code == 503
        assert "No replica serves" in response.json()["error"]["message"]
        openai = AsyncOpenAI(base_url="http://replicas/v1", api_key="key", http_client=client, max_retries=5)
        with pytest.raises(APIStatusError) as caught:  # x-should-retry: false
            await openai.chat.completions.create(**BODY)
        assert caught.value.status_code == 503


async def test_a_waiting_request_is_served_by_a_replica_that_starts(make_table):
    table, later = make_table(Scripted("late")), RoutingTable()
    async with client_of(later, patience_s=30) as client:
        waiting = asyncio.ensure_future(ask(client))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        later.replicas = table.replicas
        assert text_of(await waiting) == "late"


async def test_a_timeout_is_no_loss(make_table):
    slow = Scripted("slow")
    slow.gate = (2, threading.Event())
    table = make_table(slow, Scripted("other"))
    home = table.replicas[0]
    async with client_of(table, timeout=0.3) as client:
        for _ in range(2):
            with pytest.raises(httpx.ReadTimeout):
                await ask(client)
        assert (home.state, home.requests, table.counts["asked again"]) == ("serving", 0, 0)
    slow.gate[1].set()
    async with client_of(table) as client:
        assert text_of(await ask(client)) == "slow"  # the conversation has stayed


async def test_a_request_to_a_lost_machine_is_asked_again_elsewhere(make_table):
    silent = Scripted("silent")
    silent.gate = (2, threading.Event())
    table = make_table(silent, Scripted("other"))
    home = table.replicas[0]
    async with client_of(table) as client:
        asking = asyncio.ensure_future(ask(client))
        while not silent.open:
            await asyncio.sleep(0.01)
        home.state = "lost"  # its connections are open
        assert text_of(await asking) == "other"
    assert (home.requests, table.counts["asked again"]) == (0, 1)
    silent.gate[1].set()


async def test_a_request_that_is_canceled_ends_on_the_replica(make_table):
    silent = Scripted("silent")
    silent.gate = (2, threading.Event())
    table = make_table(silent)
    async with client_of(table) as client:
        asking = asyncio.ensure_future(ask(client))
        while not silent.open:
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        while silent.open:
            await asyncio.sleep(0.01)
    assert table.replicas[0].requests == 0


async def test_an_error_of_a_replica_is_passed_on(make_table):
    failing = Scripted()
    failing.error = RuntimeError("broken")
    table = make_table(failing, Scripted("other"))
    async with client_of(table) as client:
        assert (await ask(client)).status_code == 500
    assert (table.replicas[0].state, table.counts["asked again"]) == ("serving", 0)


HALF_AN_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"


@pytest.mark.parametrize("start", [b"", HALF_AN_ANSWER])
async def test_a_broken_answer_is_asked_again_elsewhere(make_table, start):
    suspects = []
    table = make_table(Scripted("other"))
    table.on_suspect = suspects.append
    async with await broken_server(start) as server:
        put_first(table, server)
        async with client_of(table) as client:
            assert text_of(await ask(client)) == "other"
            assert text_of(await ask(client)) == "other"
    assert (table.counts["asked again"], [replica.number for replica in suspects]) == (1, [0])
    assert [replica.requests for replica in table.replicas.values()] == [0, 0]


async def test_a_broken_stream_raises(make_table):
    table = make_table(Scripted("other"))
    start = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    async with await broken_server(start + b"9\r\ndata: {}\n\r\n") as server:
        put_first(table, server)
        async with client_of(table) as client:
            chunks = []
            with pytest.raises((httpx.NetworkError, httpx.RemoteProtocolError)):
                async with client.stream(
                    "POST", "/v1/chat/completions", json=BODY | {"stream": True}, headers={SESSION_HEADER: "a"}
                ) as response:
                    chunks += [chunk async for chunk in response.aiter_raw()]
    assert table.counts["asked again"] == 0
    assert table.replicas[0].requests == 0


async def test_a_stream_that_breaks_before_it_begins_is_asked_again(make_table):
    table = make_table(Scripted("other"))
    async with await broken_server(b"") as server:
        put_first(table, server)
        async with client_of(table) as client:
            openai = AsyncOpenAI(base_url="http://replicas/v1", api_key="key", http_client=client, max_retries=0)
            stream = await openai.chat.completions.create(**BODY, stream=True)
            text = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(text) == "other"
    assert (table.counts["asked again"], table.replicas[1].requests) == (1, 0)


def test_several_event_loops_at_once(make_table):
    table = make_table(Scripted("0"), Scripted("1"), Scripted("2"))
    router, answers = RouterEndpoint(table), {}
    router.start()

    async def converse(loop, client, number):
        session = f"{loop}-{number}"
        answers[session] = {text_of(await ask(client, session)) for _ in range(5)}

    async def converse_all(loop, client):
        async with client:
            await asyncio.gather(*(converse(loop, client, number) for number in range(20)))

    def run(loop):
        if loop == 2:  # over the router's own loop
            headers = {"authorization": f"Bearer {router.api_key}"}
            client = httpx.AsyncClient(base_url=router.base_url.removesuffix("/v1"), headers=headers, timeout=60)
        else:
            client = client_of(table)
        asyncio.run(converse_all(loop, client))

    threads = [threading.Thread(target=run, args=[loop]) for loop in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    router.stop()
    assert len(answers) == 60
    assert {len(texts) for texts in answers.values()} == {1}  # each conversation has one replica
    assert [replica.requests for replica in table.replicas.values()] == [0, 0, 0]
    assert [len(replica.sessions) for replica in table.replicas.values()] == [20, 20, 20]
