"""Agents with clients of their own are captured: real clients, the real endpoint, and what is trained in the end."""

import asyncio
import copy
import gc
import gzip
import json
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import openai
import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st
from support.server_parts import END, Scripted, endpoint

import art_nb as art
from art_nb.compat.utils import strip_logprobs
from art_nb.core.jsonable import expand
from art_nb.core.types import TokenError
from art_nb.models import clients
from art_nb.policy import adapter_files
from art_nb.rewards.rubrics import conversation
from art_nb.rollouts import http_capture as interceptors
from art_nb.rollouts.trajectories import choices as choices_of
from art_nb.runs.store import RunStore
from art_nb.tokens.rows import group_rows, trajectory_rows

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("error::UserWarning")]
GO, MORE = {"role": "user", "content": "go"}, {"role": "user", "content": "and?"}
TOOLS = [{"type": "function", "function": {"name": "play", "parameters": {"type": "object"}}}]
SEEDED = {"model": "ttt@3", "seed": 5, "logprobs": True, "temperature": 0.7}


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch):
    """Raise the five seconds after which plain httpx gives up: a busy machine can take longer."""
    for what in ("connect", "read", "write", "pool"):
        monkeypatch.setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, what, 60)


@pytest.fixture(scope="module")
def served():
    """The endpoint; its replies depend on the seed alone."""
    it = endpoint()
    it.start()
    yield it
    it.stop()


@pytest.fixture
async def client(served):
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=served.api_key, max_retries=0) as client:
        yield client


# every client, whole and streamed


def text_of(lines):
    """What the events of a stream say."""
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


async def by_openai(served, body, transport=None):
    http = clients.httpx.AsyncClient(transport=transport) if transport else None
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=served.api_key, http_client=http) as client:
        reply = await client.chat.completions.create(**body)
        if not body.get("stream"):
            return reply.choices[0].message.content
        return "".join([chunk.choices[0].delta.content or "" async for chunk in reply])


async def in_process(served, body):
    return await by_openai(served, body, served.transport())


async def by_openai_sync(served, body):
    def ask():
        with openai.OpenAI(base_url=served.base_url, api_key=served.api_key) as client:
            reply = client.chat.completions.create(**body)
            if not body.get("stream"):
                return reply.choices[0].message.content
            return "".join(chunk.choices[0].delta.content or "" for chunk in reply)

    return await asyncio.to_thread(ask)


def address(served):
    return served.base_url + "/chat/completions", {"Authorization": f"Bearer {served.api_key}"}


async def by_httpx(served, body):
    url, headers = address(served)
    async with httpx.AsyncClient(headers=headers) as client:
        if not body.get("stream"):
            return (await client.post(url, json=body)).json()["choices"][0]["message"]["content"]
        async with client.stream("POST", url, json=body) as reply:
            return text_of([line async for line in reply.aiter_lines()])


async def by_httpx_sync(served, body):
    def ask():
        url, headers = address(served)
        if not body.get("stream"):
            return httpx.post(url, json=body, headers=headers).json()["choices"][0]["message"]["content"]
        with httpx.stream("POST", url, json=body, headers=headers) as reply:
            return text_of(reply.iter_lines())

    return await asyncio.to_thread(ask)


async def by_requests(served, body):
    def ask():
        url, headers = address(served)
        with requests.post(url, json=body, headers=headers, stream=body.get("stream", False)) as reply:
            if not body.get("stream"):
                return reply.json()["choices"][0]["message"]["content"]
            return text_of(line.decode() for line in reply.iter_lines())

    return await asyncio.to_thread(ask)


async def by_aiohttp(served, body):
    aiohttp = pytest.importorskip("aiohttp")
    url, headers = address(served)
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=body) as reply:
        if not body.get("stream"):
            return (await reply.json())["choices"][0]["message"]["content"]
        return text_of([line.decode() async for line in reply.content])


async def by_aiohttp_with_a_base(served, body):
    aiohttp = pytest.importorskip("aiohttp")
    session = aiohttp.ClientSession(base_url=served.base_url + "/", headers=address(served)[1])
    async with session, session.post("chat/completions", json=body) as reply:
        if not body.get("stream"):
            return (await reply.json())["choices"][0]["message"]["content"]
        return text_of([line.decode() async for line in reply.content])


async def by_openai_over_aiohttp(served, body):
    pytest.importorskip("aiohttp")
    async with openai.AsyncOpenAI(
        base_url=served.base_url, api_key=served.api_key, http_client=openai.DefaultAioHttpClient()
    ) as client:
        reply = await client.chat.completions.create(**body)
        if not body.get("stream"):
            return reply.choices[0].message.content
        return "".join([chunk.choices[0].delta.content or "" async for chunk in reply])


CLIENTS = [
    by_openai,
    in_process,
    by_openai_sync,
    by_httpx,
    by_httpx_sync,
    by_requests,
    by_aiohttp,
    by_aiohttp_with_a_base,
    by_openai_over_aiohttp,
]


async def by_hand(served, **options):
    """The same conversation of two turns, its choices appended as ART's notebooks do."""
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=served.api_key) as client:
        made = art.Trajectory(messages_and_choices=[GO])
        for message in (MORE, None):
            reply = await client.chat.completions.create(messages=made.messages(), **SEEDED | options)
            made.messages_and_choices += [reply.choices[0], *[message] * (message is not None)]
        return made


def same_rows(one, other):
    rows, others = trajectory_rows(one), trajectory_rows(other)
    assert len(rows) == len(others) > 0
    for row, its in zip(rows, others, strict=True):
        assert row.tokens.tolist() == its.tokens.tolist()
        assert row.sampled.tolist() == its.sampled.tolist()
        assert np.array_equal(row.logprobs, its.logprobs, equal_nan=True)
        assert (row.trajectory, row.truncated) == (its.trajectory, its.truncated)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", CLIENTS)
