"""Required tool calls over 50 schemas on real models: every call parses and validates, or the reply reports `length`.

`make test` runs a part of it, `make test-full` 10,000 calls for each model and sampler.
"""

import asyncio
import json
import os
from itertools import product

import pytest
from jsonschema import Draft202012Validator
from support.audit import FULL

import art_nb as art

pytestmark = [pytest.mark.timeout(5 * 3600 if FULL else 600), pytest.mark.slow]
CALLS = {"smollm2-135m": 10_000 if FULL else 50, "gemma3-270m": 10_000 if FULL else 10}
TEXT, NUMBER, FLAG = {"type": "string", "maxLength": 12}, {"type": "integer"}, {"type": "boolean"}
PARTS = {
    "text": TEXT,
    "number": {"type": "integer", "minimum": -3, "maximum": 40},
    "share": {"type": "number", "minimum": 0, "maximum": 1},
    "enum": {"enum": ["red", "green", 7, None]},
    "date": {"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]-[0-3][0-9]$"},
    "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{1,4}$"},
    "union": {"anyOf": [TEXT, NUMBER, {"type": "null"}]},
    "list": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 1, "maxItems": 3},
    "nested": {
        "type": "object",
        "properties": {"to": {"type": "object", "properties": {"city": TEXT, "zip": NUMBER}, "required": ["city"]}},
        "required": ["to"],
    },
    "choice": {"oneOf": [{"const": "all"}, {"type": "object", "properties": {"id": NUMBER}, "required": ["id"]}]},
}


def schemas():
    """50 schemas: each part alone, and each part next to four others, required or optional."""
    names = [*PARTS]
    yield from ({"type": "object", "properties": {name: PARTS[name]}, "required": [name]} for name in names)
    for step, name in product((1, 2, 3, 4), names):
        other = names[(names.index(name) + step) % len(names)]
        required = [name] if step % 2 else [name, other]
        yield {"type": "object", "properties": {name: PARTS[name], other: PARTS[other], "sure": FLAG}} | {
            "required": required
        }


SCHEMAS = [schema | {"additionalProperties": False} for schema in schemas()]


def test_there_are_fifty_schemas():
    assert len({json.dumps(schema) for schema in SCHEMAS}) == 50


async def call(model, schema, seed, names):
    """One required or named call. Return its finish reason, or the reason why it is wrong."""
    tools = [
        {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}
        for name in names
    ]
    named = {"type": "function", "function": {"name": names[0]}}
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(),
        messages=[{"role": "user", "content": "Call a tool with any valid arguments."}],
        tools=tools,
        tool_choice=named if seed % 2 else "required",
        max_completion_tokens=160 if seed % 4 else 10 + seed % 37,  # a small limit can end at the end of a call
        seed=seed,
    )
    choice = reply.choices[0]
    if choice.finish_reason == "length":
        return "length" if not choice.message.tool_calls else "a truncated reply has a call"
    if choice.finish_reason != "tool_calls" or len(choice.message.tool_calls) != 1:
        return f"{choice.finish_reason}: {choice.message.content!r}"
    function = choice.message.tool_calls[0].function
    errors = [error.message for error in Draft202012Validator(schema).iter_errors(json.loads(function.arguments))]
    return f"{function.arguments}: {errors}" if errors or function.name not in names else "tool_calls"


@pytest.mark.parametrize("base_model", CALLS)
async def test_required_calls_are_valid(tmp_path, base_model):
    model, calls = art.TrainableModel(name="caller", project="tests", base_model=base_model), CALLS[base_model]
    options = {"sampler": os.environ["ART_NB_TEST_SAMPLER"]} if "ART_NB_TEST_SAMPLER" in os.environ else {}
    async with art.LocalBackend(path=tmp_path, verbose=False, **options) as backend:
        await model.register(backend)
        limit = asyncio.Semaphore(64)

        async def limited(seed, schema):
            async with limit:
                result = await call(model, schema, seed, ["play", "look"][: 1 + seed % 3 % 2])
            if seed % 1000 == 999:
                print(f"{base_model}: call {seed + 1} of {calls}", flush=True)
            return result

        # one schema after another, so that the prompts are in the prefix cache
        schemas = (SCHEMAS[seed * len(SCHEMAS) // calls] for seed in range(calls))
        results = await asyncio.gather(*(limited(seed, schema) for seed, schema in enumerate(schemas)))
    wrong = [result for result in results if result not in ("tool_calls", "length")]
    print(f"{base_model}: {results.count('tool_calls')} calls, {results.count('length')} truncated, {len(wrong)} wrong")
    assert not wrong, wrong[:5]
    assert results.count("tool_calls") > calls / 2
