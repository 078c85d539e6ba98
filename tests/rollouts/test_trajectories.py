"""Trajectories and groups: ART's semantics and the traps on the way to them."""

import asyncio
import copy
import gc
import inspect
import json
import math
import pickle
import warnings
from datetime import UTC, datetime

import numpy as np
import pytest
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel, ValidationError

from art_nb.core.types import RolloutError
from art_nb.rollouts.exchanges import ChatCompletionsExchange, ConversationIndex, ResponsesExchange
from art_nb.rollouts.scenarios import distinct_scenarios
from art_nb.rollouts.trajectories import (
    History,
    PendingGroup,
    PydanticException,
    Trajectory,
    TrajectoryGroup,
    choices,
    get_messages,
    is_choice,
)

pytestmark = pytest.mark.filterwarnings("error")
USER = {"role": "user", "content": "hi"}


def said(text, **extra):
    message = {"role": "assistant", "content": text, **extra.pop("message", {})}
    return Choice.model_validate({"index": 0, "finish_reason": "stop", "message": message, **extra})


class Board(Trajectory):
    board: str
    turns: list[int] = []


async def make(reward, steps=0):
    for _ in range(steps):
        await asyncio.sleep(0)
    return Trajectory(reward=reward)


async def crash():
    raise ValueError("boom")


# what goes in comes out


def test_messages_are_kept_verbatim():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
    entries = [
        {"role": "system", "content": [{"type": "text", "text": "s", "cache": True}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}, "x": 1}]
    trajectory = Trajectory(messages_and_choices=entries, tools=tools)
    assert trajectory.messages_and_choices == entries
    assert trajectory.messages() == entries
    assert Trajectory.model_validate_json(trajectory.model_dump_json()).messages_and_choices == entries
    assert trajectory.tools[0]["x"] == 1


def test_token_ids_survive_json_and_copies():
    choice = said("b2", prompt_token_ids=[1, 2], token_ids=[3, 4])
    history = History(messages_and_choices=[choice])
    trajectory = Trajectory(messages_and_choices=[USER, choice], additional_histories=[history])
    for other in (
        Trajectory.model_validate_json(trajectory.model_dump_json()),
        Trajectory.model_validate(trajectory.model_dump()),
        trajectory.model_copy(deep=True),
        copy.deepcopy(trajectory),
        pickle.loads(pickle.dumps(trajectory)),
    ):
        assert [c.model_extra["token_ids"] for c in choices(other)] == [[3, 4], [3, 4]]
        assert is_choice(other.messages_and_choices[1])


def test_a_foreign_choice_becomes_ours():
    class Choices(BaseModel):
        finish_reason: str = "stop"
        index: int = 0
        message: dict = {"role": "assistant", "content": "hi"}
        token_ids: list[int] = [7]

    [choice] = Trajectory(messages_and_choices=[Choices()]).messages_and_choices
    assert is_choice(choice)
    assert choice.model_extra["token_ids"] == [7]


@pytest.mark.parametrize("entry", ["text", 3, None, {"content": "x"}, said("x").message])
def test_what_is_no_entry_is_refused(entry):
    with pytest.raises(ValidationError):
        Trajectory(messages_and_choices=[entry])


def test_messages_follow_the_list_and_fill_empty_content():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    trajectory = Trajectory(messages_and_choices=[USER])
    assert trajectory.messages() == [USER]
    trajectory.messages_and_choices.append(said(None, message={"tool_calls": [call], "reasoning_content": "r"}))
    reply = trajectory.messages()[1]
    assert (reply["content"], reply["tool_calls"], reply["reasoning_content"]) == ("", [call], "r")
    assert get_messages([said("x")]) == [{"role": "assistant", "content": "x"}]
    assert get_messages([said("x").message])[0]["content"] == "x"


# rewards and metrics


@pytest.mark.parametrize(
    "reward", [0, 1, True, 0.5, np.float32(0.5), np.float64(2), np.int64(3), np.bool_(True), "1.5"]
)
def test_rewards_of_any_number_type_become_floats(reward):
    trajectory = Trajectory(reward=reward)
    assert type(trajectory.reward) is float
    trajectory.reward = reward
    assert type(trajectory.reward) is float
    assert trajectory.reward == float(reward)


@pytest.mark.parametrize("reward", [None, "good", [1.0]])
def test_rewards_that_are_no_numbers_are_refused(reward):
    trajectory = Trajectory()
    with pytest.raises(ValidationError):
        trajectory.reward = reward


def test_metrics_keep_bools_and_take_numpy():
    trajectory = Trajectory(metrics={"won": True, "n": np.int64(3), "x": np.float32(0.5), "b": np.bool_(False)})
    assert trajectory.metrics == {"won": True, "n": 3, "x": 0.5, "b": False}
    assert [type(v) for v in trajectory.metrics.values()] == [bool, int, float, bool]


