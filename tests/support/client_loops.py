"""The same conversation with a tool in the official clients and LiteLLM. A process without art_nb can import this."""

import json

MODEL = "ttt@3"
QUESTION, ANSWER = "How is the weather in Rome?", "It is sunny."  # as in `support.agent_parts.Script`
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
CHAT = {"model": MODEL, "tools": [{"type": "function", "function": TOOL}], "max_completion_tokens": 500}


def joined(chunks):
    """The message of a stream of chunks, as dicts."""
    whole = {"role": "assistant", "content": "", "tool_calls": []}
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        whole["content"] += delta.get("content") or ""
        for part in delta.get("tool_calls") or ():
            if part["index"] == len(whole["tool_calls"]):
                whole["tool_calls"].append({"type": "function", "function": {"name": "", "arguments": ""}})
            call = whole["tool_calls"][part["index"]]
            call["id"] = part.get("id") or call["id"]
            for key, value in part["function"].items():
                call["function"][key] += value or ""
    return {"choices": [{"message": whole}]}


def summary(messages):
    """The content of a conversation: roles, texts, calls and results."""
    rows = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        pairs = [(call["name"], json.loads(call["arguments"])) for call in calls]
        rows.append((message["role"], message.get("content") or "", pairs))
    return rows


EXPECTED = [
    ("user", QUESTION, []),
    ("assistant", "", [("weather", {"city": "Rome"})]),
    ("tool", "sunny", []),
    ("assistant", ANSWER, []),
]


def results(message):
    return [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in message["tool_calls"]]


def chat_loop(create, stream):
    """Chat completions of any client. `create` returns a completion or an iterator of chunks, as dicts."""
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(2):
        reply = create(**CHAT, messages=messages, stream=stream)
        message = (joined(reply) if stream else reply)["choices"][0]["message"]
        messages.append({key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)})
        if not message.get("tool_calls"):
            return messages
        messages += results(message)


def openai_chat(url, key, name, stream):
    import openai

    def create(**body):
        reply = client.chat.completions.create(**body)
        return [chunk.model_dump(exclude_none=True) for chunk in reply] if stream else reply.model_dump()

    with openai.OpenAI(base_url=url, api_key=key, default_headers={"x-session-id": name}) as client:
        return chat_loop(create, stream)


def openai_responses(url, key, name, stream, stored=False):
    """`stored`: the second request names the first response and repeats none of its items."""
    import openai

    tools, items, previous = [{"type": "function", **TOOL}], [{"role": "user", "content": QUESTION}], {}
    with openai.OpenAI(base_url=url, api_key=key, default_headers={"x-session-id": name}) as client:
        for _ in range(2):
            request = {"model": MODEL, "input": items, "tools": tools, "max_output_tokens": 500, **previous}
            if stream:
                with client.responses.stream(**request) as events:
                    response = [event for event in events][-1].response
            else:
                response = client.responses.create(**request)
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                assert response.output_text == ANSWER
                return EXPECTED_MESSAGES
            outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
            items = outputs if stored else [*items, *response.output, *outputs]
            previous = {"previous_response_id": response.id} if stored else {}


def openai_stored_responses(url, key, name, stream):
    return openai_responses(url, key, name, stream, stored=True)


def anthropic_messages(url, key, name, stream):
    import anthropic

    tool = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
    messages = [{"role": "user", "content": QUESTION}]
    base = url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=base, api_key=key, default_headers={"x-session-id": name}) as client:
        for _ in range(2):
            request = {"model": MODEL, "max_tokens": 500, "messages": messages, "tools": [tool]}
            if stream:
                with client.messages.stream(**request) as events:
                    message = events.get_final_message()
            else:
                message = client.messages.create(**request)
            uses = [block for block in message.content if block.type == "tool_use"]
            if not uses:
                assert message.content[0].text == ANSWER
                return EXPECTED_MESSAGES
            outputs = [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"} for use in uses]
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": outputs}]


def litellm_in_process(url, key, name, stream):
    import litellm

    def create(**body):
        body |= {"model": f"openai/{MODEL}", "api_base": url, "api_key": key, "extra_headers": {"x-session-id": name}}
        reply = litellm.completion(**body)
        return [chunk.model_dump(exclude_none=True) for chunk in reply] if stream else reply.model_dump()

    return chat_loop(create, stream)


CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
EXPECTED_MESSAGES = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": ANSWER},
]


if __name__ == "__main__":  # in the environment of an older client
    import sys
    from importlib import metadata

    assert metadata.version("openai").startswith("2.")
    for loop in (openai_chat, openai_responses):
        for is_stream in (False, True):
            assert summary(loop(*sys.argv[1:], f"older-{loop.__name__}-{is_stream}", is_stream)) == EXPECTED
