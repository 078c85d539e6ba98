"The endpoint with the real OpenAI client, over the socket and in process, and with clients that misbehave."

import asyncio
import json
import logging
import socket
import threading
from functools import partial

import pytest
from openai import APIError, APIStatusError, APITimeoutError, AsyncOpenAI, LengthFinishReasonError
from pydantic import BaseModel
from support.registered import until
from support.server_parts import END, Bytes, Scripted, Tags, endpoint

from art_nb.core.types import ServeError
from art_nb.models.clients import httpx
from art_nb.serving import http_server
from art_nb.serving.asgi import MAX_BODY_BYTES, read_body
from art_nb.serving.endpoint import RequestError

pytestmark = pytest.mark.timeout(300)
HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "play", "parameters": {"type": "object"}}}]
HELLO = [*b"Hello, world", END]


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """A busy machine may need longer than the limits of test_http_server.py to send or read a request."""
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 300)
    monkeypatch.setattr(http_server, "EVICT_AFTER_S", 300)


@pytest.fixture
def served():
    it = endpoint()
    it.start()
    yield it
    it.stop()


@pytest.fixture(scope="module")
def shared():
    "An endpoint for tests that leave it as it is."
    it = endpoint()
    it.start()
    yield it
    it.stop()


def test_after_a_failed_start_the_endpoint_can_start_again(monkeypatch):
    async def fail(server, sockets=None):
        server.should_exit = True

    it = endpoint()
    with monkeypatch.context() as patches:
        patches.setattr(http_server.HttpServer, "startup", fail)
        for _ in range(2):
            with pytest.raises(ServeError, match="The endpoint did not start"):
                it.start()
    it.start()
    assert httpx.get(it.base_url.replace("/v1", "/health")).status_code == 200
    it.stop()


@pytest.fixture(params=["socket", "in process"])
async def client(request, served):
    http = httpx.AsyncClient(transport=served.transport()) if request.param == "in process" else None
    options = {"max_retries": 0, "timeout": 60}  # a busy machine needs more than the 5 s for a connection
    async with AsyncOpenAI(base_url=served.base_url, api_key=served.api_key, http_client=http, **options) as client:
        client.served = served
        yield client


def raw(served, path, body=b"", method="POST", **headers):
    "One request by plain httpx."
    base = served.base_url.removesuffix("/v1")
    headers = {"Authorization": f"Bearer {served.api_key}"} | headers
    return httpx.request(method, base + path, content=body, headers=headers, timeout=60)


def connect(served):
    "A bare connection."
    return socket.create_connection(("127.0.0.1", int(served.base_url.split(":")[2].split("/")[0])), timeout=60)


def http_bytes(served, body, path="/v1/chat/completions", length=None):
    "A request as bytes."
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.api_key}\r\nContent-Length: "
    return f"{head}{len(body) if length is None else length}\r\n\r\n".encode() + body


async def collect(stream, texts):
    "Append what a stream says to `texts`."
    async for chunk in stream:
        texts.append(chunk.choices[0].delta.content)


# ---- what the client gets


