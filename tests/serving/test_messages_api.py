"""Anthropic's Messages API over plain HTTP. tests/agents has the same with Anthropic's client."""

import json

import pytest
from support.server_parts import Scripted, endpoint

from art_nb.models.clients import httpx
from art_nb.rollouts.exchanges import events_of

CALL = '<tool_call>{"name": "play", "arguments": {"square": "A1"}}</tool_call>'
TOOL = {"name": "play", "description": "Play.", "input_schema": {"type": "object"}}
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def served():
    it = endpoint(Scripted())
    it.start()
    yield it
    it.stop()


def post(served, path="/messages", **changes):
    body = {"model": "ttt@3", "max_tokens": 500, "messages": HI} | changes
    headers = {"x-api-key": served.api_key, "anthropic-version": "2023-06-01"}
    return httpx.post(served.base_url + path, json=body, headers=headers, timeout=60)


def test_a_message(served):
    message = post(served, system="Be brief.", metadata={"user_id": "1"}).json()
    assert message["content"] == [{"type": "text", "text": "Hello, world", "citations": None}]
    assert (message["type"], message["stop_reason"], message["model"]) == ("message", "end_turn", "ttt@3")
    prompt = served.service.sampler.calls[-1][0]
    assert bytes(prompt) == b"<system>Be brief.<user>Hi<assistant>"
    assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (len(prompt), 13)


def test_a_truncated_message(served):
    assert post(served, max_tokens=3).json()["stop_reason"] == "max_tokens"


def test_a_stop_sequence_is_named(served):
    message = post(served, stop_sequences=["zz", "world"]).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "world")


def test_a_stream_has_the_events_of_the_blocks(served):
    served.service.sampler.words = f"I play.{CALL}"
    response = post(served, stream=True, tools=[TOOL])
    names = [line[7:] for line in response.text.splitlines() if line.startswith("event: ")]
    events = list(events_of(response.content))
    assert names == [event["type"] for event in events]
    assert [name for name in names if name != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(d["text"] for d in deltas if d["type"] == "text_delta") == "I play."
    assert json.loads(deltas[-1]["partial_json"]) == {"square": "A1"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] > 0


def test_calls_and_their_results(served):
    served.service.sampler.words = f"I play.{CALL}{CALL}"
    reply = post(served, tools=[TOOL], tool_choice={"type": "auto"}).json()
    assert [block["type"] for block in reply["content"]] == ["text", "tool_use", "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "ok"}]}
        for block in reply["content"][1:]
    ]
    messages = [*HI, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": results}]
    served.service.sampler.words = "Done."
    assert post(served, messages=messages, tools=[TOOL]).json()["content"][0]["text"] == "Done."
    chat = served.service.chat.known[-1][0]
    assert [m["role"] for m in chat] == ["user", "assistant", "tool", "tool"]
    assert [m["tool_call_id"] for m in chat[2:]] == [call["id"] for call in chat[1]["tool_calls"]]


def test_the_size_of_a_prompt(served):
    reply = httpx.post(
        f"{served.base_url}/messages/count_tokens",
        json={"model": "ttt@3", "messages": HI, "system": "Be brief."},
        headers={"x-api-key": served.api_key},
    )
    assert reply.json() == {"input_tokens": len("<system>Be brief.<user>Hi<assistant>")}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_tokens": None}, "max_tokens: this field is required"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]: 'image'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]: only tools with an input_schema"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"temprature": 1}, "temprature: this field is not known"),
        ({"messages": []}, "messages"),
    ],
)
def test_errors_have_the_format_of_this_api(served, changes, said):
    response = post(served, **changes)
    assert response.status_code == 400
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert said in error["error"]["message"]


def test_a_wrong_key_and_an_unknown_model(served):
    wrong = httpx.post(f"{served.base_url}/messages", json={}, headers={"x-api-key": "guess"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
    unknown = post(served, model="gpt")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")


def test_an_error_before_the_first_event_has_the_format_of_this_api(served):
    served.service.sampler.error, served.service.sampler.error_after = RuntimeError("broken"), 0
    response = post(served, stream=True)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error")


def test_an_error_in_a_stream_is_an_event(served):
    served.service.sampler.error, served.service.sampler.error_after = RuntimeError("broken"), 3
    events = list(events_of(post(served, stream=True).content))
    assert events[-1]["type"] == "error"
    assert "broken" in events[-1]["error"]["message"]