def test_a_dump_is_quiet_valid_json_and_can_be_read_back():
    trajectory = Trajectory(metadata={"seed": np.int64(3), "grid": np.zeros((2, 2))})
    trajectory.metrics |= {"loss": float("nan"), "won": np.bool_(True), "x": np.float32(1.5)}
    group = TrajectoryGroup([trajectory], metrics={"spread": 0.5})
    group.metrics["n"] = np.int64(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = json.loads(group.model_dump_json())
        group.model_dump()
    again = TrajectoryGroup.model_validate(data)
    assert again.trajectories[0].metrics == {"won": True, "x": 1.5}
    assert again.trajectories[0].metadata == {"seed": 3, "grid": [[0, 0], [0, 0]]}
    assert again.metrics == {"spread": 0.5, "n": 4}


async def test_durations_are_added_up_even_on_failure():
    trajectory = Trajectory()

    async def tool():
        async with trajectory.track_duration("tool"):
            await asyncio.sleep(0.005)
            raise ValueError("boom")

    for _ in range(2):
        with pytest.raises(ValueError, match="boom"):
            await tool()
    assert trajectory.metrics["tool_duration"] >= 0.01
    assert trajectory.finish() is trajectory
    assert trajectory.metrics["duration"] >= 0.01
    assert "start_time" not in trajectory.model_dump()


def test_for_logging_says_what_is_trained():
    trajectory = Trajectory(
        messages_and_choices=[USER, said("x")],
        metadata={"a": np.int64(1)},
        reward=1,
        additional_histories=[History(messages_and_choices=[said("y")])],
    )
    trajectory.log("line")
    shown = json.loads(json.dumps(trajectory.for_logging()))
    assert [m["trainable"] for m in shown["messages"]] == [False, True]
    assert shown["additional_histories"] == [[{"role": "assistant", "content": "y", "trainable": True}]]
    assert (shown["logs"], shown["reward"]) == (["line"], 1.0)


def test_text_forms_stay_short():
    trajectory = Board(board="x", messages_and_choices=[USER] * 1000)
    assert str(trajectory) == repr(trajectory) == "Board(reward=0.0, metrics={}, metadata={})"
    assert len(repr(TrajectoryGroup([trajectory] * 8))) < 120


# groups


def test_a_group_splits_off_exceptions():
    notes = {"metadata": {"s": 1}, "metrics": {"m": 2}, "logs": ["l"]}
    group = TrajectoryGroup([Trajectory(reward=1), ValueError("a")], exceptions=[KeyError("b")], **notes)
    assert (len(group), [t.reward for t in group]) == (1, [1.0])
    assert [(e.type, e.message) for e in group.exceptions] == [("ValueError", "a"), ("KeyError", "'b'")]
    assert (group.metadata, group.metrics, group.logs) == ({"s": 1}, {"m": 2}, ["l"])
    group.log("m")
    assert group.logs == ["l", "m"]
    assert len(TrajectoryGroup()) == 0
    assert len(TrajectoryGroup(iter([Trajectory()]))) == 1


def test_groups_do_not_share_defaults():
    first, second = TrajectoryGroup(), TrajectoryGroup()
    first.metadata["a"] = 1
    first.log("x")
    assert (second.metadata, second.logs) == ({}, [])


def test_subclasses_survive_grouping_copying_and_dumping():
    class MyGroup(TrajectoryGroup):
        difficulty: int

    member = Board(board="x.o", reward=1)
    group = MyGroup([member], difficulty=3)
    assert group.trajectories[0] is member
    for other in (copy.deepcopy(group), group.model_copy(deep=True), MyGroup.model_validate(group.model_copy())):
        assert (type(other.trajectories[0]), other.trajectories[0].board, other.difficulty) == (Board, "x.o", 3)
    dumped = json.loads(group.model_dump_json())
    assert (dumped["trajectories"][0]["board"], dumped["difficulty"]) == ("x.o", 3)
    assert MyGroup.model_validate(dumped).difficulty == 3
    assert Board.model_validate(dumped["trajectories"][0]).model_dump() == member.model_dump()


def test_copies_and_pickles_of_a_group_are_equal_and_apart():
    group = TrajectoryGroup([Trajectory(reward=1), ValueError("x")], metadata={"a": [1]})
    for other in (copy.deepcopy(group), group.model_copy(deep=True), pickle.loads(pickle.dumps(group))):
        assert other == group
        other.metadata["a"].append(2)
        assert group.metadata == {"a": [1]}
    assert TrajectoryGroup.model_validate_json(group.model_dump_json()).exceptions == group.exceptions


def test_a_recorded_traceback_has_its_causes_and_holds_no_frames():
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise RolloutError("outer") from inner
    except RolloutError as error:
        record = PydanticException.of(error)
    assert "KeyError: 'inner'" in record.traceback
    assert record.type == "art_nb.types.RolloutError"
    assert PydanticException.model_validate(record.model_dump()) == record


# groups in the making


async def test_a_generator_of_rollouts_is_awaitable_and_knows_its_size():
    pending = TrajectoryGroup((make(i, 3 - i) for i in range(3)), metadata={"a": 1}, exceptions=[ValueError("early")])
    assert isinstance(pending, PendingGroup)
    assert inspect.isawaitable(pending)
    assert pending._num_trajectories == 3
    group = await pending
    assert [t.reward for t in group] == [0.0, 1.0, 2.0]
    assert (group.metadata, group.exceptions[0].message) == ({"a": 1}, "early")


async def test_awaitables_of_every_kind_are_taken():
    class Later:
        def __await__(self):
            return make(3).__await__()

    loop_task = asyncio.create_task(make(1))
    future = asyncio.get_running_loop().create_future()
    future.set_result(Trajectory(reward=2))
    group = await TrajectoryGroup([loop_task, future, Later(), make(4)])
    assert sorted(t.reward for t in group) == [1, 2, 3, 4]


async def test_subclass_groups_in_the_making_keep_their_class():
    class MyGroup(TrajectoryGroup):
        difficulty: int

    group = await MyGroup([make(1)], difficulty=2)
    assert (type(group), group.difficulty) == (MyGroup, 2)


async def test_alone_a_group_is_strict_and_stops_the_siblings():
    ended = []

    async def slow():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(1)

    with pytest.raises(ValueError, match="boom"):
        await TrajectoryGroup([slow(), slow(), crash()])
    assert ended == [1, 1]
    with pytest.raises(RolloutError, match="NoneType"):
        await TrajectoryGroup([asyncio.sleep(0)])
    with pytest.raises(RolloutError, match="nan"):
        await TrajectoryGroup([make(math.nan)])


@pytest.mark.parametrize("other", [lambda: Trajectory(), lambda: ValueError("x"), lambda: 3])
def test_mixed_kinds_are_a_type_error_without_further_noise(other):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError, match="awaitables"):
            TrajectoryGroup([make(1), other()])
        gc.collect()


