"Malformed requests: no 5xx, no hang, and a good request is answered afterwards."

import json
import socket

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.audit import FULL
from support.server_parts import endpoint

GOOD = {
    "/v1/chat/completions": {
        "model": "ttt@3",
        "messages": [
            {"role": "system", "content": "Play."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "content": "7", "tool_call_id": "c"},
        ],
        "max_tokens": 3,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    },
    "/v1/completions": {"model": "base", "prompt": [[72, 105], [72]], "max_tokens": 3, "logprobs": 1},
    "/v1/responses": {
        "model": "ttt@3",
        "instructions": "Play.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "7"},
        ],
        "max_output_tokens": 3,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages": {
        "model": "ttt@3",
        "system": [{"type": "text", "text": "Play."}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "7"}]},
        ],
        "max_tokens": 3,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "stop_sequences": ["x"],
    },
}
FIELDS = """model messages prompt n stream stream_options temperature top_p top_k min_p seed stop max_tokens
    max_completion_tokens logprobs top_logprobs tools tool_choice echo logit_bias response_format user audio functions
    best_of role content nonsense guided_choice structured_outputs chat_template_kwargs return_token_ids
    return_tokens_as_token_ids input instructions previous_response_id text type output call_id name arguments system
    input_schema tool_use_id format schema""".split()

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-5, 30)
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from([2**63, -(2**63), 10**400, 1e308, "auto", "length", "\ud800", "\x00", "text", "user"])
)
anything = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)


def places(value, path=()):
    "Every path into a JSON value."
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


@st.composite
def bodies(draw):
    "A good body with one to four things wrong, or no body at all, as (path, bytes)."
    path = draw(st.sampled_from(sorted(GOOD)))
    body = json.loads(json.dumps(GOOD[path]))
    for _ in range(draw(st.integers(1, 4))):
        where = draw(st.sampled_from(list(places(body))))
        *parents, last = where or (draw(st.sampled_from(FIELDS)),)
        target = body
        for key in parents:
            target = target[key]
        action = draw(st.sampled_from(["set", "drop", "add"]))
        if action == "drop" and where:
            del target[last]
        elif action == "add" and isinstance(target, dict):
            target[draw(st.sampled_from(FIELDS))] = draw(anything)
        else:
            target[last] = draw(anything)
    data = json.dumps(body).encode()
    cut = draw(st.integers(0, 3 * len(data)))
    flip = draw(st.binary(max_size=3))
    return path, data if cut >= len(data) else data[:cut] + flip + data[cut + len(flip) :]


@pytest.fixture(scope="module")
def served():
    it = endpoint()
    it.start()
    with httpx.Client(
        base_url=it.base_url.removesuffix("/v1"), timeout=60, headers={"Authorization": f"Bearer {it.api_key}"}
    ) as client:
        client.endpoint = it
        yield client
    it.stop()


ENDS = {  # of a stream
    "/v1/responses": ('"type":"response.completed"', '"type":"response.incomplete"'),
    "/v1/messages": ('data: {"type":"message_stop"}',),
}
REPLIES = {"/v1/responses": "output", "/v1/messages": "content"}


def check(path, answer):
    "An answer that a client can make sense of."
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"]
        assert error["type"] in ("invalid_request_error", "not_found_error")
    elif answer.headers["content-type"].startswith("text/event-stream"):
        last = answer.text.rstrip().rpartition("\n\n")[2]
        assert any(end in last for end in ENDS.get(path, ("data: [DONE]",)))
        assert '"type":"error"' not in last
    else:
        assert answer.json()[REPLIES.get(path, "choices")]


def is_well(served):
    "A good request is answered and nothing is left running."
    for path, body in GOOD.items():
        answer = served.post(path, json=body)
        assert answer.status_code == 200
        check(path, answer)
    assert served.endpoint.service.sampler.open == 0


@pytest.mark.timeout(300)
def test_malformed_bodies(served):
    seen = {}

    @settings(
        max_examples=4000 if FULL else 800, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(bodies())
    def fuzz(request):
        path, data = request
        answer = served.post(path, content=data)
        check(path, answer)
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        if sum(seen.values()) % 200 == 0:
            is_well(served)

    fuzz()
    assert seen[400] > 500
    assert seen[200] > 50
    is_well(served)


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer KEY\r\n"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00" * 50,
        b"GET\r\n\r\n",
        b"POST / HTTP/9.9\r\n\r\n",
        b"G" * 200_000,
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 9\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n",
        HEAD + b"Content-Length: 100\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        HEAD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"X: \x00\r\n\r\n",
        (HEAD + b"Content-Length: 2\r\n\r\n{}") * 9,
        HEAD
        + b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n",
        b"GET /v1/models/%ff%00/../.. HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer KEY\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer KEY\r\n\r\n",
        b"GET http://x/v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer KEY\r\n\r\n",
    ],
)
def test_malformed_http(served, data):
    port = int(served.endpoint.base_url.split(":")[2].split("/")[0])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as line:
        got = b""
        try:
            line.sendall(data.replace(b"KEY", served.endpoint.api_key.encode()))
            line.shutdown(socket.SHUT_WR)
            while part := line.recv(1 << 16):
                got += part
        except OSError:  # the server may hang up on such a client
            pass
    assert not any(f.startswith(b"5") for f in (p.split(b" ")[0] for p in got.split(b"HTTP/1.1 ")[1:])), got[:500]
    is_well(served)