async def test_chat_completion(client):
    answer = await client.chat.completions.create(model="ttt@3", messages=HI, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert choice.message.content == "Hello, world"
    assert choice.finish_reason == "stop"
    assert bytes(choice.model_extra["prompt_token_ids"]) == b"<user>Hi<assistant>"
    assert choice.model_extra["token_ids"] == HELLO
    entries = choice.logprobs.content
    assert [e.logprob for e in entries] == choice.model_extra["token_logprobs"]
    assert entries[0].token == "H"
    assert entries[0].bytes == [72]
    assert entries[-1].token == "<end>"
    assert entries[0].top_logprobs[1].logprob == -9999.0  # a token that was cut off
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (19, 13)
    assert (answer.model, answer.system_fingerprint) == ("ttt@3", "ttt@3")
    assert answer.id.startswith("chatcmpl-")
    chat, sampler = client.served.service.chat, client.served.service.sampler
    assert chat.known[-1] == (
        HI,
        None,
        choice.model_extra["prompt_token_ids"],
        HELLO,
        {"role": "assistant", "content": "Hello, world"},
    )
    assert sampler.calls[-1][1].max_tokens == 4096 - 19
    assert sampler.calls[-1][2] == "ttt@3"


async def test_logprobs_are_there_even_if_not_asked_for(client):
    choice = (await client.chat.completions.create(model="base", messages=HI)).choices[0]
    assert choice.logprobs is None
    assert len(choice.model_extra["token_logprobs"]) == len(HELLO)


async def test_stream_says_the_same(client):
    options = {"model": "ttt@3", "messages": HI, "logprobs": True, "seed": 7}
    whole = (await client.chat.completions.create(**options)).choices[0]
    stream = await client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    choices = [c.choices[0] for c in chunks[:-1]]
    assert choices[0].delta.role == "assistant"
    assert "".join(c.delta.content or "" for c in choices) == whole.message.content
    assert choices[-1].finish_reason == "stop"
    assert choices[-1].model_extra == whole.model_extra
    assert [e for c in choices for e in c.logprobs.content] == whole.logprobs.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(HELLO)
    first, second = client.served.service.chat.known[-2:]
    assert first == second


class Move(BaseModel):
    square: str


@pytest.mark.parametrize("form", [{}, {"response_format": Move}], ids=["text", "a model"])
async def test_a_reply_that_was_cut_cannot_be_parsed(client, form):
    client.served.service.sampler.guides = {"json"}
    asked = {"model": "ttt@3", "messages": HI, "max_tokens": 3}
    with pytest.raises(LengthFinishReasonError) as told:
        await client.chat.completions.parse(**asked, **form)
    assert told.value.completion.choices[0].message.content == "Hel"
    plain = await client.chat.completions.create(**asked)
    assert (plain.choices[0].finish_reason, plain.choices[0].message.content) == ("length", "Hel")


async def test_choices_of_one_request_differ(client):
    answer = await client.chat.completions.create(model="base", messages=HI, n=3, seed=5, max_tokens=4)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert answer.choices[0].finish_reason == "length"
    assert len({tuple(c.model_extra["token_logprobs"]) for c in answer.choices}) == 3
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (19, 12)
    stream = await client.chat.completions.create(model="base", messages=HI, n=3, seed=5, max_tokens=4, stream=True)
    last = {c.choices[0].index: c.choices[0] async for c in stream}
    assert [last[i].model_extra for i in range(3)] == [c.model_extra for c in answer.choices]


async def test_parameters_arrive(client):
    await client.chat.completions.create(
        model="base",
        messages=HI,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        seed=-3,
        stop=["a", "b"],
        user="me",
        metadata={},
        store=False,
        logit_bias={},
        parallel_tool_calls=True,
        frequency_penalty=0,
        response_format={"type": "text"},
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "return_token_ids": True,
            "chat_template_kwargs": {"x": 1},
            "ignore_eos": True,
        },
    )
    p = client.served.service.sampler.calls[-1][1]
    assert (p.max_tokens, p.temperature, p.top_p, p.top_k, p.min_p, p.seed, p.stop, p.ignore_eos) == (
        9,
        0.5,
        0.9,
        5,
        0.1,
        -3,
        ("a", "b"),
        True,
    )
    assert client.served.service.chat.told == {"x": 1}
    await client.chat.completions.create(model="base", messages=HI, max_tokens=10**9, temperature=1e-8)
    p = client.served.service.sampler.calls[-1][1]
    assert (p.max_tokens, p.temperature, p.seed, p.stop) == (4096 - 19, 0.0, None, ())


