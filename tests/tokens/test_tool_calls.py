"""Tool calls in the forms of three families: whole, streamed in any cut, over several turns, beside vLLM's parsers."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import one_by_one, spelling_tokenizer

from art_nb.core.types import BackendMissing, ServeError
from art_nb.tokens.chat import ChatFormat, TextStream
from art_nb.tokens.reply_stream import CallStream, ReplyStream
from art_nb.tokens.tool_calls import CALL_FORMATS, call_prefix, detect_call_format

TOOLS = [
    {
        "type": "function",
        "function": {"name": "play", "parameters": {"type": "object", "properties": {"cell": {"type": "string"}}}},
    }
]
HERMES = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>{% else %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end|>\n\n"
    "{% if loop.first and tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    '{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|eot|>'
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if loop.first and tools %}[AVAILABLE_TOOLS] "
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}"
    "[TOOL_CALLS] ["
    "{% for call in m.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}"
    "{% endif %}{{ {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>{% elif m.role == 'tool' %}[TOOL_RESULTS] "
    "{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]{% else %} {{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
FAMILIES = {
    "hermes": (
        HERMES,
        ["<|im_start|>", "<|im_end|>"],
        "<|im_end|>",
        '<tool_call>\n{"name": "play", "arguments": {"cell": "b2"}}\n</tool_call>',
    ),
    "llama3_json": (
        LLAMA,
        ["<|start|>", "<|end|>", "<|eot|>", "<|python_tag|>"],
        "<|eot|>",
        '<|python_tag|>{"name": "play", "parameters": {"cell": "b2"}}',
    ),
    "mistral": (
        MISTRAL,
        ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "</s>"],
        "</s>",
        '[TOOL_CALLS] [{"name": "play", "arguments": {"cell": "b2"}}]',
    ),
}
EVERY = pytest.mark.parametrize("family", FAMILIES)


def chat_of(family):
    template, special, end, _ = FAMILIES[family]
    return ChatFormat(spelling_tokenizer(special, end, template))


def sampled(chat, text):
    """Ids of a reply that spells each character alone, and its text as a sampler gives it."""
    ids = [*one_by_one(chat.tokenizer, text), chat.tokenizer.eos_token_id]
    stream = TextStream(chat.tokenizer)
    return ids, "".join([*map(stream.add, ids), stream.flush()])


def test_a_template_shows_its_form():
    assert {family: detect_call_format(FAMILIES[family][0]) for family in FAMILIES} == {
        family: family for family in FAMILIES
    }


@EVERY
def test_calls_over_several_turns_keep_every_id(family):
    chat, messages, seen = chat_of(family), [{"role": "user", "content": "go"}], []
    for turn in range(3):
        prompt = chat.prompt_ids(messages, TOOLS)
        assert prompt[: len(seen)] == seen
        ids, text = sampled(chat, FAMILIES[family][3])
        reply = chat.reply(text, TOOLS)
        (call,) = reply["tool_calls"]
        assert call["function"] == {"name": "play", "arguments": '{"cell": "b2"}'}
        assert reply["content"] is None
        chat.remember(messages, TOOLS, prompt, ids, reply)
        seen = prompt + ids
        answer = {"role": "tool", "tool_call_id": call["id"], "content": f"no {turn}"}
        messages += [json.loads(json.dumps(reply)), answer]
    last = chat.prompt_ids(messages, TOOLS)
    assert last[: len(seen)] == seen
    assert "no 2" in chat.tokenizer.decode(last[len(seen) :])


@EVERY
def test_text_that_is_no_call_stays_text_in_later_turns(family):
    chat, messages = chat_of(family), [{"role": "user", "content": "go"}]
    broken = FAMILIES[family][3].replace('"b2"', "b2")
    prompt = chat.prompt_ids(messages, TOOLS)
    ids, text = sampled(chat, broken)
    reply = chat.reply(text, TOOLS)
    assert reply == {"role": "assistant", "content": broken}
    chat.remember(messages, TOOLS, prompt, ids, reply)
    later = chat.prompt_ids([*messages, reply, {"role": "user", "content": "That is no JSON."}], TOOLS)
    assert later[: len(prompt + ids)] == prompt + ids


@EVERY
def test_a_begun_call_and_its_rest_are_one_call(family):
    chat, messages = chat_of(family), [{"role": "user", "content": "go"}]
    prompt = chat.prompt_ids(messages, TOOLS)
    begun, ids = chat.forced_call_start(prompt, "play")
    closing = {"hermes": "}\n</tool_call>", "llama3_json": "}", "mistral": "}]"}[family]
    rest, text = sampled(chat, '{"cell": "b2"}' + closing)
    stream = chat.stream(prompt, TOOLS)
    stream.add(begun)
    stream.add(text, last=True)
    reply = stream.message()
    assert reply["tool_calls"][0]["function"] == {"name": "play", "arguments": '{"cell": "b2"}'}
    chat.remember(messages, TOOLS, prompt + ids, rest, reply)
    answer = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "ok"}
    assert chat.prompt_ids([*messages, reply, answer], TOOLS)[: len(prompt + ids + rest)] == prompt + ids + rest


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<think>",
    "</think>",
    "<",
    "[",
    "\n",
    " ",
    "; ",
    "play",
    "b2",
    '{"name": "play", "arguments": {"cell": "b2"}}',
    '[{"name": "a"}, {"name": "b"}]',
    '{"name": "look", "parameters": {}}',
    '{"x": 1}',
    "play[ARGS]{}",
]


@settings(max_examples=400, derandomize=True)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=9),
    seed=st.integers(0, 1000),
    name=st.sampled_from([*CALL_FORMATS, None]),
    thinking=st.sampled_from([None, True]),
    one=st.booleans(),
)
def test_any_cut_of_a_reply_gives_the_same_message(pieces, seed, name, thinking, one):
    text, draw = "".join(pieces), random.Random(seed)
    form = CALL_FORMATS[name] if name else None
    whole, cut = ReplyStream(form, thinking, one), ReplyStream(form, thinking, one)
    whole.add(text, last=True)
    deltas, place = [], 0
    while place < len(text):
        size = draw.choice([1, 1, 2, 3, 7])
        deltas.append(cut.add(text[place : place + size]))
        place += size
    deltas.append(cut.add("", last=True))

    def bare(message):
        return message | {"tool_calls": [call["function"] for call in message.get("tool_calls", [])]}

    assert bare(whole.message()) == bare(cut.message())
    assert "".join(delta.get("content", "") for delta in deltas) == (whole.message()["content"] or "")
    assert [call["index"] for delta in deltas for call in delta.get("tool_calls", [])] == [*range(len(cut.calls))]


@settings(max_examples=200, derandomize=True)
@given(
    words=st.text(st.characters(exclude_characters="<{[", exclude_categories=["Cs"]), max_size=30),
    name=st.sampled_from([*CALL_FORMATS]),
)
def test_plain_text_is_passed_on_as_it_is(words, name):
    assert CallStream(CALL_FORMATS[name]).add(words, last=True) == ((words, []) if words else ("", []))


def test_a_tag_that_is_one_token_is_no_text():
    """Llama's tag is a token of its own: it arrives before the call."""
    stream = CallStream(CALL_FORMATS["llama3_json"])
    assert stream.add("<|python_tag|>") == ("", [])
    assert stream.add('{"name": "look"}', last=True) == ("", [("look", {})])


