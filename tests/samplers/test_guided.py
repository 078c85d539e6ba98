"""A teacher's reply said again by the student: words and calls, in the student's own tokens, trained like others."""

import json
import math
import random
import re
import time
from typing import Literal

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import create_model
from support.registered import QUESTION, at_home
from support.tiny import spelling_tokenizer

import art_nb as art
from art_nb.compat.utils import freeze_tool_schema, get_guided_completion_params
from art_nb.core.types import ServeError
from art_nb.models.gguf import CHATML_TURNS
from art_nb.policy.lora import sequence_logprobs
from art_nb.tokens.grammars import GrammarGuide, forced_call, matcher_of, prepare_schema
from art_nb.tokens.reply_stream import ReplyStream
from art_nb.tokens.tool_calls import _MARKS, CALL_FORMATS, call_prefix, detect_call_format, only_arguments

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"cell": {"type": "string"}, "turn": {"type": "integer"}}},
        },
    }
    for name in ("look", "play")
]


OFFER = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"


@pytest.fixture
async def home(tiny_model_dir, tmp_path):
    """A registered model, told of its tools in few words, and its backend."""
    template = {"chat_template": OFFER + CHATML_TURNS}
    async with at_home(tiny_model_dir, tmp_path, "student", _internal_config=template) as pair:
        yield pair