@pytest.mark.parametrize("asked", [True, False])
async def test_requested_prompt_ids_are_in_the_body(client, asked):
    options = {"model": "base", "messages": HI, "n": 2, "extra_body": {"return_token_ids": asked}}
    ids = list(b"<user>Hi<assistant>") if asked else None
    answer = await client.chat.completions.create(**options)
    assert (answer.model_extra or {}).get("prompt_token_ids") == ids
    chunks = [chunk async for chunk in await client.chat.completions.create(**options, stream=True)]
    for index in range(2):
        told = [(c.model_extra or {}).get("prompt_token_ids") for c in chunks if c.choices[0].index == index]
        assert told[0] == ids
        assert told[-1] is None  # once is enough
    whole = await client.completions.create(model="base", prompt=["a"], extra_body={"return_token_ids": asked})
    assert (whole.model_extra or {}).get("prompt_token_ids") == ([97] if asked else None)
    two = await client.completions.create(model="base", prompt=["a", "b"], extra_body={"return_token_ids": asked})
    assert "prompt_token_ids" not in (two.model_extra or {})


async def test_tokens_are_called_by_their_ids_where_that_is_asked_for(client):
    named = {"extra_body": {"return_tokens_as_token_ids": True}}
    answer = await client.chat.completions.create(model="base", messages=HI, logprobs=True, top_logprobs=2, **named)
    entries = answer.choices[0].logprobs.content
    assert [entry.token for entry in entries] == [f"token_id:{i}" for i in HELLO]
    assert bytes(entries[0].bytes) == b"token_id:72"
    assert [top.token for top in entries[0].top_logprobs][0] == "token_id:72"
    text = await client.completions.create(model="base", prompt="a", logprobs=1, **named)
    assert text.choices[0].logprobs.tokens == [f"token_id:{i}" for i in HELLO]


CALL = '<tool_call>{"name": "play", "arguments": {"cell": "b2"}}</tool_call>'


async def test_tool_calls(client):
    client.served.service.sampler.words = f"I try. {CALL}{CALL}"
    choice = (await client.chat.completions.create(model="base", messages=HI, tools=TOOLS)).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I try."
    assert [call.function.name for call in choice.message.tool_calls] == ["play"] * 2
    stream = await client.chat.completions.create(model="base", messages=HI, tools=TOOLS, stream=True)
    chunks = [c.choices[0] async for c in stream]
    assert "".join(c.delta.content or "" for c in chunks) == "I try."
    calls = [call for c in chunks for call in c.delta.tool_calls or []]
    assert [(call.index, call.function.arguments) for call in calls] == [(i, '{"cell": "b2"}') for i in (0, 1)]
    assert calls[0].id != calls[1].id
    assert next(i for i, c in enumerate(chunks) if c.delta.tool_calls) < len(chunks) - 2  # it still speaks
    assert chunks[-1].finish_reason == "tool_calls"
    assert chunks[-1].model_extra["token_ids"] == choice.model_extra["token_ids"]
    a, b = client.served.service.chat.known[-2:]
    assert (a[:4], a[4]["content"]) == (b[:4], b[4]["content"])
    assert a[1] == TOOLS
    off = await client.chat.completions.create(model="base", messages=HI, tools=TOOLS, tool_choice="none")
    assert off.choices[0].message.content == f"I try. {CALL}{CALL}"
    assert off.choices[0].finish_reason == "stop"
    once = await client.chat.completions.create(model="base", messages=HI, tools=TOOLS, parallel_tool_calls=False)
    assert len(once.choices[0].message.tool_calls) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "play"}}])
async def test_a_call_is_begun_for_the_model(client, choice, stream):
    client.served.service.sampler.words = '{"cell": "b2"}}</tool_call>'
    answer = await client.chat.completions.create(
        model="base", messages=HI, tools=TOOLS, tool_choice=choice, stream=stream
    )
    chunks = [c.choices[0] async for c in answer] if stream else []
    last = chunks[-1] if stream else answer.choices[0]
    calls = [call for c in chunks for call in c.delta.tool_calls or []] if stream else last.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [("play", '{"cell": "b2"}')]
    assert last.finish_reason == "tool_calls"
    assert bytes(last.model_extra["prompt_token_ids"]).endswith(b'<tool_call>\n{"name": "play", "arguments": ')
    assert bytes(last.model_extra["token_ids"][:-1]).decode() == client.served.service.sampler.words