async def test_what_any_client_says_is_captured(served, ask, stream):
    messages = [GO]

    async def agent():
        for message in (MORE, None):
            text = await ask(served, {**SEEDED, "messages": messages, "stream": stream})
            messages.extend([{"role": "assistant", "content": text}, *[message] * (message is not None)])

    captured, made = await art.trajectory(agent()), await by_hand(served)
    assert len(captured.exchanges.chat_completions) == 2
    assert captured.additional_histories == []
    assert captured.messages() == made.messages() == messages
    assert [choice.model_dump(exclude={"logprobs"}) for choice in captured.messages_and_choices[1::2]] == [
        choice.model_dump(exclude={"logprobs"}) for choice in made.messages_and_choices[1::2]
    ]
    same_rows(captured, made)
    assert served.api_key not in captured.exchanges.model_dump_json()
    assert captured.metrics["duration"] > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_calls_of_tools_are_captured(stream):
    words = '<tool_call>{"name": "play"}</tool_call>'
    it = endpoint(Scripted(words))
    async with openai.AsyncOpenAI(
        base_url=it.base_url, api_key=it.api_key, http_client=clients.httpx.AsyncClient(transport=it.transport())
    ) as client:
        with art.Trajectory() as captured:
            reply = await client.chat.completions.create(model="ttt@3", messages=[GO], tools=TOOLS, stream=stream)
            if stream:
                async for _ in reply:
                    pass
    choice = captured.messages_and_choices[1]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls[0].function.name == "play"
    assert captured.tools == TOOLS
    assert choice.model_extra["token_ids"] == [*words.encode(), END]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("prompt", ["1 + 1 =", list(b"1 + 1 =")], ids=["text", "ids"])
async def test_completions_are_captured(client, prompt, stream):
    with art.Trajectory() as captured:
        reply = await client.completions.create(model="ttt@3", prompt=prompt, stream=stream)
        if stream:
            async for _ in reply:
                pass
        said = b"Hello, world" if isinstance(prompt, str) else [*b"Hello, world", END]
        longer = prompt + said.decode() if isinstance(prompt, str) else prompt + said
        await client.completions.create(model="ttt@3", prompt=longer, max_tokens=3)
    if isinstance(prompt, str):  # the end token is not in the text that came back: two rows
        assert captured.completions_string_history().prompt == "1 + 1 =Hello, worldHel"
        assert captured.completions_string_history().sampled_spans == [(7, 19), (19, 22)]
        with pytest.raises(ValueError, match="no token IDs that continue"):
            captured.completions_token_history()
    else:
        assert captured.completions_token_history().prompt == [*longer, *b"Hel"]
        assert captured.completions_token_history().sampled_spans == [(7, 20), (20, 23)]
    rows = trajectory_rows(captured)
    assert sum(row.sampled.sum() for row in rows) == 13 + 3
    assert np.isfinite(rows[0].logprobs[rows[0].sampled]).all()


# the user's request comes first


@pytest.mark.parametrize("ask", CLIENTS)
async def test_a_stream_is_not_held_back(ask):
    """The sampler waits until the client has seen the first words."""
    it = endpoint()
    it.service.sampler.gate = (5, seen := threading.Event())
    it.start()
    told = []

    async def agent():
        if ask in (by_openai, in_process, by_openai_over_aiohttp):
            http = {
                by_openai: lambda: None,
                in_process: lambda: clients.httpx.AsyncClient(transport=it.transport()),
                by_openai_over_aiohttp: openai.DefaultAioHttpClient,
            }[ask]
            if ask is by_openai_over_aiohttp:
                pytest.importorskip("aiohttp")
            async with openai.AsyncOpenAI(base_url=it.base_url, api_key=it.api_key, http_client=http()) as client:
                async for chunk in await client.chat.completions.create(model="ttt@3", messages=[GO], stream=True):
                    told.append(chunk.choices[0].delta.content)
                    seen.set()
        else:
            await asyncio.to_thread(read_slowly, ask, it, told, seen)

    try:
        captured = await art.trajectory(agent())
    finally:
        seen.set()
        await asyncio.to_thread(it.stop)
    assert captured.messages()[-1]["content"] == "".join(text or "" for text in told) == "Hello, world"


def read_slowly(ask, it, told, seen):
    url, headers = address(it)
    body = {"model": "ttt@3", "messages": [GO], "stream": True}

    def take(line):
        told.append(text_of([line]))
        seen.set()

    if ask is by_requests:
        with requests.post(url, json=body, headers=headers, stream=True) as reply:
            for line in reply.iter_lines(chunk_size=1):
                take(line.decode())
    elif ask is by_aiohttp:
        asyncio.run(read_by_aiohttp(url, headers, body, take))
    else:
        with httpx.stream("POST", url, json=body, headers=headers) as reply:
            for line in reply.iter_lines():
                take(line)


async def read_by_aiohttp(url, headers, body, take):
    aiohttp = pytest.importorskip("aiohttp")
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=body) as reply:
        async for line in reply.content:
            take(line.decode().strip())


class Fixed(BaseHTTPRequestHandler):
    """Says what the test wrote, in these pieces."""

    pieces, status, kind, encoding = [], 200, "text/event-stream", "identity"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.send_header("Content-Type", self.kind)
        self.send_header("Content-Encoding", self.encoding)
        self.end_headers()
        for piece in self.pieces:
            self.wfile.write(piece)
            self.wfile.flush()

    def log_message(self, *args):
        pass


@pytest.fixture
def fixed():
    """A maker of servers that say the same to everybody."""
    servers = []

    def serve(*pieces, **how):
        handler = type("Handler", (Fixed,), {"pieces": pieces, **how})
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/v1"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def chunk(delta, **choice):
    one = {"index": 0, "delta": delta, "finish_reason": None, **choice}
    head = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    return b"data: %b\n\n" % json.dumps({**head, "choices": [one]}, ensure_ascii=False).encode()


