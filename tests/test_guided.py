"""A teacher's reply said again by the student: words and calls, in the student's own tokens, trained like others."""
from typing import Literal

import openai
import pytest
from homes import QUESTION, at_home
from openai.types.chat import ChatCompletion
from pydantic import create_model
from tiny import CHATML

import art_nb as art
from art_nb.calls import only_arguments
from art_nb.guided_completion import freeze_tool_schema, get_guided_completion_params
from art_nb.policy import sequence_logprobs

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {
    "type": "object", "properties": {"cell": {"type": "string"}, "turn": {"type": "integer"}}}}}
    for name in ("look", "play")]


OFFER = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"


@pytest.fixture
async def home(tiny_model_dir, tmp_path):
    """A registered model, told of its tools in few words, and its backend."""
    template = {"chat_template": OFFER + CHATML}
    async with at_home(tiny_model_dir, tmp_path, "student", _internal_config=template) as pair:
        yield pair


def teacher(**message):
    """What another model has said."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": None} | message}
    return ChatCompletion.model_validate(
        {"id": "t", "object": "chat.completion", "created": 0, "model": "teacher", "choices": [choice]})


def called(name, arguments):
    return teacher(tool_calls=[{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}])


async def ask(model, **options):
    """The whole reply, as long as the model likes."""
    return await model.openai_client().with_options(max_retries=0).chat.completions.create(
        model=model.get_inference_name(), messages=QUESTION, **options)


async def test_words_are_said_again_in_the_students_tokens(home):
    model, backend = home
    guided_choice, tool_choice, tools = get_guided_completion_params(teacher(content="the move is B2, not b2"))
    assert (tool_choice, tools) == (None, None)
    for seed in range(3):
        reply = await ask(model, seed=seed, logprobs=True, extra_body={"guided_choice": guided_choice})
        choice, = reply.choices
        assert choice.message.content == "the move is B2, not b2"
        assert choice.finish_reason == "stop"
        tokenizer = backend.home(model).policy.tokenizer
        spelt = tokenizer(guided_choice[0], add_special_tokens=False)["input_ids"]
        assert choice.model_extra["token_ids"] == [*spelt, tokenizer.eos_token_id]
        assert choice.model_extra["cut"]            # its logprobs are not those of a free reply


async def test_one_of_several_choices(home):
    model, _ = home
    said = [(await ask(model, seed=seed, extra_body={"structured_outputs": {"choice": ["B2", "B2 C3"], "json": None}}))
            .choices[0].message.content for seed in range(24)]
    assert {*said} == {"B2", "B2 C3"}
    long, = (await ask(model, max_tokens=9, extra_body={"guided_choice": ["B2"], "ignore_eos": True})).choices
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
        ("play", '{"cell": "B2 \u00e9", "turn": 3}')]
    assert last.finish_reason == "tool_calls"
    assert last.model_extra["cut"]


async def test_a_tool_that_is_not_frozen_leaves_the_call_free(home):
    model, _ = home
    choice, = (await ask(model, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "play"}},
                         max_tokens=6)).choices
    assert not choice.model_extra["cut"]


async def test_the_students_own_words_become_likelier(home):
    model, backend = home
    guided, _, _ = get_guided_completion_params(teacher(content="B2"))
    taught = (await ask(model, extra_body={"guided_choice": guided})).choices[0]
    free = [(await ask(model, seed=seed, max_tokens=6)).choices[0] for seed in range(3)]
    ids = taught.model_extra["prompt_token_ids"] + taught.model_extra["token_ids"]
    at = backend.home(model)

    def likely():
        return at.worker.call(sequence_logprobs, at.policy, ids)[-len(taught.model_extra["token_ids"]):].sum()

    before = likely()
    group = art.TrajectoryGroup([art.Trajectory(messages_and_choices=[*QUESTION, choice], reward=reward)
                                 for choice, reward in [(taught, 1.0), *((other, 0.0) for other in free)]])
    result = await backend.train(model, [group], learning_rate=1e-2)
    assert result.metrics["data/step_num_gradient_steps"] == 1
    assert likely() > before + 0.1


@pytest.mark.parametrize(("asked", "param"), [
    ({"guided_json": {"type": "object"}}, "guided_json"), ({"guided_regex": "B[12]"}, "guided_regex"),
    ({"structured_outputs": {"choice": ["B2"], "regex": "B2"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"), ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["B2"], "guided_regex": "B2"}, "guided_regex")], ids=str)
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
        with pytest.raises(ValueError, match="called play with .*B2.*, which is no JSON object: ask it again"):
            get_guided_completion_params(called("play", broken), TOOLS)
    with pytest.raises(ValueError, match="nothing to say"):
        get_guided_completion_params(teacher())


def test_schemas_with_one_way_out():
    frozen = freeze_tool_schema(TOOLS[1], {"cell": "B2", "turn": {"of": [1, 2]}})["function"]["parameters"]
    assert only_arguments(frozen) == {"cell": "B2", "turn": {"of": [1, 2]}}
    assert only_arguments(freeze_tool_schema(TOOLS[1], {})["function"]["parameters"]) == {}
    theirs = create_model("PlayFrozenArgs", cell=(Literal["B2"], ...), turn=(Literal[3], ...)).model_json_schema()
    assert only_arguments(theirs) == {"cell": "B2", "turn": 3}
    assert "const" not in str(TOOLS)
    assert art.guided_completion.freeze_tool_schema is freeze_tool_schema
