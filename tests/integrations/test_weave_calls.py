"""What leaves the process in calls of Weave: no tokens of our endpoint, and no secrets."""

import json
import logging
import warnings
from collections import OrderedDict, namedtuple

import openai
import pytest
from openai.resources.responses import AsyncResponses, Responses
from openai.types.responses import Response, ResponseCompletedEvent

import art_nb as art
from art_nb.integrations import weave_calls
from art_nb.models.model import REGISTERED
from art_nb.rollouts.entries import History, is_choice

EXACT = {"messages": [], "tools": None, "choice": {"token_ids": [1, 2, 3], "logprobs": {"content": []}}}
TEXT = {
    "type": "output_text",
    "text": "left",
    "annotations": [],
    "logprobs": [{"token": "left", "bytes": [], "logprob": -0.5, "top_logprobs": []}],
}
REPLY = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1.0,
    "status": "completed",
    "model": "ttt@3",
    "output": [{"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [TEXT]}],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
KEY = "opal-meadow-7731"


def check_no_tokens(value):
    text = json.dumps(value, default=str)
    for word in ("token_ids", '"logprob"', '"logprobs"', "art_nb", "[1, 2, 3]"):
        assert word not in text
    return text


def test_replies_of_the_responses_api_lose_their_tokens():
    reply = Response.model_validate(REPLY | {"art_nb": EXACT})
    event = ResponseCompletedEvent(response=reply, sequence_number=3, type="response.completed")
    for value in (reply, {"reply": reply}, [event], reply.model_dump()):
        assert "left" in check_no_tokens(weave_calls.without_tokens(value))
    other = Response.model_validate(REPLY)  # of another provider
    assert weave_calls.without_tokens(other) is other


def test_dicts_of_other_types_and_named_tuples_lose_their_tokens():
    reply = OrderedDict(token_ids=[1, 2, 3], logprobs={"content": []}, text="left")
    assert weave_calls.without_tokens(reply) == {"text": "left"}
    assert weave_calls.without_tokens(namedtuple("Turn", "reply seed")(reply, 7)) == {
        "reply": {"text": "left"},
        "seed": 7,
    }


def test_secrets_do_not_leave_the_process(monkeypatch):
    monkeypatch.setenv("GAME_API_KEY", KEY)
    message = {"role": "user", "content": f"The key is {KEY}."}
    inputs = {
        "history": History(messages_and_choices=[message]),
        "options": {"api_key": "short", "text": KEY},
        "messages": [message],
        "moves": 3,
    }
    sent = weave_calls._inputs(None, inputs)
    assert KEY not in str(sent) and "short" not in str(sent) and str(sent).count("[redacted]") == 4
    assert sent["moves"] == 3
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "left"}}
    reply = openai.types.chat.chat_completion.Choice.model_validate(
        choice | {"token_ids": [9], "prompt_token_ids": [1]}
    )
    assert is_choice(reply)
    tools = [{"type": "function", "function": {"name": "move", "description": f"Uses {KEY}."}}]
    trajectory = art.Trajectory(messages_and_choices=[message, reply], tools=tools)
    ((conversation, _),) = weave_calls.conversation_calls(trajectory, "agent-001")
    assert KEY not in str(conversation) and conversation["tools"][0]["function"]["name"] == "move"


def test_the_error_of_a_rollout_loses_its_secrets_and_keeps_its_traceback(monkeypatch):
    monkeypatch.setenv("GAME_API_KEY", KEY)
    with pytest.raises(ValueError, match="refused") as caught:
        raise ValueError(f"refused: {KEY}")
    sent = weave_calls.redacted_error(caught.value)
    assert str(sent) == "ValueError: refused: [redacted]" and sent.__traceback__ is caught.value.__traceback__
    assert weave_calls.redacted_error(None) is None


def test_a_failure_of_the_server_raises_nothing_under_w_error():
    record = logging.LogRecord("weave.utils.retry", logging.ERROR, "", 0, "retry_failed", (), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert weave_calls._OneWarning().filter(record) is False


@pytest.fixture
def wrapped(monkeypatch):
    """The methods of OpenAI's clients, wrapped in this test only."""
    for owner, name in weave_calls._methods():
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(weave_calls, "_wrapped", {})
    weave_calls.wrap_requests()
    return weave_calls._wrapped


def test_requests_of_the_responses_api_are_wrapped(wrapped):
    for owner in (Responses, AsyncResponses):
        assert wrapped[owner, "create"] is owner.create and wrapped[owner, "parse"] is owner.parse


def test_clients_with_another_form_of_the_address_are_served(monkeypatch):
    model = art.TrainableModel(name="m", project="p", base_model="b", inference_base_url="http://localhost:7/v1")
    monkeypatch.setitem(REGISTERED, id(model), model)
    for url, expected in (
        ("http://localhost:7/v1/", True),
        ("http://localhost:7", True),
        ("http://localhost:8", False),
    ):
        assert weave_calls.is_served(openai.OpenAI(base_url=url, api_key="k")) is expected