@pytest.mark.parametrize("cut", [1, 7, 10_000])
def test_bytes_pass_unchanged_however_they_are_cut(fixed, cut):
    stream = (
        chunk({"role": "assistant", "content": "data: [DONE]\n\nsüß"})
        + b": a comment\n\n"
        + chunk({"content": " 🙂"})
        + chunk({}, finish_reason="stop", token_ids=[1])
        + b"data: [DONE]\n\n"
    )
    url = fixed(*(stream[i : i + cut] for i in range(0, len(stream), cut))) + "/chat/completions"
    body = {"model": "m", "messages": [GO], "stream": True}
    with art.Trajectory() as captured:
        with httpx.stream("POST", url, json=body) as reply:
            assert b"".join(reply.iter_raw()) == stream
        with requests.post(url, json=body, stream=True) as reply:
            assert b"".join(reply.iter_content(3)) == stream
        assert httpx.post(url, json=body).content == stream
    texts = [one.messages()[-1]["content"] for one in captured.histories()]
    assert texts == ["data: [DONE]\n\nsüß 🙂"] * 3


def test_compressed_replies_are_read(fixed):
    whole = chunk({"role": "assistant", "content": "b2"}) + chunk({}, finish_reason="stop") + b"data: [DONE]\n\n"
    packed = gzip.compress(whole)
    url = fixed(packed[:20], packed[20:], encoding="gzip") + "/chat/completions"
    body = {"model": "m", "messages": [GO], "stream": True}
    with art.Trajectory() as captured:
        with httpx.stream("POST", url, json=body) as reply:
            assert b"".join(reply.iter_bytes()) == whole
        with requests.post(url, json=body, stream=True) as reply:
            assert b"".join(reply.iter_content(5)) == whole
    assert [one.messages()[1]["content"] for one in captured.histories()] == ["b2"] * 2


def told_call(index, cell=None, more=None):
    """A piece of a call: its beginning with an id, or some more of its arguments."""
    begun = {} if cell is None else {"id": cell, "type": "function"}
    function = {"arguments": more} if cell is None else {"name": "play", "arguments": f'{{"to": "{cell}'}
    return {"tool_calls": [{"function": function, **begun} | ({} if index is None else {"index": index})]}


@pytest.mark.parametrize("places", [(0, 1), (1, 2), (0, 2), (2, 0)], ids=str)
def test_calls_told_in_pieces_are_joined_whatever_number_they_begin_with(fixed, places):
    first, second = places
    pieces = [
        piece
        for place, cell in ((first, "A1"), (second, "B2"))
        for piece in (told_call(place, cell), told_call(place, more='"}'))
    ]
    url = fixed(*map(chunk, pieces), chunk({}, finish_reason="tool_calls")) + "/chat/completions"
    with art.Trajectory() as captured:
        assert httpx.post(url, json={"messages": [GO], "stream": True}).is_success
    calls = captured.messages()[1]["tool_calls"]
    assert [(call["id"], json.loads(call["function"]["arguments"])) for call in calls] == [
        (cell, {"to": cell}) for cell in ("A1", "B2")
    ]
    assert all(call.keys() == {"id", "type", "function"} for call in calls)


def test_a_call_without_an_index_is_a_separate_call(fixed):
    pieces = [told_call(None, cell) for cell in ("A1", "B2")]
    url = fixed(*map(chunk, pieces), chunk({}, finish_reason="tool_calls")) + "/chat/completions"
    with art.Trajectory() as captured:
        assert httpx.post(url, json={"messages": [GO], "stream": True}).is_success
    assert [call["id"] for call in captured.messages()[1]["tool_calls"]] == ["A1", "B2"]


