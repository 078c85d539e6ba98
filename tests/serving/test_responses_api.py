"""OpenAI's Responses API with the real client: every event is parsed."""

import json

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from support.server_parts import Scripted, endpoint

from art_nb.serving.dialects import EXACT_FIELD

CALL = '<tool_call>{"name": "play", "arguments": {"square": "A1"}}</tool_call>'
TOOL = {"type": "function", "name": "play", "parameters": {"type": "object"}, "strict": None}


@pytest.fixture
async def client():
    served = endpoint(Scripted())
    served.start()
    async with AsyncOpenAI(base_url=served.base_url, api_key=served.api_key, max_retries=0, timeout=60) as client:
        client.service = served.service
        yield client
    served.stop()


async def events_of(client, **request):
    stream = await client.responses.create(model="ttt@3", stream=True, **request)
    return [event async for event in stream]


async def test_a_response(client):
    response = await client.responses.create(model="ttt@3", input="Hi", instructions="Be brief.", metadata={"a": "b"})
    assert (response.output_text, response.status) == ("Hello, world", "completed")
    prompt, params, adapter = client.service.sampler.calls[-1]
    assert bytes(prompt) == b"<system>Be brief.<user>Hi<assistant>"
    assert adapter == "ttt@3"
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(prompt), len("Hello, world") + 1)
    assert response.metadata == {"a": "b"}


async def test_a_truncated_response(client):
    response = await client.responses.create(model="ttt@3", input="Hi", max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output_text == "Hel"


async def test_a_stream_has_the_events_of_the_items(client):
    events = await events_of(client, input="Hi")
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events if e.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == "Hello, world"
    assert len({e.response.id for e in events if hasattr(e, "response")}) == 1


async def test_the_clients_own_stream_helper(client):
    async with client.responses.stream(model="ttt@3", input="Hi") as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text == "Hello, world"


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_and_their_results(client, stream):
    client.service.sampler.words = f"I play.{CALL}{CALL}"
    request = {"input": "Hi", "tools": [TOOL]}
    if stream:
        events = await events_of(client, **request)
        response = events[-1].response
        assert [e.item.type for e in events if e.type == "response.output_item.done"] == [
            item.type for item in response.output
        ]
    else:
        response = await client.responses.create(model="ttt@3", **request)
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    assert json.loads(response.output[1].arguments) == {"square": "A1"}
    items = [{"role": "user", "content": "Hi"}, *(item.model_dump(exclude_none=True) for item in response.output)]
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "ok"} for item in response.output[1:]
    ]
    client.service.sampler.words = "Done."
    final = await client.responses.create(model="ttt@3", input=[*items, *results], tools=[TOOL])
    assert final.output_text == "Done."
    messages = client.service.chat.known[-1][0]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool"]
    assert len(messages[1]["tool_calls"]) == 2
    assert messages[1]["content"] == "I play."


NAMESPACE = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [TOOL | {"description": "Go."}]}


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_of_a_namespace_are_called(client, stream):
    """Codex sends its tools for sub-agents and those of MCP servers in namespaces."""
    client.service.sampler.words = CALL.replace("play", "crm__play")
    request = {"input": "Hi", "tools": [NAMESPACE, TOOL]}
    if stream:
        events = await events_of(client, **request)
        response = events[-1].response
        assert [event.item for event in events if event.type == "response.output_item.done"] == response.output
    else:
        response = await client.responses.create(model="ttt@3", **request)
    (item,) = response.output
    assert (item.type, item.namespace, item.name) == ("function_call", "crm", "play")
    functions = [tool["function"] for tool in response.model_extra[EXACT_FIELD]["tools"]]
    assert [function["name"] for function in functions] == ["crm__play", "play"]
    assert functions[0]["description"] == "Customers.\nGo."
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}
    items = [{"role": "user", "content": "Hi"}, item.model_dump(exclude_none=True), result]
    client.service.sampler.words = "Done."
    final = await client.responses.create(model="ttt@3", input=items, tools=[NAMESPACE])
    assert final.output_text == "Done."
    (call,) = client.service.chat.known[-1][0][1]["tool_calls"]
    assert call["function"]["name"] == "crm__play"


