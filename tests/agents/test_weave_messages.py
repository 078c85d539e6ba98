"""Replies of Anthropic's client in calls of Weave: no tokens of our endpoint."""

import json

import pytest

from art_nb.integrations import weave_calls

anthropic = pytest.importorskip("anthropic", reason="make test-agents installs the frameworks")
from anthropic.resources import beta, messages  # noqa: E402

EXACT = {"messages": [], "tools": None, "choice": {"token_ids": [1, 2, 3], "logprobs": {"content": []}}}
REPLY = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "ttt@3",
    "content": [{"type": "text", "text": "left"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 3, "output_tokens": 1},
}


def test_replies_of_the_messages_api_lose_their_tokens():
    reply = anthropic.types.Message.model_validate(REPLY | {"art_nb": EXACT})
    delta = {"stop_reason": "end_turn", "art_nb": EXACT}
    event = anthropic.types.RawMessageDeltaEvent.model_validate(
        {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 1}}
    )
    for value in (reply, {"reply": reply}, [event], reply.model_dump()):
        text = json.dumps(weave_calls.without_tokens(value))
        assert "end_turn" in text and "token_ids" not in text and "art_nb" not in text
    other = anthropic.types.Message.model_validate(REPLY)  # of another provider
    assert weave_calls.without_tokens(other) is other


def test_requests_of_the_messages_api_are_wrapped(monkeypatch):
    for owner, name in weave_calls._methods():
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(weave_calls, "_wrapped", {})
    weave_calls.wrap_requests()
    for module in (messages, beta.messages):
        for owner in (module.Messages, module.AsyncMessages):
            for name in ("create", "parse", "stream"):
                assert weave_calls._wrapped[owner, name] is getattr(owner, name)