@pytest.mark.parametrize("stream", [False, True])
def test_replies_that_were_there_already_are_captured(stream):
    """A transport of somebody's tests gives replies that were never sent."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "b2"}}
    reply = httpx.Response(200, json={"choices": [choice]})  # and little else, as some servers say
    with httpx.Client(transport=httpx.MockTransport(lambda request: reply)) as client, art.Trajectory() as captured:
        request = client.build_request("POST", "http://host/v1/chat/completions", json={"messages": [GO]})
        assert client.send(request, stream=stream).read()
    assert captured.messages()[1]["content"] == "b2"


def test_a_stream_that_breaks_off_is_no_reply(fixed):
    whole = chunk({"role": "assistant", "content": "b2"}) + chunk({}, finish_reason="stop")
    with art.Trajectory() as captured:
        for end in (whole[:-2], whole[:-30], whole[:20]):
            with httpx.stream("POST", fixed(end) + "/chat/completions", json={"messages": [GO]}) as reply:
                assert b"".join(reply.iter_raw()) == end
        assert not captured.exchanges
        assert httpx.post(fixed(whole) + "/chat/completions", json={"messages": [GO]}).content == whole
    assert captured.messages()[1]["content"] == "b2"


def test_what_cannot_be_read_is_said_once_and_raises_nothing(fixed, monkeypatch):
    monkeypatch.setattr(interceptors, "_warned", set())
    url, body = fixed(b'{"choices": [', kind="application/json") + "/chat/completions", {"messages": [GO]}
    captured = art.Trajectory()

    def ask():
        with captured:
            return [httpx.post(url, json=body).text for _ in range(3)]

    with pytest.warns(UserWarning, match="not captured.*JSONDecodeError") as said:
        assert ask() == ['{"choices": ['] * 3
    assert len(said) == 1
    assert not captured.exchanges


@pytest.mark.parametrize("wrong", [[{"content": "no role"}], ["text"], "text", [None]])
def test_what_is_no_conversation_is_left_out(fixed, wrong, monkeypatch):
    monkeypatch.setattr(interceptors, "_warned", set())
    url = fixed(chunk({"content": "b2"}), chunk({}, finish_reason="stop")) + "/chat/completions"
    with art.Trajectory() as captured:
        assert httpx.post(url, json={"messages": [GO]}).is_success
        with pytest.warns(UserWarning, match="not captured"):
            assert httpx.post(url, json={"messages": wrong}).is_success
        assert httpx.post(url, json={"messages": [MORE]}).is_success
    captured.reward = 1
    assert [one.messages()[0]["content"] for one in captured.histories()] == ["go", "and?"]
    assert len(art.Trajectory(exchanges=captured.exchanges).histories()) == 2


def test_bodies_are_bounded(fixed, monkeypatch):
    monkeypatch.setattr(interceptors, "MAX_CAPTURED_BYTES", 200)
    monkeypatch.setattr(interceptors, "_warned", set())
    url = fixed(*[chunk({"content": "x"})] * 9, b"data: [DONE]\n\n") + "/chat/completions"
    with art.Trajectory() as captured:
        with pytest.warns(UserWarning, match="A response of more than"):
            assert httpx.post(url, json={"messages": [GO]}).is_success
        with pytest.warns(UserWarning, match="A request to .* was not captured"):
            assert httpx.post(url, json={"messages": [GO] * 20}).is_success
        assert httpx.post(url, content=iter([b"{}"]), headers={"Content-Length": "2"}).is_success
    assert not captured.exchanges


@pytest.mark.parametrize("path", ["/v1/channels/7/messages", "/v1/embeddings", "/v1/responses"])
def test_other_services_are_none_of_our_business(fixed, path):
    url = fixed(b'{"id": 1, "text": "hi", "choices": []}', kind="application/json").removesuffix("/v1") + path
    with art.Trajectory() as captured:
        assert httpx.post(url, json={"text": "hi"}).json()["id"] == 1
        assert httpx.post(url, json=["no", "object"]).json()["id"] == 1
    assert not captured.exchanges


def test_errors_are_not_replies(fixed):
    url = fixed(b'{"error": "busy"}', status=503, kind="application/json") + "/chat/completions"
    with art.Trajectory() as captured:
        assert httpx.post(url, json={"messages": [GO]}).status_code == 503
    assert not captured.exchanges


async def test_a_retried_request_is_captured_once(client):
    it = endpoint()
    it.service.sampler.error, it.service.sampler.error_call = RuntimeError("boom"), 1
    it.start()
    try:
        async with openai.AsyncOpenAI(base_url=it.base_url, api_key=it.api_key, max_retries=2) as client:
            with art.Trajectory() as captured:
                await client.chat.completions.create(model="ttt@3", messages=[GO])
    finally:
        await asyncio.to_thread(it.stop)
    assert len(it.service.sampler.calls) == 2
    assert len(captured.exchanges.chat_completions) == 1


@pytest.mark.parametrize("how", ["left", "cancelled", "failed"])
@pytest.mark.parametrize("inside", [True, False], ids=["in process", "socket"])
async def test_a_stream_given_up_leaves_nothing(how, inside):
    it = endpoint()
    it.service.sampler.gate = (5, never := threading.Event())
    it.start()
    http = clients.httpx.AsyncClient(transport=it.transport()) if inside else None
    captured = art.Trajectory()

    async def agent(client):
        with captured:
            stream = await client.chat.completions.create(model="ttt@3", messages=[GO], stream=True)
            async with stream:
                async for _ in stream:
                    if how == "left":
                        return
                    if how == "failed":
                        raise KeyError("the agent's own")

    try:
        async with openai.AsyncOpenAI(base_url=it.base_url, api_key=it.api_key, http_client=http) as client:
            task = asyncio.create_task(agent(client))
            while how == "cancelled" and it.service.sampler.open == 0:
                await asyncio.sleep(0.005)
            if how == "cancelled":
                await asyncio.sleep(0.05)
                task.cancel()
            ended = (await asyncio.gather(task, return_exceptions=True))[0]
            while it.service.sampler.open:  # the endpoint has noticed
                await asyncio.sleep(0.005)
            never.set()
            with captured:
                await client.chat.completions.create(model="ttt@3", messages=[GO])
    finally:
        never.set()
        await asyncio.to_thread(it.stop)
    assert type(ended) is {"left": type(None), "cancelled": asyncio.CancelledError, "failed": KeyError}[how]
    assert len(captured.exchanges.chat_completions) == 1
    assert art.current_trajectory() is None


# scopes


async def test_a_request_belongs_to_the_innermost_scope(client):
    async def say(text):
        await client.chat.completions.create(model="ttt@3", messages=[{"role": "user", "content": text}])

    await say("nobody's")
    with art.Trajectory() as outer:
        await say("outer")
        with art.Trajectory() as inner:
            assert art.current_trajectory() is inner
            await say("inner")
            with art.no_capture():
                assert art.current_trajectory() is None
                await say("hidden")
                deepest = await art.trajectory(say("deepest"))
        await say("outer again")
    asked = [
        [one.request["messages"][0]["content"] for one in t.exchanges.chat_completions] for t in (outer, inner, deepest)
    ]
    assert asked == [["outer", "outer again"], ["inner"], ["deepest"]]
    assert [history.messages()[0]["content"] for history in outer.histories()] == asked[0]


def test_scopes_are_closed_in_order():
    outer, inner = art.Trajectory(), art.Trajectory()
    with outer, inner:
        with pytest.raises(RuntimeError, match="out of order"):
            outer.__exit__(None, None, None)
    assert art.current_trajectory() is None
    with pytest.raises(RuntimeError, match="Requests are not captured here"):
        art.current_trajectory(require=True)


@pytest.mark.parametrize("inside", [True, False], ids=["in process", "socket"])
async def test_a_hundred_rollouts_do_not_mix(served, inside):
    http = clients.httpx.AsyncClient(transport=served.transport()) if inside else None
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=served.api_key, http_client=http) as client:

        async def agent(number):
            messages = [{"role": "user", "content": str(number)}]
            for turn in range(3):
                stream = (number + turn) % 2 == 0
                reply = await client.chat.completions.create(
                    model="ttt@3", messages=messages, seed=number, stream=stream, max_tokens=2 + turn
                )
                text = (
                    "".join([c.choices[0].delta.content or "" async for c in reply])
                    if stream
                    else (reply.choices[0].message.content)
                )
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{number}.{turn}"}]
            art.current_trajectory().reward = number

        group = await art.trajectory_group(art.trajectory(agent(number)) for number in range(100))
    assert [t.reward for t in group] == list(range(100))
    for number, one in enumerate(group):
        assert len(one.exchanges.chat_completions) == 3
        said = [message["content"] for message in one.messages() if message["role"] == "user"]
        assert said == [str(number), f"{number}.0", f"{number}.1"]
        assert one.additional_histories == []


async def test_threads_inherit_their_scope(served):
    async def agent():
        await by_openai_sync(served, {**SEEDED, "messages": [GO]})
        thread = threading.Thread(target=lambda: asyncio.run(by_openai_sync(served, {**SEEDED, "messages": [GO]})))
        thread.start()
        await asyncio.to_thread(thread.join)

    assert len((await art.trajectory(agent())).exchanges.chat_completions) == 1


def test_many_threads_may_fill_one_trajectory(served):
    import contextvars

    url, headers = address(served)
    with art.Trajectory() as captured, ThreadPoolExecutor(16) as pool:
        ask = lambda i: httpx.post(
            url, headers=headers, json={"model": "ttt@3", "messages": [{"role": "user", "content": str(i)}]}
        )
        contexts = [contextvars.copy_context() for _ in range(64)]
        jobs = [pool.submit(context.run, ask, i) for i, context in enumerate(contexts)]
        assert all(job.result().is_success for job in jobs)
    assert sorted(int(h.messages()[0]["content"]) for h in captured.histories()) == list(range(64))
    assert sum(row.sampled.sum() for row in trajectory_rows(captured)) == 64 * 13


@pytest.mark.filterwarnings("ignore:coroutine")
async def test_only_a_coroutine_that_has_not_begun(client):
    async def agent():
        return None

    task = asyncio.ensure_future(agent())
    for wrong in (task, asyncio.get_running_loop().create_future(), agent, None):
        with pytest.raises(TypeError, match="a coroutine that has not started"):
            await art.trajectory(wrong)
    await task


# groups


async def rollout(reward, started=None, turns=0):
    if started is not None:
        started.append(reward)
    for _ in range(turns):
        await asyncio.sleep(0)
    if reward is None:
        raise ValueError("boom")
    art.current_trajectory(require=True).reward = reward


async def test_groups_keep_the_order_of_the_input():
    done, error = art.Trajectory(reward=7), KeyError("earlier")
    group = await art.trajectory_group(
        [art.trajectory(rollout(0, turns=5)), done, art.trajectory(rollout(1)), error, art.trajectory(rollout(None))],
        metadata={"scenario_id": 3},
        metrics={"m": 1},
        logs=["said"],
        exceptions=[OSError("before")],
        return_exceptions=True,
    )
    assert [t.reward for t in group] == [0, 7, 1]
    assert group.trajectories[1] is done
    assert sorted(e.type for e in group.exceptions) == ["KeyError", "OSError", "ValueError"]
    assert (group.metadata, group.metrics, group.logs) == ({"scenario_id": 3}, {"m": 1}, ["said"])


async def test_a_failure_stops_the_siblings():
    ended = []

    async def slow():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(ValueError, match="boom"):
        await art.trajectory_group([art.trajectory(slow()), art.trajectory(rollout(None, turns=3))])
    assert ended == ["cancelled"]


async def test_a_group_is_nobodys_request(client):
    async def plain():
        await client.chat.completions.create(model="ttt@3", messages=[GO])
        return art.Trajectory(reward=1)

    with art.Trajectory() as around:
        group = await art.trajectory_group([plain()])
    assert not around.exchanges
    assert not group.trajectories[0].exchanges


async def test_captured_rollouts_are_gathered():
    pending = [art.TrajectoryGroup(art.trajectory(rollout(i)) for i in (0, 1, None)) for _ in range(2)]
    groups = await art.gather_trajectory_groups(
        [*pending, art.trajectory_group([art.trajectory(rollout(2))])], pbar_desc=None, max_exceptions=2
    )
    assert [sorted(t.reward for t in group) for group in groups] == [[0, 1], [0, 1], [2]]
    assert [len(group.exceptions) for group in groups] == [1, 1, 0]


async def test_a_trajectory_is_handed_out_from_within():
    async def agent(*rewards):
        for reward in rewards:
            art.yield_trajectory(art.Trajectory(reward=reward))
            await asyncio.sleep(0)
        return "an answer"

    found = await asyncio.gather(*(art.capture_yielded_trajectory(agent(0, i)) for i in range(5)))
    assert [t.reward for t in found] == [0, 1, 2, 3, 4]
    art.yield_trajectory(art.Trajectory())  # nobody waits for it
    with pytest.raises(RuntimeError, match="did not yield a trajectory"):
        await art.capture_yielded_trajectory(agent())


# what a captured trajectory is


async def captured_game(client):
    """Two turns, a question beside them, and three choices."""
    with art.Trajectory() as t:
        first = await client.chat.completions.create(messages=[GO], **SEEDED)
        await client.chat.completions.create(messages=[{"role": "user", "content": "beside"}], **SEEDED)
        said = first.choices[0].message.model_dump()
        await client.chat.completions.create(messages=[GO, said, MORE], n=3, **SEEDED)
    return t


async def test_conversations_that_extend_another_merge(client):
    t = await captured_game(client)
    contents = [[message["content"] for message in history.messages()] for history in t.histories()]
    hello = "Hello, world"
    assert contents == [["go", hello, "and?", hello], ["beside", hello], *[["go", hello, "and?", hello]] * 2]
    assert t.histories() == t.chat_completions_histories() == t.histories(model="ttt*")
    assert t.histories(model="other") == []
    with pytest.raises(ValueError, match="There are 4 histories"):
        t.history()
    assert sum(row.sampled.sum() for row in trajectory_rows(t)) == 5 * 13  # each is a sample of its own


async def test_a_copy_made_during_capture_does_not_change(client):
    with art.Trajectory() as t:
        first = await client.chat.completions.create(messages=[GO], **SEEDED)
        early = [t.model_copy(), t.model_copy(deep=True)]
        said = first.choices[0].message.model_dump()
        await client.chat.completions.create(messages=[GO, said, MORE], **SEEDED)
    for copied in early:
        copied.reward = 1
        assert len(copied.messages()) == 2
    assert len(t.messages()) == 4


async def test_a_conversation_has_one_source(client):
    t = await captured_game(client)
    shown = t.messages()
    for wrong in ({"messages_and_choices": [GO]}, {"additional_histories": [art.History(messages_and_choices=[GO])]}):
        with pytest.raises(ValueError, match="not both"):
            art.Trajectory(exchanges=t.exchanges, **wrong)
        with pytest.raises(ValueError, match="not both"):
            setattr(t, *next(iter(wrong.items())))
        assert t.messages() == shown
    t.messages_and_choices.append(GO)
    with pytest.raises(ValueError, match="not both"):
        t.reward = 1
    t.reward = 2
    assert (t.messages(), t.reward) == (shown, 2)
    with pytest.raises(ValueError, match="not both"), art.Trajectory(messages_and_choices=[GO]):
        await client.chat.completions.create(messages=[GO], **SEEDED)
    legacy = art.Trajectory(messages_and_choices=[GO])
    with pytest.raises(ValueError, match="not both"):
        legacy.exchanges = t.exchanges
    legacy.reward = 3
    assert legacy.histories()[0].messages() == [GO]


class Board(art.Trajectory):
    board: str
    turns: list[int] = []


async def test_copies_and_dumps_keep_the_conversations(client, tmp_path):
    t = await captured_game(client)
    board = Board(board="x..", exchanges=t.exchanges, reward=0.5)
    group = art.TrajectoryGroup([t, board])
    store = RunStore(tmp_path)
    store.write_groups("train", 1, [group])
    stored = store.read_groups("train", 1)[0]
    for other in (
        copy.deepcopy(t),
        copy.copy(t),
        pickle.loads(pickle.dumps(t)),
        t.model_copy(deep=True),
        t.model_copy(update={"messages_and_choices": [*t.messages_and_choices]}),
        art.Trajectory.model_validate(t.model_dump()),
        art.Trajectory.model_validate_json(t.model_dump_json()),
        art.Trajectory.model_validate(expand(t.compact_dump())),
        board,
        board.model_copy(deep=True),
        Board.model_validate(board.model_dump()),
        art.Trajectory(exchanges=t.exchanges),
    ):
        other.reward = 0.25
        assert other.for_logging()["messages"] == t.for_logging()["messages"]
        assert other.for_logging()["additional_histories"] == t.for_logging()["additional_histories"]
        assert conversation(other) == conversation(t)
        same_rows(other, t)
    assert board.board == "x.."
    assert [one.messages() for one in stored] == [t.messages()] * 2
    for one in stored:
        assert [row.tokens.tolist() for row in trajectory_rows(one)] == [r.tokens.tolist() for r in trajectory_rows(t)]
    assert len(json.dumps(group.compact_dump())) < len(json.dumps(group.model_dump(mode="json")))


async def test_a_copy_may_keep_some_models_only(client):
    with art.Trajectory() as t:
        for name in ("ttt@3", "base", "ttt@4"):
            await client.chat.completions.create(model=name, messages=[{"role": "user", "content": name}])
    assert len(t.model_copy(include_models="ttt@*").histories()) == 2
    assert len(t.model_copy(include_models=["base", "ttt@4"], exclude_models=["ttt*"]).histories()) == 1
    nothing = t.model_copy(exclude_models="*", deep=True)
    assert (nothing.messages(), nothing.histories()) == ([], [])
    assert len(t.histories()) == 3
    with pytest.raises(TokenError, match=r"2 models \(base, ttt\)"):
        trajectory_rows(t)
    assert len(trajectory_rows(t.model_copy(exclude_models="base"))) == 2


async def test_a_copy_with_other_messages_is_of_those(client):
    t = await captured_game(client)
    other = t.model_copy(update={"messages_and_choices": [GO, MORE], "additional_histories": []})
    for _ in range(2):
        assert [one.messages() for one in other.histories()] == [[GO, MORE]]
        assert (other.conversations(), trajectory_rows(other), bool(other.exchanges)) == ([], [], False)
        other.reward = 1
    assert len(t.histories()) == len(t.conversations()) == 4
    assert len(t.model_copy(include_models="ttt@*", deep=True).histories()) == 4


async def test_a_copy_without_logprobs_has_none_and_can_be_changed(client):
    t = await captured_game(client)
    with art.Trajectory() as completed:
        await client.completions.create(model="ttt@3", prompt="1 + 1 =", logprobs=1)
    for whole in (t, completed):
        bare = strip_logprobs([art.TrajectoryGroup([whole])])[0].trajectories[0]
        for _ in range(2):
            assert [one.messages() for one in bare.histories()] == [one.messages() for one in whole.histories()]
            assert all(
                choice.logprobs is None
                for one in bare.histories()
                for choice in one.messages_and_choices
                if not isinstance(choice, dict)
            )
            assert [row.tokens.tolist() for row in trajectory_rows(bare)] == [
                row.tokens.tolist() for row in trajectory_rows(whole)
            ]
            bare.reward = 1
    assert all(choice.logprobs for choice in choices_of(t))
    assert strip_logprobs(t).chat_completions_histories() == strip_logprobs(t.histories())


async def test_arts_form_of_exchanges_is_read(client):
    t = await captured_game(client)
    data = json.loads(t.exchanges.model_dump_json())
    for one in data["chat_completions"]:
        one["model"] = "ttt@3"  # computed there
    assert art.Trajectory.model_validate({"exchanges": data}).messages() == t.messages()


ANTHROPIC = [
    {
        "type": "message_start",
        "message": {
            "id": "1",
            "type": "message",
            "role": "assistant",
            "model": "claude",
            "content": [],
            "stop_reason": None,
            "usage": {"input_tokens": 1},
        },
    },
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "ping"},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Let me "}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "see."}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "content_block_start",
        "index": 1,
        "content_block": {"type": "tool_use", "id": "t", "name": "play", "input": {}},
    },
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"to": '}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '"b2"}'}},
    {"type": "content_block_stop", "index": 1},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": {"output_tokens": 9},
    },
    {"type": "message_stop"},
]


def test_anthropics_stream_becomes_messages(fixed):
    stream = b"".join(b"event: %b\ndata: %b\n\n" % (e["type"].encode(), json.dumps(e).encode()) for e in ANTHROPIC)
    url = fixed(stream) + "/messages"
    body = {
        "model": "claude",
        "system": "Brief.",
        "max_tokens": 9,
        "stream": True,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "go"}]}],
        "tools": [{"name": "play", "description": "d", "input_schema": {"type": "object"}}],
    }
    again = [
        *body["messages"],
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t", "name": "play", "input": {"to": "b2"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "free"}]},
    ]
    with art.Trajectory() as t:
        assert httpx.post(url, json=body).content == stream
        httpx.post(url, json={**body, "messages": again})
    assert t.exchanges.messages[0].response["usage"] == {"input_tokens": 1, "output_tokens": 9}
    history = t.anthropic_messages_history()
    assert [message["role"] for message in history.messages()] == ["system", "user", "assistant", "tool", "assistant"]
    (call,) = history.messages()[2]["tool_calls"]
    assert (call["id"], call["function"]) == ("t", {"name": "play", "arguments": '{"to": "b2"}'})
    assert history.tools[0]["function"]["parameters"] == {"type": "object"}
    assert trajectory_rows(t) == []


BLOCKS = [  # as they begin, what is added to them, and as they are in a reply that is no stream
    (
        {"type": "thinking", "thinking": "", "signature": ""},
        [
            {"type": "thinking_delta", "thinking": "to b"},
            {"type": "thinking_delta", "thinking": "2"},
            {"type": "signature_delta", "signature": "x7"},
        ],
        {"type": "thinking", "thinking": "to b2", "signature": "x7"},
    ),
    (
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        [{"type": "input_json_delta", "partial_json": part} for part in ('{"query": ', '"b2"}')],
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "b2"}},
    ),
    (
        {"type": "text", "text": "", "citations": []},
        [
            {"type": "citations_delta", "citation": {"url": "one"}},
            {"type": "text_delta", "text": "It is "},
            {"type": "citations_delta", "citation": {"url": "two"}},
            {"type": "text_delta", "text": "free."},
        ],
        {"type": "text", "text": "It is free.", "citations": [{"url": "one"}, {"url": "two"}]},
    ),
    (
        {"type": "tool_use", "id": "t", "name": "pass", "input": {}},
        [{"type": "input_json_delta", "partial_json": ""}],
        {"type": "tool_use", "id": "t", "name": "pass", "input": {}},
    ),
]


def test_anthropics_blocks_are_those_of_a_whole_reply(fixed):
    events = ANTHROPIC[:1]
    for index, (begun, deltas, _) in enumerate(BLOCKS):
        events = [
            *events,
            {"type": "content_block_start", "index": index, "content_block": begun},
            *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
            {"type": "content_block_stop", "index": index},
        ]
    stream = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in [*events, *ANTHROPIC[-2:]])
    with art.Trajectory() as t:
        httpx.post(fixed(stream) + "/messages", json={"model": "claude", "messages": [GO], "stream": True})
    (exchange,) = t.exchanges.messages
    assert exchange.response["content"] == [whole for _, _, whole in BLOCKS]
    assert [call["function"]["name"] for call in t.messages()[1]["tool_calls"]] == ["pass"]


def test_openais_responses_become_messages(fixed):
    reply = {
        "id": "r",
        "object": "response",
        "status": "completed",
        "output": [
            {"type": "reasoning", "id": "x", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b2"}]},
        ],
    }
    stream = b"".join(
        b"event: x\ndata: %b\n\n" % json.dumps(e).encode()
        for e in (
            {"type": "response.created", "response": {**reply, "status": "in_progress", "output": []}},
            {"type": "response.output_text.delta", "delta": "b2"},
            {"type": "response.completed", "response": reply},
        )
    )
    body = {"model": "gpt", "input": "go", "instructions": "Brief."}
    longer = [{"role": "user", "content": "go"}, *reply["output"], {"role": "user", "content": "and?"}]
    with art.Trajectory() as t:
        httpx.post(fixed(stream) + "/responses", json={**body, "stream": True})
        httpx.post(
            fixed(json.dumps(reply).encode(), kind="application/json") + "/responses", json={**body, "input": longer}
        )
    assert [message["content"] for message in t.responses_history().messages()] == ["Brief.", "go", "b2", "and?", "b2"]


# installing

ALONE = """
import sys, threading
import art_nb as art
import httpx
before = httpx.Client.send
t = art.Trajectory()
assert httpx.Client.send is before and "requests" not in sys.modules, "touched too early"
with t: pass
after = httpx.Client.send
assert after is not before, "not tapped"
import requests
tapped = requests.Session.send
assert "art_nb" in tapped.__code__.co_filename, tapped.__code__.co_filename
def scope():
    with art.Trajectory(): pass