def test_things_that_are_no_trajectories_are_a_type_error():
    with pytest.raises(TypeError, match="int"):
        TrajectoryGroup([Trajectory(), 3])


TIMES = dict.fromkeys(("start_time", "end_time"), datetime(2026, 1, 1, tzinfo=UTC))


def responses_exchange(text, request=(), **response):
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": f"re {text}"}]}]
    body = {"model": "m", "input": text, **dict(request)}
    return ResponsesExchange(request=body, response={"output": output, **response}, **TIMES)


def test_replies_without_an_id_are_independent_conversations():
    """Some providers send no ID. A later request names none, either."""
    index = ConversationIndex([responses_exchange("one"), responses_exchange("two"), responses_exchange("3", id=None)])
    assert [len(conversation.entries) for conversation in index.conversations] == [2, 2, 2]
    named = [responses_exchange("one", id="r1"), responses_exchange("two", {"previous_response_id": "r1"}, id="r2")]
    assert [len(conversation.entries) for conversation in ConversationIndex(named).conversations] == [4]


def chat_exchanges(turns):
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn}"})
        reply = {"role": "assistant", "content": f"answer {turn}"}
        choice = {"index": 0, "message": reply, "finish_reason": "stop"}
        response = {"id": str(turn), "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        request = {"model": "m", "messages": [*messages]}
        yield ChatCompletionsExchange(request=request, response=response, **TIMES)
        messages.append(reply)


def test_a_long_conversation_has_one_open_place():
    """A copy hashes all of them, for each request."""
    index = ConversationIndex(chat_exchanges(60))
    assert len(index.conversations) == 1 and len(index.copy()._open) == len(index._open) == 1


def test_functions_of_a_namespace_are_recorded_with_their_full_names():
    """Codex sends the tools of MCP servers in namespaces, also to other providers."""
    read = {"type": "function", "name": "read", "description": "Read.", "parameters": {"type": "object"}}
    tools = [{"type": "namespace", "name": "mcp__fs__", "tools": [read]}, read, {"type": "web_search"}]
    call = {"type": "function_call", "namespace": "mcp__fs__", "name": "read", "arguments": "{}", "call_id": "c"}
    exchange = responses_exchange("Hi", {"tools": tools}, id="r1").model_copy(update={"response": {"output": [call]}})
    (conversation,) = ConversationIndex([exchange]).conversations
    functions = [tool["function"] for tool in conversation.tools]
    plain_read = {key: value for key, value in read.items() if key != "type"}
    assert functions == [plain_read | {"name": "mcp__fs__read"}, plain_read]
    assert conversation.entries[-1]["tool_calls"][0]["function"]["name"] == "mcp__fs__read"


def test_the_order_of_keys_does_not_make_a_scenario_distinct():
    first, second = {"role": "user", "content": "Hi"}, {"content": "Hi", "role": "user"}
    scenarios = [{"messages": [message], "tools": None, "metadata": {}} for message in (first, second)]
    assert distinct_scenarios(scenarios) == scenarios[:1]