async def test_a_thought_streams_as_a_thought(client):
    client.served.service.sampler.words = "<think>\nis b2 free?\n</think>\n\nb2"
    answer = await client.chat.completions.create(model="base", messages=HI, stream=True)
    deltas = [c.choices[0].delta async for c in answer]
    assert "".join((d.model_extra or {}).get("reasoning_content", "") for d in deltas) == "is b2 free?"
    assert "".join(d.content or "" for d in deltas) == "b2"


async def test_completions(client):
    two = [b"a", b"b"]
    for prompt, texts in (("ab", [b"ab"]), ([97, 98], [b"ab"]), (["a", "b"], two), ([[97], [98]], two)):
        answer = await client.completions.create(model="base", prompt=prompt, n=2, logprobs=1)
        got = [bytes(c.model_extra["prompt_token_ids"]) for c in answer.choices]
        assert got == [t for t in texts for _ in range(2)]
        assert answer.choices[-1].text == "Hello, world"
        assert answer.choices[0].logprobs.tokens[0] == "H"
        assert answer.usage.prompt_tokens == sum(map(len, texts))
    stream = await client.completions.create(model="base", prompt="ab", stream=True)
    choices = [c.choices[0] async for c in stream]
    assert "".join(c.text for c in choices) == "Hello, world"
    assert choices[-1].model_extra["token_ids"] == HELLO


async def test_models_health_metrics(client):
    assert [m.id async for m in await client.models.list()] == ["base", "ttt@3"]
    assert (await client.models.retrieve("ttt@3")).id == "ttt@3"
    await client.chat.completions.create(model="base", messages=HI)
    text = raw(client.served, "/metrics", method="GET").text
    assert 'art_nb_requests_total{status="200"}' in text
    assert "art_nb_completion_tokens_total 13" in text
    assert "art_nb_sampler_running 0" in text
    assert "art_nb_sampler_waiting 0" in text
    assert raw(client.served, "/health", method="GET", Authorization="").status_code == 200


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "status", "param", "code"),
    [
        ({"model": "gpt-9"}, 404, "model", "model_not_found"),
        ({"model": 7}, 400, "model", None),
        ({"messages": None}, 400, "messages", None),
        ({"messages": []}, 400, "messages", None),
        ({"messages": "Hi"}, 400, "messages", None),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role", None),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content", None),
        ({"messages": [{"role": "user"}]}, 400, "messages[0]", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0].content[0].type",
            None,
        ),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "messages", "context_length_exceeded"),
        ({"temperature": "hot"}, 400, "temperature", None),
        ({"temperature": True}, 400, "temperature", None),
        ({"temperature": 1e999}, 400, None, None),
        ({"top_p": 1.5}, 400, "top_p", None),
        ({"n": 0}, 400, "n", None),
        ({"n": 10**30}, 400, "n", None),
        ({"max_tokens": 0}, 400, "max_tokens", None),
        ({"max_completion_tokens": 1.5}, 400, "max_completion_tokens", None),
        ({"seed": 2**63}, 400, "seed", None),
        ({"stop": [1]}, 400, "stop[0]", None),
        ({"stream": "yes"}, 400, "stream", None),
        ({"top_logprobs": 21}, 400, "top_logprobs", None),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias", None),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", None),
        ({"audio": {"voice": "alloy"}}, 400, "audio", None),
        ({"tool_choice": "required"}, 400, "tool_choice", None),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}, "tools": TOOLS}, 400, "tool_choice", None),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, 400, "tool_choice.function", None),
        ({"tools": [{"type": "function"}]}, 400, "tools[0].function", None),
        ({"presence_penalty": 0.5}, 400, "presence_penalty", None),
        ({"temprature": 1}, 400, "temprature", None),
        ({"return_token_ids": "yes"}, 400, "return_token_ids", None),
        ({"chat_template_kwargs": ["x"]}, 400, "chat_template_kwargs", None),
        ({"structured_outputs": {"choice": []}}, 400, "structured_outputs.choice", None),
        ({"guided_choice": ["x"]}, 400, "guided_choice", None),
    ],
)
def test_bad_requests_name_the_field(shared, change, status, param, code):
    answer = raw(shared, "/v1/chat/completions", json.dumps({"model": "base", "messages": HI} | change).encode())
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code), error
    assert error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["x"] * 20, "n": 100}, "n"),
        ({"prompt": [1, "a"]}, None),
        ({"messages": HI}, "messages"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_bad_completions(shared, change, param):
    answer = raw(shared, "/v1/completions", json.dumps({"model": "base", "prompt": "x"} | change).encode())
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] is not None
    assert param is None or error["param"] == param, error