threads = [threading.Thread(target=scope) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert httpx.Client.send is after and requests.Session.send is tapped, "tapped twice"
assert "torch" not in sys.modules
print("fine")
"""


def test_libraries_are_tapped_when_a_scope_opens_or_they_are_imported():
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", ALONE], capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr


async def test_nothing_is_kept_alive(client):
    import weakref

    with art.Trajectory() as t:
        stream = await client.chat.completions.create(model="ttt@3", messages=[GO], stream=True)
        async for _ in stream:
            pass
    gone = weakref.ref(t)
    del t
    gc.collect()
    assert gone() is None
    await stream.close()


# and it trains


@asynccontextmanager
async def registered(tiny_model_dir, path, *names):
    models = [art.TrainableModel(name=name, project="tests", base_model=str(tiny_model_dir)) for name in names]
    async with art.LocalBackend(path=path, verbose=False) as backend:
        for model in models:
            await model.register(backend)
        yield backend, models


async def test_a_captured_group_trains_like_an_explicit_group(tiny_model_dir, tmp_path):
    async with registered(tiny_model_dir, tmp_path, "captured", "handmade") as (backend, (model, other)):
        made = []

        async def agent(number):
            messages, choices = [{"role": "user", "content": "free: A1 B1"}], []
            for turn in range(2):
                options = {"model": model.get_inference_name(), "messages": messages, "seed": number, "max_tokens": 6}
                if number % 2:
                    stream = await model.openai_client().chat.completions.create(stream=True, **options)
                    text = "".join([c.choices[0].delta.content or "" async for c in stream])
                    choices.append(art.current_trajectory().messages_and_choices[-1])
                else:
                    reply = (await model.openai_client().chat.completions.create(**options)).choices[0]
                    choices.append(reply)
                    text = reply.message.content
                messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": f"{turn}?"}]
            art.current_trajectory().reward = number % 3
            entries = [messages[0], choices[0], messages[2], choices[1]]
            made.append(art.Trajectory(messages_and_choices=entries, reward=number % 3))

        (group,) = await art.gather_trajectory_groups(
            [art.trajectory_group(art.trajectory(agent(number)) for number in range(6))], pbar_desc=None
        )
        made = art.TrajectoryGroup([next(m for m in made if m.messages() == t.messages()) for t in group])
        assert len(group_rows(group)) == 6
        for row, its in zip(group_rows(group), group_rows(made), strict=True):
            assert row.tokens.tolist() == its.tokens.tolist()
            assert np.array_equal(row.logprobs, its.logprobs, equal_nan=True)
        assert all(t.metrics["completion_tokens"] > 0 for t in group)
        for one, its in ((model, group), (other, made)):
            result = await backend.train(one, [its], learning_rate=1e-2)
            await one.log([its], metrics=result.metrics, step=result.step, split="train")
        adapters = [adapter_files.read_training_json(one.store.checkpoint_dir(1))["adapter"] for one in (model, other)]
        first = adapter_files.read_training_json(model.store.checkpoint_dir(0))["adapter"]
        assert adapters[0] == adapters[1] != first
        stored = model.store.read_groups("train", 1)[0]
        assert [t.messages() for t in stored] == [t.messages() for t in group]


async def test_the_judge_is_no_part_of_what_it_judges(client, served):
    judge, before = f"base@{served.base_url}", len(served.service.sampler.calls)
    with art.Trajectory() as t:
        await client.chat.completions.create(model="ttt@3", messages=[GO])
        group = art.TrajectoryGroup([copy.deepcopy(t), art.Trajectory(messages_and_choices=[GO, MORE])])
        with pytest.warns(UserWarning, match="could not be judged"):  # it says hello, and no score
            await art.ruler_score_group(group, judge, {"api_key": served.api_key}, swallow_exceptions=True, cache=None)
    assert len(served.service.sampler.calls) > before + 1
    assert len(t.exchanges.chat_completions) == 1


# any agent

plans = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(1, 3)), min_size=1, max_size=8)


@settings(max_examples=60, derandomize=True)
@given(plan=plans)
def test_every_reply_is_trained_once(plan):
    """Each request goes on with an earlier conversation or forks it; each reply is another one."""
    t, ends, expected = art.Trajectory(), [[]], 0
    for number, (place, forks, n) in enumerate(plan):
        before = ends[place % len(ends)]
        messages = [*(before[:-2] if forks else before), {"role": "user", "content": f"{number}?"}]
        said = [{"role": "assistant", "content": f"{number}.{index}"} for index in range(n)]
        prompt = [*b"|".join(message["content"].encode() for message in messages)]
        choices = [
            {
                "index": index,
                "finish_reason": "stop",
                "message": one,
                "prompt_token_ids": prompt,
                "token_ids": [*b"|", *one["content"].encode()],
            }
            for index, one in enumerate(said)
        ]
        body = json.dumps({"model": "m", "messages": messages, "n": n}).encode()
        reply = json.dumps({"choices": choices}).encode()
        assert t._record("/v1/chat/completions", body, reply, t.start_time)
        ends += [[*messages, one] for one in said]
        expected += sum(len(one["token_ids"]) for one in choices)
    assert sum(len(history.messages_and_choices) > 0 for history in t.histories()) == len(t.histories())
    spoken = [choice.message.content for choice in choices_of(t)]
    assert sorted(spoken) == sorted(f"{number}.{index}" for number, (_, _, n) in enumerate(plan) for index in range(n))
    assert sum(row.sampled.sum() for row in trajectory_rows(t)) == expected
    assert art.Trajectory(exchanges=t.exchanges).for_logging()["messages"] == t.for_logging()["messages"]