def test_a_reply_of_white_space_is_read_in_no_time():
    stream = CallStream(CALL_FORMATS["hermes"])
    for _ in range(4000):
        assert stream.add("\n") == ("", [])
    assert stream.add("", last=True) == ("\n" * 4000, [])


def test_half_a_character_is_no_call_in_any_form():
    for form in (form for form in CALL_FORMATS.values() if form.before_name and form.writes_json):
        text = f'{call_prefix(form, "play")}{{"a": "\\ud800"}}'
        assert CallStream(form).add(text, last=True)[1] == []
    assert CallStream(CALL_FORMATS["mistral"]).add('[TOOL_CALLS]f[ARGS]{"a": "\\ud800"}', last=True)[1] == []


def test_text_before_a_call_does_not_wait_for_it():
    stream = CallStream(CALL_FORMATS["hermes"])
    assert stream.add("Let me see. <tool")[0] == "Let me see."
    assert stream.add("box>") == (" <toolbox>", [])


# -- a template without tools

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_without_tools_gets_them_as_text():
    said, warned = [], []
    chat = ChatFormat(
        spelling_tokenizer(["<|im_start|>", "<|im_end|>"], "<|im_end|>", CHATML),
        warn=lambda key, text: warned.append(text),
        inform=lambda key, text: said.append(text),
    )
    messages = [{"role": "system", "content": "Play well."}, {"role": "user", "content": "go"}]
    prompt = chat.prompt_ids(messages, TOOLS)
    text = chat.tokenizer.decode(prompt)
    assert text.startswith("<|im_start|>system\nPlay well.")
    assert json.dumps(TOOLS[0]) in text
    assert "does not support tools" in said[0] and not warned
    ids, text = sampled(chat, f"I see.\n{FAMILIES['hermes'][3]}")
    reply = chat.reply(text, TOOLS)
    chat.remember(messages, TOOLS, prompt, ids, reply)
    answer = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "taken"}
    later = chat.prompt_ids([*messages, reply, answer], TOOLS)
    assert later[: len(prompt + ids)] == prompt + ids
    assert "<tool_response>\ntaken\n</tool_response>" in chat.tokenizer.decode(later)