async def test_a_call_whose_namespace_is_not_a_text_is_refused(client):
    call = {"type": "function_call", "namespace": 7, "name": "play", "arguments": "{}", "call_id": "c"}
    with pytest.raises(BadRequestError, match=r"input\[0\]\.namespace: expected a string"):
        await client.responses.create(model="ttt@3", input=[call])


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([NAMESPACE | {"tools": [{"type": "custom"}]}], r"tools\[0\]\.tools\[0\]: 'custom' is not supported"),
        ([{"type": "web_search"}], r"tools\[0\]: 'web_search' .* Send functions, or turn this tool off in the client"),
        ([NAMESPACE | {"name": None}], r"tools\[0\]\.name: expected a string"),
        ([NAMESPACE | {"tools": None}], r"tools\[0\]\.tools: expected a list"),
        ([NAMESPACE, NAMESPACE], r"there are several functions 'crm__play'"),
        ([NAMESPACE, TOOL | {"name": "crm__play"}], r"there are several functions 'crm__play'"),
    ],
)
async def test_other_tools_are_rejected_with_their_place(client, tools, says):
    with pytest.raises(BadRequestError, match=says):
        await client.responses.create(model="ttt@3", input="Hi", tools=tools)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_conversation_continues(client, stream):
    first = await client.responses.create(model="ttt@3", input="One", instructions="Old.")
    request = {"input": "Two", "instructions": "New.", "previous_response_id": first.id}
    if stream:
        second = (await events_of(client, **request))[-1].response
    else:
        second = await client.responses.create(model="ttt@3", **request)
    expected = b"<system>New.<user>One<assistant>Hello, world<user>Two<assistant>"
    assert bytes(client.service.sampler.calls[-1][0]) == expected
    third = await client.responses.create(model="ttt@3", input="Three", previous_response_id=second.id, store=False)
    prompt = bytes(client.service.sampler.calls[-1][0])  # instructions hold for one response only
    assert prompt.startswith(b"<user>One<assistant>Hello, world<user>Two<assistant>Hello, world<user>Three")
    with pytest.raises(NotFoundError, match="was not stored"):
        await client.responses.create(model="ttt@3", input="Four", previous_response_id=third.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_items_of_stored_responses_can_be_referenced(client, stream):
    """Vercel's AI SDK sends the reasoning and the text of earlier turns as references."""
    client.service.sampler.words = "<think>Hm.</think>Hello."
    request = {"input": "One"}
    if stream:
        first = (await events_of(client, **request))[-1].response
    else:
        first = await client.responses.create(model="ttt@3", **request)
    assert [item.type for item in first.output] == ["reasoning", "message"]
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    items = [{"role": "user", "content": "One"}, *references, {"role": "user", "content": "Two"}]
    second = await client.responses.create(model="ttt@3", input=items, store=False)
    assert bytes(client.service.sampler.calls[-1][0]) == b"<user>One<assistant>Hello.<user>Two<assistant>"
    assert client.service.chat.known[-1][0][1]["reasoning_content"] == "Hm."
    for unknown in (second.output[0].id, "msg_other"):
        with pytest.raises(NotFoundError, match="There is no item"):
            await client.responses.create(model="ttt@3", input=[{"type": "item_reference", "id": unknown}])
    with pytest.raises(BadRequestError, match=r"input\[0\].id"):
        await client.responses.create(model="ttt@3", input=[{"type": "item_reference", "id": None}])


class Move(BaseModel):
    square: str


async def test_structured_output(client):
    client.service.sampler.guides = {"json"}
    client.service.sampler.words = '{"square": "B2"}'
    response = await client.responses.parse(model="ttt@3", input="Hi", text_format=Move)
    assert response.output_parsed == Move(square="B2")
    assert client.service.sampler.calls[-1][1].guide["json"]["properties"].keys() == {"square"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"extra_body": {"messages": []}}, "messages"),
        ({"input": []}, "input"),
    ],
)
async def test_errors_name_the_field_of_this_api(client, changes, param):
    with pytest.raises(BadRequestError) as raised:
        await client.responses.create(**({"model": "ttt@3", "input": "Hi"} | changes))
    assert raised.value.body["param"] == param


async def test_streamed_logprobs_are_whole(client):
    events = await events_of(client, input="Hi", include=["message.output_text.logprobs"], top_logprobs=1)
    part = events[-1].response.output[0].content[0]
    streamed = [entry for e in events if e.type == "response.output_text.delta" for entry in e.logprobs]
    assert "".join(entry.token for entry in part.logprobs) == part.text == "Hello, world"
    assert len(streamed) == len(part.logprobs)
    exact = events[-1].response.model_extra["art_nb"]["choice"]
    assert len(exact["logprobs"]["content"]) == len(exact["token_ids"]) == len("Hello, world") + 1


async def test_responses_have_the_form_of_the_client(client):
    """Validated strictly: the client itself accepts responses with missing fields."""
    client.service.sampler.words = f"I play.{CALL}"
    response = await client.responses.with_raw_response.create(model="ttt@3", input="Hi", tools=[TOOL])
    Response.model_validate_json(response.content)
    for event in await events_of(client, input="Hi", tools=[TOOL]):
        TypeAdapter(ResponseStreamEvent).validate_python(event.model_dump())


async def test_an_error_in_a_stream_is_an_event(client):
    client.service.sampler.error, client.service.sampler.error_after = RuntimeError("broken"), 3
    events = await events_of(client, input="Hi")
    assert events[-1].type == "error"
    assert "broken" in events[-1].message