def test_bad_http(shared):
    chat, good = "/v1/chat/completions", json.dumps({"model": "base", "messages": HI}).encode()
    for body in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b'{"model": "\\ud800"}'):
        answer = raw(shared, chat, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
    latin = "Bearer \u00e9".encode("latin-1")
    for key in ("", "Bearer", "Bearer wrong", f"Basic {shared.api_key}", shared.api_key, latin):
        answer = raw(shared, chat, good, Authorization=key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert raw(shared, "/metrics", method="GET", Authorization="").status_code == 401
    assert raw(shared, chat, method="GET").status_code == 405
    assert raw(shared, "/v1/embeddings", good).json()["error"]["message"].startswith("POST /v1/embeddings")
    assert raw(shared, "/v1/embeddings", good).status_code == 404
    assert raw(shared, "/v1/models/gpt", method="GET").json()["error"]["code"] == "model_not_found"
    assert raw(shared, chat, good, Authorization=f"bearer  {shared.api_key}").status_code == 200


async def test_errors_of_a_template_are_the_clients(served):
    def refuse(messages, tools=None):
        raise RecursionError("roles must alternate")

    served.service.chat.prompt_ids = refuse
    answer = raw(served, "/v1/chat/completions", json.dumps({"model": "base", "messages": HI}).encode())
    assert answer.status_code == 400
    assert "roles must alternate" in answer.text
    assert answer.json()["error"]["param"] == "messages"


async def test_a_long_render_holds_no_other_request_up(client):
    """A small request is rendered on the loop, where it must not wait for another render to end."""
    began, go_on, chat = threading.Event(), threading.Event(), client.served.service.chat
    prompt_ids = chat.prompt_ids

    def slow(messages, tools=None):
        if chat.busy or len(messages[0]["content"]) > 9:
            chat.busy = True
            began.set()
            assert go_on.wait(60)
        return prompt_ids(messages, tools)

    chat.prompt_ids, ask = slow, partial(client.chat.completions.create, model="base")
    long = [{"role": "user", "content": "x" * 1000}]
    asked = [asyncio.create_task(ask(messages=long, extra_body={"user": "y" * (1 << 17)}))]
    await asyncio.to_thread(began.wait, 60)
    asked.append(asyncio.create_task(ask(messages=HI)))
    assert [model.id for model in (await client.models.list()).data]
    assert not any(task.done() for task in asked)
    go_on.set()
    assert [reply.choices[0].message.content for reply in await asyncio.gather(*asked)] == ["Hello, world"] * 2


def test_large_bodies(served):
    with connect(served) as line:  # told: refused before a byte of it is sent
        line.sendall(http_bytes(served, b"", length=50 << 20))
        assert b" 413 " in line.recv(4096).split(b"\r\n")[0]

    def parts():
        for _ in range(50):
            yield b" " * (1 << 20)

    answer = raw(served, "/v1/chat/completions", parts())  # not told
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert raw(served, "/health", method="GET").status_code == 200
    long = [{"role": "user", "content": "x" * (15 << 20)}]
    answer = raw(served, "/v1/chat/completions", json.dumps({"model": "base", "messages": long}).encode())
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_a_large_body_is_not_read_to_its_end():
    class Sent:
        headers, taken = {}, 0

        async def stream(self):
            for _ in range(50):
                self.taken += 1
                yield b" " * (1 << 20)

    sent = Sent()
    with pytest.raises(RequestError):
        await read_body(sent)
    assert sent.taken == (MAX_BODY_BYTES >> 20) + 1


# ---- what fails in here


async def test_a_failing_sampler(client, caplog):
    sampler, ask = client.served.service.sampler, client.chat.completions.create
    for error, status in (
        (RuntimeError("out of memory"), 500),
        (ServeError("asleep", status=503), 503),
        (ServeError("too long"), 400),
    ):
        sampler.error = error
        for stream in (False, True):  # nothing was sent yet: an ordinary HTTP error
            caplog.clear()
            with pytest.raises(APIStatusError) as caught:
                await ask(model="base", messages=HI, stream=stream, n=3)
            assert caught.value.status_code == status
            assert str(error) in caught.value.body["message"]
            assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == (status >= 500)
    sampler.error_after, sampler.error = 5, RuntimeError("out of memory")
    stream, text = await ask(model="base", messages=HI, stream=True), []
    with pytest.raises(APIError, match="out of memory"):
        await collect(stream, text)
    assert "".join(text) == "Hello"
    sampler.error = None
    assert (await ask(model="base", messages=HI)).choices[0].message.content == "Hello, world"
    assert sampler.open == 0


async def test_one_failed_choice_ends_its_siblings(client):
    sampler = client.served.service.sampler
    sampler.gate = (3, threading.Event())  # its siblings would wait for ever
    sampler.error, sampler.error_call = RuntimeError("out of memory"), 2
    for stream in (False, True):
        sampler.calls.clear()
        with pytest.raises(APIStatusError if not stream else APIError, match="out of memory"):
            await collect(await client.chat.completions.create(model="base", messages=HI, n=3, stream=stream), [])
        await until(lambda: sampler.open == 0)


# ---- streaming and leaving


async def test_tokens_arrive_during_sampling(client):
    gate = threading.Event()
    client.served.service.sampler.gate = (3, gate)
    stream = await client.chat.completions.create(model="base", messages=HI, stream=True)
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if text == "Hel":
            gate.set()
    assert text == "Hello, world"


async def test_who_leaves_cancels(client):
    sampler = client.served.service.sampler
    sampler.gate = (3, threading.Event())  # never set: it would wait for ever
    stream = await client.chat.completions.create(model="base", messages=HI, stream=True, n=2)
    await anext(aiter(stream))
    await stream.close()
    await until(lambda: sampler.closed == 2)
    task = asyncio.create_task(client.chat.completions.create(model="base", messages=HI, n=2))
    await until(lambda: sampler.open == 2)
    task.cancel()
    await until(lambda: sampler.closed == 4)
    before, patience_s = sampler.closed, 0.2
    while sampler.closed == before and patience_s < 10:  # the request may not have arrived in that time
        with pytest.raises(APITimeoutError):
            await client.with_options(timeout=patience_s).chat.completions.create(model="base", messages=HI)
        await asyncio.sleep(0.2)
        patience_s *= 2
    await until(lambda: sampler.closed > before and not sampler.open)
    assert sampler.open == 0
    sampler.gate = None
    assert (await client.chat.completions.create(model="base", messages=HI)).choices[0].finish_reason == "stop"


async def test_slow_clients_do_not_delay_other_requests(served):
    served.service.sampler.words = "x" * 3000
    body = json.dumps({"model": "base", "messages": HI, "stream": True, "logprobs": True}).encode()
    request, lines = http_bytes(served, body), [connect(served) for _ in range(5)]
    for line in lines:
        line.sendall(request)  # and read nothing
    dribble = connect(served)
    for i in range(0, 120, 3):  # and one that sends a few bytes at a time
        dribble.sendall(request[i : i + 3])
    async with AsyncOpenAI(base_url=served.base_url, api_key=served.api_key, max_retries=0, timeout=60) as client:
        await client.with_options(timeout=60).chat.completions.create(model="base", messages=HI, max_tokens=5)
        assert served.service.sampler.open  # replies that nobody reads are still being written
    dribble.sendall(request[120:])
    got = b""
    while not got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        part = await asyncio.to_thread(dribble.recv, 1 << 20)
        assert part
        got += part
    for line in (*lines, dribble):
        line.close()
    await until(lambda: served.service.sampler.open == 0)


def test_an_answer_does_not_wait_for_an_acknowledgement(shared):
    """Nagle's algorithm is off: with it, each answer on a connection that is kept takes 40 ms."""
    body = json.dumps({"model": "base", "messages": HI, "max_tokens": 1}).encode()
    with httpx.Client(headers={"Authorization": f"Bearer {shared.api_key}"}, timeout=60) as http:
        http.post(shared.base_url + "/chat/completions", content=body).raise_for_status()
        lines = [c.transport.get_extra_info("socket") for c in shared._server.server_state.connections]
        assert lines and all(line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for line in lines)


async def test_200_at_once(client):
    async def one(i):
        content = [{"role": "user", "content": str(i)}]
        if i % 2:
            choice = (await client.chat.completions.create(model="base", messages=content)).choices[0]
        else:
            stream = await client.chat.completions.create(model="base", messages=content, stream=True)
            choice = [c.choices[0] async for c in stream][-1]
        assert bytes(choice.model_extra["prompt_token_ids"]) == f"<user>{i}<assistant>".encode()
        assert choice.model_extra["token_ids"] == HELLO

    client.served.service.sampler.delay_s = 0.001
    await asyncio.gather(*(one(i) for i in range(200)))
    assert client.served.service.sampler.open == 0
    assert client.served.service.sampler.closed == 200


async def test_1000_connections(served):
    body = json.dumps({"model": "base", "messages": HI}).encode()
    port = int(served.base_url.split(":")[2].split("/")[0])
    request = http_bytes(served, body).replace(b"Host: x", b"Host: x\r\nConnection: close")

    async def one():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return answer.split(b" ")[1]

    served.service.sampler.delay_s = 0.05
    assert set(await asyncio.gather(*(one() for _ in range(1000)))) == {b"200"}


# ---- the life of an endpoint


@pytest.fixture
def new_threads():
    "The endpoint threads that were not there when the test began."
    before = set(threading.enumerate())
    return lambda: [t for t in set(threading.enumerate()) - before if t.name == "art_nb-endpoint"]


def test_start_and_stop(new_threads):
    before, it = threading.active_count(), endpoint()
    it.stop()
    for _ in range(3):
        it.start()
        it.start()
        port = int(it.base_url.split(":")[2].split("/")[0])
        assert len(new_threads()) == 1
        assert raw(it, "/health", method="GET").status_code == 200
        it.stop()
        it.stop()
        assert new_threads() == []
        assert threading.active_count() == before
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=2)


async def test_stop_ends_what_is_open(caplog, new_threads):
    it = endpoint()
    sampler = it.service.sampler
    sampler.gate = (3, threading.Event())
    it.start()
    client = AsyncOpenAI(base_url=it.base_url, api_key=it.api_key, max_retries=0)
    whole = asyncio.create_task(client.chat.completions.create(model="base", messages=HI))
    stream = await client.chat.completions.create(model="base", messages=HI, stream=True)
    half = connect(it)
    half.sendall(http_bytes(it, b"{", length=100))  # a body that never comes
    await until(lambda: sampler.open == 2)
    await asyncio.wait_for(asyncio.to_thread(it.stop), 60)  # nothing else would end these requests
    assert sampler.open == 0
    assert new_threads() == []
    with pytest.raises(APIStatusError) as caught:
        await whole
    assert caught.value.status_code == 503
    with pytest.raises(APIError, match="stopped"):
        await collect(stream, [])
    half.close()
    await client.close()
    assert not [r for r in caplog.records if "ASGI" in r.message]


async def test_stop_with_a_client_that_does_not_read(new_threads):
    it = endpoint(Scripted("x" * 4000))
    it.start()
    body = json.dumps({"model": "base", "messages": HI, "stream": True, "logprobs": True, "n": 16}).encode()
    lines = [connect(it) for _ in range(4)]
    for line in lines:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.sendall(http_bytes(it, body))
    await until(lambda: it.service.sampler.open)
    await asyncio.sleep(0.5)
    assert it.service.sampler.open
    await asyncio.wait_for(asyncio.to_thread(it.stop), 60)  # nobody reads: the replies cannot end otherwise
    assert new_threads() == []
    assert it.service.sampler.open == 0
    for line in lines:
        line.close()


async def test_in_process_needs_no_thread(new_threads):
    it = endpoint()
    async with httpx.AsyncClient(transport=it.transport()) as http:
        client = AsyncOpenAI(base_url=it.base_url, api_key=it.api_key, http_client=http, max_retries=0)
        assert (await client.chat.completions.create(model="base", messages=HI)).choices[0].message.content
        with pytest.raises(APIStatusError) as caught:
            await client.with_options(api_key="guess").chat.completions.create(model="base", messages=HI)
    assert caught.value.status_code == 401
    assert new_threads() == []
    assert [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []


# ---- with the real chat format

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Spelling(Scripted):
    "Says Hi, in the ids of a tokenizer that would rather write it as one token."

    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer = tokenizer

    async def _say(self, params, fails):
        from art_nb.samplers.base import SampledToken

        for token in ("H", "i", "<e>"):
            yield SampledToken(
                self.tokenizer.convert_tokens_to_ids(token),
                -0.5,
                token.strip("<e>"),
                [],
                "stop" if token == "<e>" else None,
            )


async def test_the_next_turn_keeps_the_sampled_ids():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    from art_nb.tokens.chat import ChatFormat

    letters = [chr(i) for i in range(32, 127)] + ["Hi"]
    bpe = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, [("H", "i")]))
    bpe.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<e>")
    it = endpoint(Spelling(tokenizer), ChatFormat(tokenizer, chat_template=TEMPLATE))
    async with httpx.AsyncClient(transport=it.transport()) as http:
        client = AsyncOpenAI(base_url=it.base_url, api_key=it.api_key, http_client=http, max_retries=0)
        for stream in (False, True):
            messages = [{"role": "user", "content": [{"type": "text", "text": f"{stream}"}]}]
            answer = await client.chat.completions.create(model="base", messages=messages, stream=stream)
            choice = [c.choices[0] async for c in answer][-1] if stream else answer.choices[0]
            reply = {"role": "assistant", "content": "Hi"} if stream else choice.message
            messages += [reply, {"role": "user", "content": "again"}]
            second = (await client.chat.completions.create(model="base", messages=messages)).choices[0]
            seen = choice.model_extra["prompt_token_ids"] + choice.model_extra["token_ids"]
            assert second.model_extra["prompt_token_ids"][: len(seen)] == seen


def test_parts_are_what_they_say():
    assert Bytes().decode([72, END]) == "H<end>"
    assert Tags().prompt_ids(HI) == list(b"<user>Hi<assistant>")
