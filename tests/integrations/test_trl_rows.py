"""Rows of preferences from trajectories with further histories, and without replies."""

import pytest

import art_nb as art
from art_nb.integrations.trl_rows import trl_dpo_rows, trl_kto_rows

QUESTION = {"role": "user", "content": "Name a color."}


def rollout(text, reward, **fields):
    reply = [{"role": "assistant", "content": text}] if text else []
    return art.Trajectory(messages_and_choices=[QUESTION, *reply], reward=reward, **fields)


@pytest.mark.parametrize(("rows_of", "n_used"), [(trl_dpo_rows, 2), (trl_kto_rows, 3)])
def test_additional_histories_give_a_warning(rows_of, n_used):
    more = {"additional_histories": [art.History(messages_and_choices=[QUESTION])]}
    group = art.TrajectoryGroup(
        [rollout(text, reward, **more) for text, reward in (("red", 1), ("dog", 0), ("blue", 0.5))]
    )
    with pytest.warns(UserWarning, match=f"^{n_used} trajectories have additional histories"):
        assert rows_of([group])


def test_trajectories_without_a_reply_give_no_rows():
    group = art.TrajectoryGroup([rollout("red", 1.0), rollout("dog", 0.0), rollout("", 2.0), rollout("", -1.0)])
    [pair] = trl_dpo_rows([group])
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("red", "dog")
    assert [row["completion"][0]["content"] for row in trl_kto_rows([group])] == ["red", "dog"]