def test_a_written_call_is_learnt_as_it_is_spoken():
    chat = chat_of("hermes")
    call = {"id": "call_1", "type": "function", "function": {"name": "play", "arguments": '{"cell": "b2"}'}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    ids = chat.reply_ids([{"role": "user", "content": "go"}], reply, TOOLS)
    assert chat.tokenizer.decode(ids) == FAMILIES["hermes"][3] + "<|im_end|>"


# -- vLLM's parsers


def test_other_forms_are_vllms():
    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(BackendMissing, match=r"art_nb\[vllm\].*hermes, llama3_json, mistral"):
            ChatFormat(chat_of("hermes").tokenizer, tool_call_parser="pythonic")
        return
    chat = ChatFormat(chat_of("hermes").tokenizer, tool_call_parser="pythonic")
    assert [call["function"] for call in chat.reply('[play(cell="b2"), look()]', TOOLS)["tool_calls"]] == [
        {"name": "play", "arguments": '{"cell": "b2"}'},
        {"name": "look", "arguments": "{}"},
    ]
    assert chat.reply("b2", TOOLS) == {"role": "assistant", "content": "b2"}
    with pytest.raises(ServeError, match="cannot begin a call"):
        chat.forced_call_start([], "play")
    with pytest.raises(ServeError, match="Unknown `tool_call_parser='abacus'`"):
        ChatFormat(chat_of("hermes").tokenizer, tool_call_parser="abacus")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hermes", '<tool_call>\n{"name": "play", "arguments": {"cell": "b2"}}\n</tool_call>'),
        (
            "hermes",
            'I see. <tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>{"name": "b", "arguments": {}}',
        ),
        ("hermes", "<tool_call>play(b2)</tool_call>"),
        ("hermes", "b2"),
        ("llama3_json", "b2"),
        ("llama3_json", '{"name": "play", "parameters": {"cell": "b2"}}'),
        (
            "llama3_json",
            '<|python_tag|>{"name": "play", "parameters": {"cell": "b2"}}; {"name": "look", "parameters": {}}',
        ),
        ("llama3_json", '{"name": "play", "parameters": {'),
    ],
)
def test_our_reading_is_vllms(name, words):
    pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm runs this")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    tokenizer = chat_of(name).tokenizer
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    request = ChatCompletionRequest(messages=[{"role": "user", "content": ""}])
    theirs = ToolParserManager.get_tool_parser(name)(tokenizer).extract_tool_calls(words, request)
    text, calls = CallStream(CALL_FORMATS[name]).add(words, last=True)
    assert calls == [(call.function.name, json.loads(call.function.arguments)) for call in theirs.tool_calls]
    assert text.strip() == (theirs.content or "").strip()


def test_begun_calls_are_json():
    for form in (form for form in CALL_FORMATS.values() if form.quote and form.before_name):
        name = 'a"b'
        begun = call_prefix(form, name)
        assert json.dumps(name) in begun