def teacher(**message):
    """What another model has said."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": None} | message}
    return ChatCompletion.model_validate(
        {"id": "t", "object": "chat.completion", "created": 0, "model": "teacher", "choices": [choice]}
    )


def called(name, arguments):
    return teacher(tool_calls=[{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}])


async def ask(model, **options):
    """The whole reply, as long as the model likes."""
    return (
        await model.openai_client()
        .with_options(max_retries=0)
        .chat.completions.create(model=model.get_inference_name(), messages=QUESTION, **options)
    )


async def test_the_reply_of_the_teacher_is_sampled_in_the_students_tokens(home):
    model, backend = home
    guided_choice, tool_choice, tools = get_guided_completion_params(teacher(content="the move is B2, not b2"))
    assert (tool_choice, tools) == (None, None)
    for seed in range(3):
        reply = await ask(model, seed=seed, logprobs=True, extra_body={"guided_choice": guided_choice})
        (choice,) = reply.choices
        assert choice.message.content == "the move is B2, not b2"
        assert choice.finish_reason == "stop"
        tokenizer = backend.runtime(model).policy.tokenizer
        spelt = tokenizer(guided_choice[0], add_special_tokens=False)["input_ids"]
        assert choice.model_extra["token_ids"] == [*spelt, tokenizer.eos_token_id]
        assert choice.model_extra["cut"] and not choice.model_extra["guide"]  # trained as if it were sampled freely


async def test_one_of_several_choices(home):
    model, _ = home
    said = [
        (await ask(model, seed=seed, extra_body={"structured_outputs": {"choice": ["B2", "B2 C3"], "json": None}}))
        .choices[0]
        .message.content
        for seed in range(24)
    ]
    assert {*said} == {"B2", "B2 C3"}
    (long,) = (await ask(model, max_tokens=9, extra_body={"guided_choice": ["B2"], "ignore_eos": True})).choices
    assert (long.message.content, long.finish_reason) == ("B2", "length")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_made_again(home, stream):
    model, _ = home
    _, tool_choice, tools = get_guided_completion_params(called("play", '{"cell": "B2 \\u00e9", "turn": 3}'), TOOLS)
    answer = await ask(model, tool_choice=tool_choice, tools=tools, stream=stream)
    chunks = [chunk.choices[0] async for chunk in answer] if stream else []
    last = chunks[-1] if stream else answer.choices[0]
    calls = [call for c in chunks for call in c.delta.tool_calls or []] if stream else last.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("play", '{"cell": "B2 \u00e9", "turn": 3}')
    ]
    assert last.finish_reason == "tool_calls"
    assert last.model_extra["cut"] and not last.model_extra["guide"]


REQUIRED = [
    {
        "type": "function",
        "function": {
            "name": "play",
            "parameters": {
                "type": "object",
                "required": ["cell", "sure"],
                "additionalProperties": False,
                "properties": {
                    "cell": {"enum": ["A1", "B2"]},
                    "sure": {"type": "boolean"},
                    "turn": {"type": "integer"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "look"}},
]


def calls_of(choice):
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]


def fits(name, arguments):
    """Tell whether a call is one of REQUIRED."""
    if name == "look":
        return True
    kinds = {"cell": str, "sure": bool, "turn": int}
    return (
        name == "play"
        and {"cell", "sure"} <= {*arguments} <= {*kinds}
        and arguments["cell"] in ("A1", "B2")
        and all(type(value) is kinds[key] for key, value in arguments.items())
    )


@pytest.mark.parametrize("wanted", ["required", "play", "look"])
async def test_a_call_that_is_asked_for_is_a_call_or_too_long(home, wanted):
    model, _ = home
    choice = wanted if wanted == "required" else {"type": "function", "function": {"name": wanted}}
    answer = await ask(model, tools=REQUIRED, tool_choice=choice, max_tokens=90, n=24, seed=1, temperature=0.7)
    finishes = {"tool_calls": 0, "length": 0}
    for choice in answer.choices:
        finishes[choice.finish_reason] += 1
        assert choice.model_extra["guide"]  # its logprobs are those of the permitted tokens
        assert "warning" not in choice.model_extra
        if choice.finish_reason == "tool_calls":
            [(name, arguments)] = calls_of(choice)
            assert wanted in ("required", name) and fits(name, arguments)
        else:
            assert all(fits(*call) for call in calls_of(choice))
    assert finishes["tool_calls"] > (0 if wanted == "look" else 6)


async def test_a_streamed_call_is_whole(home):
    model, _ = home
    answer = await ask(model, tools=REQUIRED[:1], tool_choice="required", max_tokens=90, seed=3, stream=True)
    chunks = [chunk.choices[0] async for chunk in answer]
    [call] = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert fits(call.function.name, json.loads(call.function.arguments))
    assert chunks[-1].finish_reason == "tool_calls"


async def test_a_call_that_max_tokens_ends_is_none(home):
    model, _ = home
    tools = [
        {
            "type": "function",
            "function": {
                "name": "play",
                "parameters": {
                    "type": "object",
                    "required": ["why"],
                    "properties": {"why": {"enum": ["because it is the middle " * 4]}},
                },
            },
        },
        REQUIRED[1],
    ]
    named = {"type": "function", "function": {"name": "play"}}
    (choice,) = (await ask(model, tools=tools, tool_choice=named | {}, max_tokens=6)).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_complete_at_the_limit_is_a_call(home, stream):
    model, _ = home
    named = {"type": "function", "function": {"name": "play"}}
    options = {"tools": REQUIRED, "tool_choice": named, "seed": 3, "logprobs": True}
    (whole,) = (await ask(model, **options, max_tokens=90)).choices
    n = len(whole.logprobs.content) - 1  # without the token that ends the turn
    assert whole.finish_reason == "tool_calls"

    async def limited(max_tokens):
        answer = await ask(model, **options, max_tokens=max_tokens, stream=stream)
        if not stream:
            return answer.choices[0].finish_reason, bool(answer.choices[0].message.tool_calls)
        chunks = [chunk.choices[0] async for chunk in answer]
        return chunks[-1].finish_reason, any(chunk.delta.tool_calls for chunk in chunks)

    assert await limited(n) == ("tool_calls", True)
    assert await limited(2) == ("length", False)


async def test_a_schema_that_cannot_be_followed_is_an_error_of_the_request(home):
    model, _ = home
    for parameters in (
        {"type": "object", "properties": ["cell"]},
        {"$ref": "#"},
        {"type": "object", "properties": {"cell": {"$ref": "#/properties/cell"}}, "required": ["cell"]},
    ):
        tools = [{"type": "function", "function": {"name": "play", "parameters": parameters}}]
        with pytest.raises(openai.BadRequestError, match="tool_choice: the parameters") as caught:
            await ask(model, tools=tools, tool_choice="required")
        assert caught.value.param == "tools"


def schema_of(dice, depth=3):
    """A random JSON schema, of keywords that the grammar follows."""
    kinds = ["string", "integer", "boolean", "enum"]
    kind = dice.choice([*kinds, "number", "null", "array", "object", "map", "any", "ref"] if depth else kinds)
    inner = lambda: schema_of(dice, depth - 1)
    names = dice.sample(["a", "b", "ü c", 'k"'], dice.randint(1, 4))
    least = dice.randint(0, 3)
    made = {
        "enum": lambda: {"enum": dice.sample(["a", 'q"x', 1, True, None, 2.5, "</tool"], dice.randint(1, 3))},
        "array": lambda: {"type": "array", "items": inner(), "minItems": least, "maxItems": least + dice.randint(0, 2)},
        "object": lambda: {
            "type": "object",
            "properties": {name: inner() for name in names},
            "required": [name for name in names if dice.random() < 0.5],
            "additionalProperties": False,
        },
        "map": lambda: {"type": "object", "additionalProperties": inner()},
        "any": lambda: {"anyOf": [inner(), {"type": ["boolean", "null"]}]},
        "ref": lambda: {"$ref": "#/$defs/tree"},
    }
    return made.get(kind, lambda: {"type": kind})()


TREE = {"type": "object", "properties": {"below": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}


def walk(guide, dice, limit=400):
    """A reply of permitted tokens that prefers to close what it has opened, and whether it came to an end."""
    said, end = [], frozenset({SPELLER.eos_token_id})
    while len(said) < limit:
        ids = [int(token) for token in guide.allowed_ids(said, end)]
        if end.intersection(ids):
            return SPELLER.decode(said), True
        closers = [token for token in ids if SPELLER.decode([token]) in '"}]']
        said.append(dice.choice(closers if closers and dice.random() < 0.5 else ids))
    return SPELLER.decode(said), False


def test_what_a_grammar_permits_its_schema_permits():
    validator, values = pytest.importorskip("jsonschema").Draft202012Validator, 0
    for seed in range(150):
        dice = random.Random(seed)
        schema = {"type": "object", "properties": {"a": schema_of(dice)}, "required": ["a"], "$defs": {"tree": TREE}}
        text, ended = walk(GrammarGuide(SPELLER, held(schema)), dice)
        if ended:
            assert text.endswith(END)
            validator(schema).validate(json.loads(text.removesuffix(END)))
            values += 1
    assert values > 100


SPELLER, END = spelling_tokenizer(["<|im_end|>"], "<|im_end|>", ""), CALL_FORMATS["hermes"].after_arguments


def held(parameters, form="hermes"):
    """The grammar of a call of `play`."""
    tools = [{"type": "function", "function": {"name": "play", "parameters": parameters}}]
    return forced_call(CALL_FORMATS[form], tools, "play", SPELLER)


def permits(parameters, arguments):
    matcher = matcher_of(SPELLER, held(parameters)).deep_copy()
    ids = SPELLER(arguments + END, add_special_tokens=False)["input_ids"]
    return matcher.consume_tokens(ids) and matcher.is_accepting()


def nested(*parts):
    """A schema whose property "left" is one of some parts."""
    return {
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/node"}},
        "required": ["left"],
        "$defs": {"node": {"anyOf": [*parts, {"type": "integer"}]}},
    }


def branch(**op):
    return {"type": "object", "properties": {"left": {"$ref": "#/$defs/node"}, **op}, "required": ["left", *op]}


@pytest.mark.parametrize(
    "schema",
    [nested(branch(op={"const": "+"}), branch(op={"const": "-"})), nested(branch())],
    ids=["ambiguous", "plain"],
)
def test_nesting_is_fast_and_can_be_closed(schema):
    guide, end, said = GrammarGuide(SPELLER, held(schema)), frozenset({SPELLER.eos_token_id}), []
    begun = SPELLER('{"left": ' * 40 + "1", add_special_tokens=False)["input_ids"]
    started = time.process_time()  # of this process alone: a busy machine hardly changes it
    for token in begun:
        assert token in guide.allowed_ids(said, end)
        said.append(token)
    while not end.intersection(ids := guide.allowed_ids(said, end).tolist()):  # the reply can close what it has opened
        said.append(min(token for token in ids if not SPELLER.decode([token]).isdigit()))
        assert len(said) < 2000
    assert time.process_time() - started < 30
    value, depth = json.loads(SPELLER.decode(said).removesuffix(END)), 0
    while isinstance(value, dict):
        value, depth = value["left"], depth + 1
    assert depth == 40


def chain(count, key="anyOf"):
    """A schema of references that lead from one to the next."""
    steps = {f"d{i}": {key: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(count)}
    return {"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": steps | {f"d{count}": {}}}


def deep(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE = {
    "chain": chain(5000),
    "short chain": chain(150),
    "exponential anyOf": chain(30),
    "exponential allOf": chain(30, "allOf"),
    "exponential oneOf": chain(30, "oneOf"),
    "deep": deep(60),
    "deeper": deep(400),
    "enum": {"properties": {"a": {"enum": [f"value {i * 7919}" for i in range(50_000)]}}, "required": ["a"]},
    "list": {"properties": {"a": {"type": "array", "maxItems": 10**9}}, "required": ["a"]},
    "lists": {"properties": {"a": {"type": "array", "minItems": 10**7}}, "required": ["a"]},
    "pattern": {"properties": {"a": {"type": "string", "pattern": "^(.{0,500}a){0,500}$"}}, "required": ["a"]},
    "multiple": {"properties": {"a": {"type": "integer", "multipleOf": 999_983}}, "required": ["a"]},
    "length": {"properties": {"a": {"type": "string", "minLength": 10**7}}, "required": ["a"]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_processed_in_seconds(name):
    started = time.process_time()
    try:
        call = held(HOSTILE[name])
    except ServeError as error:
        call, message = None, str(error)
    if call is None:
        assert "the parameters of 'play'" in message
    else:
        text, ended = walk(GrammarGuide(SPELLER, call), random.Random(0), 100)
        assert not ended or isinstance(json.loads(text.removesuffix(END)), dict)
    assert time.process_time() - started < 20


def test_a_reply_ends_when_the_grammar_fails():
    guide, end = GrammarGuide(SPELLER, held(None)), frozenset({SPELLER.eos_token_id})
    wrong = SPELLER("no", add_special_tokens=False)["input_ids"]
    assert {*guide.allowed_ids(wrong, end).tolist()} == end
    assert {*guide.allowed_ids(wrong * 2, end).tolist()} == end


def test_arguments_are_an_object_with_the_properties_of_the_schema():
    either = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}}
    for siblings in ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"allOf": [{"required": ["a"]}]}):
        for schema in (either | siblings, {"$ref": "#/$defs/x", "$defs": {"x": either | siblings}}):
            assert permits(schema, '{"a": 1}') and not permits(schema, '{"c": 1}')
            inner = {"type": "object", "properties": {"x": either | siblings}}
            assert permits(inner, '{"x": {"a": 1}}') and not permits(inner, '{"x": 12}')
    for schema in (
        None,
        True,
        {},
        {"anyOf": [{"required": ["a"]}]},
        {"allOf": [{"title": "x"}]},
        {"allOf": [either, {"required": ["a"]}]},
        {"type": ["object", "null"]},
    ):
        assert permits(schema, '{"a": 1}')
        assert not any(permits(schema, text) for text in ("12", "null", "[]"))


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/missing"},
        {"$ref": "https://example.com/schema.json"},
        {"$ref": "#"},
        False,
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer"}}},
        {"allOf": [{"type": "string"}]},
        {"enum": [1]},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}},
        {"type": "object", "properties": {"a": {"type": "array", "minItems": 257}}},
        {"type": "object", "properties": {"a": {"type": "array", "minItems": 3, "maxItems": 2}}},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "object", "properties": {}, "required": ["a"], "additionalProperties": False},
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_held_to_is_refused(parameters):
    with pytest.raises(ServeError, match="tool_choice: the parameters of 'play'") as caught:
        held(parameters)
    assert caught.value.param == "tools"


def test_limits_of_lists_and_properties_that_are_never_written():
    many = {"type": "object", "properties": {"a": {"type": "array", "items": {"const": 1}, "maxItems": 1000}}}
    assert permits(many, json.dumps({"a": [1] * 256})) and not permits(many, json.dumps({"a": [1] * 257}))
    never = {"type": "object", "properties": {"a": False, "b": {"type": "array", "items": False}}}
    assert permits(never, '{"b": []}') and not permits(never, '{"a": 1}') and not permits(never, '{"b": [1]}')


def test_a_large_enum_is_followed():
    large = {"type": "object", "properties": {"a": {"enum": [*range(2000)]}}}
    assert permits(large, '{"a": 1999}') and not permits(large, '{"a": 2000}')


def test_parts_of_a_schema_that_add_properties_to_each_other_stay_open():
    parts = [{"$ref": "#/$defs/base"}, {"properties": {"b": {"type": "integer"}}}]
    schema = {"allOf": parts, "$defs": {"base": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
    assert permits(schema, '{"a": 1, "b": 2}') and not permits(schema, '{"a": "x"}')
    assert prepare_schema(schema["$defs"]["base"])["additionalProperties"] is False


@pytest.mark.parametrize("style", ["hermes", "deepseek_v3", "llama3_json", "mistral"])
def test_the_closing_text_in_a_string_does_not_end_the_call(style):
    form = CALL_FORMATS[style]
    value = f"see {form.closing or form.after_arguments} and {form.after_arguments}"
    schema = {"type": "object", "properties": {value: {"enum": [value]}}, "required": [value]}
    text, ended = walk(GrammarGuide(SPELLER, held(schema, style)), random.Random(0), 4000)
    assert ended
    text = call_prefix(form, "play") + text
    for size in (1, 7, len(text)):
        stream = ReplyStream(form)
        for place in range(0, len(text), size):
            stream.add(text[place : place + size])
        stream.add(" Done." * bool(form.closing), last=True)
        [call] = stream.calls
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("play", {value: value})
        assert stream.content == " Done." * bool(form.closing)


@pytest.mark.parametrize("style", ["qwen3_coder", "glm45"])
def test_a_call_in_tags_that_max_tokens_ends_is_none(style):
    text = call_prefix(CALL_FORMATS[style], "play")
    for cut in (False, True):
        stream = ReplyStream(CALL_FORMATS[style])
        stream.add(text)
        if cut:
            stream.truncate()
        stream.add("", last=True)
        assert bool(stream.calls) != cut
    assert stream.content == text.strip() or stream.content == text


def test_a_call_that_is_complete_at_the_last_token_is_a_call():
    stream = ReplyStream(CALL_FORMATS["qwen3_coder"])
    stream.add(call_prefix(CALL_FORMATS["qwen3_coder"], "play") + "</function>\n</tool_call>")
    stream.truncate()
    stream.add("", last=True)
    assert [call["function"]["name"] for call in stream.calls] == ["play"]


@pytest.mark.parametrize("style", ["llama3_json", "mistral", "deepseek_v3", "qwen3_coder"])
async def test_the_format_of_the_model_is_used_or_the_missing_call_is_reported(tiny_model_dir, tmp_path, style):
    config = {"chat_template": f"{{# {_MARKS[style]} #}}{OFFER}{CHATML_TURNS}"}
    assert detect_call_format(config["chat_template"]) == style
    async with at_home(tiny_model_dir, tmp_path, "student", _internal_config=config) as (model, _):
        answer = await ask(model, tools=REQUIRED[:1], tool_choice="required", max_tokens=90, n=8, seed=1)
        for choice in answer.choices:
            if style == "qwen3_coder":  # no grammar: the call is only begun
                assert not choice.model_extra["guide"]
                missed = choice.finish_reason == "stop" and not choice.message.tool_calls
                assert ("warning" in choice.model_extra) == missed
            else:
                assert choice.model_extra["guide"]
                assert choice.finish_reason in ("tool_calls", "length")
                assert all(fits(*call) for call in calls_of(choice))
        if style != "qwen3_coder":
            assert "tool_calls" in [choice.finish_reason for choice in answer.choices]


async def test_replies_of_the_student_become_more_likely(home):
    model, backend = home
    guided, _, _ = get_guided_completion_params(teacher(content="B2"))
    taught = (await ask(model, extra_body={"guided_choice": guided})).choices[0]
    free = [(await ask(model, seed=seed, max_tokens=6)).choices[0] for seed in range(3)]
    ids = taught.model_extra["prompt_token_ids"] + taught.model_extra["token_ids"]
    at = backend.runtime(model)

    def likely():
        return at.worker.call(sequence_logprobs, at.policy, ids)[-len(taught.model_extra["token_ids"]) :].sum()

    before = likely()
    group = art.TrajectoryGroup(
        [
            art.Trajectory(messages_and_choices=[*QUESTION, choice], reward=reward)
            for choice, reward in [(taught, 1.0), *((other, 0.0) for other in free)]
        ]
    )
    result = await backend.train(model, [group], learning_rate=1e-2)
    assert result.metrics["data/step_num_gradient_steps"] == 1
    assert likely() > before + 0.1


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"structured_outputs": {"choice": ["B2"], "regex": "B2"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["B2"], "guided_regex": "B2"}, "guided_regex"),
    ],
    ids=str,
)
async def test_what_the_embedded_sampler_cannot_hold_to_is_refused(home, asked, param):
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(home[0], extra_body=asked)
    assert caught.value.param == param


def test_a_teacher_without_a_reply_that_can_be_said_again():
    with pytest.raises(ValueError, match="not in base_tools"):
        get_guided_completion_params(called("fly", "{}"), TOOLS)
    with pytest.raises(ValueError, match="not in base_tools"):
        get_guided_completion_params(called("play", "{}"))
    for broken in ('{"cell": "B2"', '["B2"]', '"B2"', "B2"):
        with pytest.raises(
            ValueError, match="called play with .*B2.*, which is not a JSON object: sample another reply"
        ):
            get_guided_completion_params(called("play", broken), TOOLS)
    with pytest.raises(ValueError, match="nothing to repeat"):
        get_guided_completion_params(teacher())


def test_schemas_with_one_way_out():
    frozen = freeze_tool_schema(TOOLS[1], {"cell": "B2", "turn": {"of": [1, 2]}})["function"]["parameters"]
    assert only_arguments(frozen) == {"cell": "B2", "turn": {"of": [1, 2]}}
    assert only_arguments(freeze_tool_schema(TOOLS[1], {})["function"]["parameters"]) == {}
    theirs = create_model("PlayFrozenArgs", cell=(Literal["B2"], ...), turn=(Literal[3], ...)).model_json_schema()
    assert only_arguments(theirs) == {"cell": "B2", "turn": 3}
    assert "const" not in str(TOOLS)
    assert art.guided_completion.freeze_tool_schema is freeze_tool_schema


PERSON = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "kind"],
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{0,5}$"},
        "kind": {"enum": ["cat", "dog"]},
        "age": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 30}, {"type": "null"}]},
    },
}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": PERSON, "strict": True}}
GRAMMAR = 'start: "go " ("left" | "right")'
FORMATTED = {
    "json_schema": ({"response_format": SCHEMA_FORMAT}, None),
    "guided_json": ({"extra_body": {"guided_json": json.dumps(PERSON)}}, None),
    "json_object": ({"response_format": {"type": "json_object"}}, None),
    "regex": ({"extra_body": {"guided_regex": "[AB][12]( or [AB][12])?"}}, r"[AB][12]( or [AB][12])?"),
    "grammar": ({"extra_body": {"guided_grammar": GRAMMAR}}, r"go (left|right)"),
    "structured": ({"extra_body": {"structured_outputs": {"regex": "[0-9]{3}"}}}, r"[0-9]{3}"),
}


def is_pet(value):
    return (
        {"name", "kind"} <= {*value} <= {*PERSON["properties"]}
        and re.fullmatch("[A-Z][a-z]{0,5}", value["name"])
        and value["kind"] in ("cat", "dog")
        and (value.get("age") is None or type(value["age"]) is int and 0 <= value["age"] <= 30)
    )


@pytest.mark.parametrize("kind", FORMATTED)
async def test_a_reply_has_the_format_or_is_too_long(home, kind):
    model, _ = home
    options, pattern = FORMATTED[kind]
    reply = await ask(model, max_tokens=80, n=24, seed=3, **options)
    ended = [choice for choice in reply.choices if choice.finish_reason == "stop"]
    assert len(ended) > 3
    for choice in ended:
        assert choice.model_extra["guide"]  # its logprobs are those of the permitted tokens
        text = choice.message.content
        assert re.fullmatch(pattern, text) if pattern else isinstance(json.loads(text), dict)
        assert kind not in ("json_schema", "guided_json") or is_pet(json.loads(text))
    assert {choice.finish_reason for choice in reply.choices} <= {"stop", "length"}


async def test_a_text_completion_has_a_format_too(home):
    model, _ = home
    reply = await model.openai_client().completions.create(
        model=model.get_inference_name(), prompt="Say", max_tokens=9, n=8, extra_body={"guided_regex": "[xyz]{2}"}
    )
    assert all(re.fullmatch("[xyz]{2}", choice.text) for choice in reply.choices)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON | {"not": {}}}}},
            "response_format",
        ),
        ({"extra_body": {"guided_regex": "(?=a)"}}, "guided_regex"),
        ({"extra_body": {"guided_json": "{"}}, "guided_json"),
        ({"extra_body": {"guided_grammar": "start: missing"}}, "guided_grammar"),
    ],
)
async def test_a_format_that_cannot_be_followed_is_an_error(home, options, param):
    with pytest.raises(openai.BadRequestError) as raised:
        await ask(home[0], **options)
    assert raised.value.body["param"] == param


async def test_masked_sampling_follows_the_renormalized_distribution(home):
    """Chi-square of 2,000 replies against the probabilities of the permitted tokens."""
    model, _ = home
    words = ["A", "B", "C"]
    counts, logprobs = {word: 0 for word in words}, {}
    for batch in range(20):
        reply = await ask(model, max_tokens=2, n=100, seed=batch, extra_body={"guided_regex": "[ABC]"})
        for choice in reply.choices:
            counts[choice.message.content] += 1
            logprobs[choice.message.content] = choice.model_extra["token_logprobs"][0]
    shares = [math.exp(logprobs[word]) for word in words]
    assert sum(shares) == pytest.approx(1, abs=1e-3)
    expected = [2000 * share / sum(shares) for share in shares]
    chi_square = sum((counts[word] - e) ** 2 / e for word, e in zip(words, expected, strict=True))
    assert chi_square < 13.8  # p = 0.001 with two degrees of freedom
