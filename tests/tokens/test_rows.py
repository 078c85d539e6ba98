"""Rows hold what was sampled, all of it, once, with its own logprobs."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat.chat_completion import Choice

from art_nb.core.types import TokenError
from art_nb.rollouts.trajectories import History, Trajectory, TrajectoryGroup
from art_nb.tokens.rows import group_rows, trajectory_rows

QUICK = settings(max_examples=150, derandomize=True)
USER = {"role": "user", "content": "go"}


def choice(prompt, sampled, logprobs=True, finish="stop"):
    """A choice as our endpoint sends it; the logprob of token t is -t, so that a shift shows."""
    if logprobs is True:
        logprobs = [-float(token) for token in sampled]
    entries = [{"token": "x", "logprob": value, "top_logprobs": []} for value in logprobs or []]
    return Choice.model_validate(
        {
            "index": 0,
            "finish_reason": finish,
            "message": {"role": "assistant", "content": "x"},
            "logprobs": {"content": entries} if logprobs else None,
            "prompt_token_ids": prompt,
            "token_ids": sampled,
        }
    )


def trajectory(*entries, histories=()):
    return Trajectory(
        messages_and_choices=list(entries),
        additional_histories=[History(messages_and_choices=list(one)) for one in histories],
    )


def shape(row):
    """Tokens as one string, the trained ones in brackets."""
    marked = zip(row.tokens, row.sampled, strict=True)
    return " ".join(f"[{token}]" if trained else str(token) for token, trained in marked)


def shapes(made):
    return [shape(row) for row in trajectory_rows(made)]


def test_turns_that_extend_each_other_are_one_row():
    (row,) = trajectory_rows(
        trajectory(
            USER, choice([1, 2], [7, 8]), USER, choice([1, 2, 7, 8, 3, 4], [9]), choice([1, 2, 7, 8, 3, 4, 9], [5])
        ),
        3,
    )
    assert shape(row) == "1 2 [7] [8] 3 4 [9] [5]"
    assert (row.trajectory, row.truncated) == (3, False)
    assert (row.tokens.dtype, row.sampled.dtype, row.logprobs.dtype) == (np.int32, bool, np.float32)
    assert np.array_equal(np.isnan(row.logprobs), ~row.sampled)
    assert np.array_equal(row.logprobs[row.sampled], -row.tokens[row.sampled].astype(np.float32))


def test_a_prompt_that_was_rewritten_starts_a_row():
    assert shapes(trajectory(choice([1, 2], [7, 8]), choice([1, 2, 8, 3], [9]), choice([1, 2, 8, 3, 9], [6]))) == [
        "1 2 [7] [8]",
        "1 2 8 3 [9] [6]",
    ]


def test_a_shorter_prompt_starts_a_row():
    assert shapes(trajectory(choice([1, 2], [7, 8]), choice([1, 2, 7], [8]))) == ["1 2 [7] [8]", "1 2 7 [8]"]


def test_siblings_of_one_prompt_are_all_trained():
    assert shapes(trajectory(choice([1], [7]), choice([1], [8]), choice([1], [8]))) == ["1 [7]", "1 [8]", "1 [8]"]


def test_shared_turns_are_trained_in_the_first_history_only():
    first, second = choice([1], [7]), choice([1, 7, 2], [8])
    fork = choice([1, 7, 3], [9])
    again = first.model_copy(deep=True)
    assert shapes(trajectory(first, second, histories=[[again, fork], [first, second], [fork]])) == [
        "1 [7] 2 [8]",
        "1 7 3 [9]",
    ]
    assert shapes(trajectory(USER, histories=[[first], [first, second]])) == ["1 [7]", "1 7 2 [8]"]


def test_the_same_words_after_another_prompt_are_another_sample():
    assert shapes(trajectory(choice([1], [7]), histories=[[choice([2], [7])]])) == ["1 [7]", "2 [7]"]
    assert shapes(trajectory(choice([1], [2, 3]), histories=[[choice([1, 2], [3])]])) == ["1 [2] [3]", "1 2 [3]"]


def test_assistant_dicts_are_context():
    said = {"role": "assistant", "content": "few-shot"}
    assert shapes(trajectory(USER, said, choice([1, 5, 6], [7]))) == ["1 5 6 [7]"]
    assert trajectory_rows(trajectory(USER, said)) == []


def test_truncated_tells_of_the_last_choice():
    cut = [choice([1], [7], finish="length"), choice([1, 7, 2], [8])]
    assert [row.truncated for row in trajectory_rows(trajectory(*cut))] == [False]
    assert [row.truncated for row in trajectory_rows(trajectory(cut[0]))] == [True]
    assert [row.truncated for row in trajectory_rows(trajectory(cut[0], choice([2], [3])))] == [True, False]


@pytest.mark.parametrize("logprobs", [None, []])
def test_missing_logprobs_are_nan(logprobs):
    (row,) = trajectory_rows(trajectory(choice([1, 2], [7, 8], logprobs=logprobs)), strict=True)
    assert np.isnan(row.logprobs).all()
    assert row.sampled.tolist() == [False, False, True, True]


def test_a_wrong_number_of_logprobs_names_the_turn():
    wrong = trajectory(choice([1], [7]), choice([1, 7], [8, 9], logprobs=[-1.0]))
    with pytest.raises(TokenError, match=r"trajectory 4, turn 2: 1 logprobs for 2 sampled tokens"):
        trajectory_rows(wrong, 4)
    with pytest.raises(TokenError, match=r"trajectory 1, additional history 1, turn 2"):
        group_rows(TrajectoryGroup([trajectory(), trajectory(histories=[wrong.messages_and_choices])]))


def without_ids(**given):
    made = choice([1], [7])
    made.model_extra.clear()
    made.model_extra.update(given)
    return made


@pytest.mark.parametrize(
    "given", [{}, {"token_ids": [7]}, {"prompt_token_ids": [1]}, {"prompt_token_ids": [], "token_ids": [7]}]
)
def test_choices_without_ids_give_nothing_or_an_error(given):
    bare = without_ids(**given)
    assert trajectory_rows(trajectory(USER, bare)) == []
    with pytest.raises(TokenError, match="trajectory 0, turn 1 carries no prompt_token_ids"):
        trajectory_rows(trajectory(USER, bare), strict=True)


def test_a_choice_without_ids_is_context_between_others():
    assert shapes(trajectory(choice([1], [7]), without_ids(), choice([1, 7, 2, 6, 3], [8]))) == ["1 [7] 2 6 3 [8]"]


def test_nothing_sampled_gives_no_row():
    assert trajectory_rows(trajectory(choice([1], []))) == []
    with pytest.raises(TokenError, match=r"no choice to train"):
        trajectory_rows(trajectory(USER), strict=True)


@pytest.mark.parametrize("ids", [[1.5], ["1"], [[1]], [-1], [2**40], "12", 7, [True], [None], [[1], [2, 3]]])
def test_ids_that_are_none_are_refused(ids):
    with pytest.raises(TokenError, match="(?s)invalid `token_ids` .*: expected a flat list"):
        trajectory_rows(trajectory(without_ids(prompt_token_ids=[1], token_ids=ids)))


def test_arrays_and_json_give_the_same_rows():
    made = trajectory(choice([1, 2], [7, 8]), choice([1, 2, 7, 8, 3], [9], finish="length"))
    arrays = without_ids(prompt_token_ids=np.array([1, 2], dtype=np.int64), token_ids=np.array([7], dtype=np.uint16))
    read_again = Trajectory.model_validate(json.loads(made.model_dump_json()))
    assert shapes(read_again) == shapes(made) == ["1 2 [7] [8] 3 [9]"]
    assert shapes(trajectory(arrays)) == ["1 2 [7]"]
    assert np.array_equal(trajectory_rows(read_again)[0].logprobs, trajectory_rows(made)[0].logprobs, equal_nan=True)


def test_rows_of_a_group_know_their_trajectory():
    two = trajectory(choice([1], [8]), choice([2], [9]))
    group = TrajectoryGroup([trajectory(choice([1], [7])), trajectory(USER), two])
    assert [(row.trajectory, shape(row)) for row in group_rows(group)] == [(0, "1 [7]"), (2, "1 [8]"), (2, "2 [9]")]


# -- any conversation --------------------------------------------------------------------------------------------

small = st.lists(st.integers(0, 3), max_size=3)
turns = st.lists(st.tuples(small, small, st.booleans()), max_size=6)


def conversation(turns):
    """Choices of a conversation whose prompt now and then is rewritten (its first token is dropped)."""
    seen, made = [9], []
    for new, sampled, rewritten in turns:
        seen = (seen[1:] or [9] if rewritten else seen) + new
        made.append(choice(seen, sampled))
        seen = seen + sampled
    return made


@QUICK
@given(turns=turns)
def test_every_sampled_token_has_its_context(turns):
    made = conversation(turns)
    rows = trajectory_rows(trajectory(*made))
    found = {
        (tuple(row.tokens[:place].tolist()), int(row.tokens[place]))
        for row in rows
        for place in np.flatnonzero(row.sampled)
    }
    expected = {
        (tuple(one.prompt_token_ids + one.token_ids[:n]), token)
        for one in made
        for n, token in enumerate(one.token_ids)
    }
    assert found == expected
    assert sum(row.sampled.sum() for row in rows) == sum(len(one.token_ids) for one in made)


@QUICK
@given(turns=turns, place=st.integers(0, 6))
def test_a_fork_adds_only_what_is_new(turns, place):
    made = conversation(turns)
    forked = trajectory(*made, histories=[[*made[:place], choice([8, 8], [5])]])
    trained = sum(row.sampled.sum() for row in trajectory_rows(forked))
    assert trained == sum(len(one.token_ids) for one in made) + 1


@QUICK
@given(turns=turns)
def test_a_conversation_that_is_only_appended_to_is_one_row(turns):
    made = conversation([(new, [*sampled, 4], False) for new, sampled, _ in turns])
    assert len(trajectory_rows(trajectory(*made))) == min(1, len(made))
