"""Advantages, reductions and the signal report against plain loops."""

import math
import statistics
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from art_nb.core.types import TrainError
from art_nb.learners.base import StepConfig, train_rows
from art_nb.rollouts.trajectories import History, Trajectory, TrajectoryGroup
from art_nb.tokens.advantages import (
    REDUCTIONS,
    SCALES,
    TRUNCATED,
    advantages,
    entry_weights,
    find_option,
    group_advantages,
    has_variance,
    highest_reward_metrics,
    signal_report,
    weigh_rows,
)
from art_nb.tokens.rows import TokenRow


@dataclass
class PlainRow:
    """The fields of a training row that advantages look at."""

    trajectory: int
    tokens: np.ndarray
    sampled: np.ndarray
    truncated: bool = False


def row(trajectory, trained, prompt=0, truncated=False):
    sampled = np.arange(prompt + trained) >= prompt
    return PlainRow(trajectory, np.zeros(prompt + trained, np.int32), sampled, truncated)


# advantages


def reference_advantages(groups, scale):
    centred = [[r - sum(g) / len(g) if max(g) > min(g) else 0.0 for r in g] for g in groups]
    if scale == "group":
        return [[a / (statistics.pstdev(g) + 1e-6) for a in c] for g, c in zip(groups, centred, strict=True)]
    live = [a for c in centred if any(c) for a in c]
    deviation = math.sqrt(sum(a * a for a in live) / len(live)) if live else 0.0
    return [[a / (deviation + 1e-6) if scale == "batch" else a for a in c] for c in centred]


@pytest.mark.parametrize("scale", SCALES)
def test_advantages_equal_plain_arithmetic(scale):
    groups = [[1.0, 0.0, 0.0, 0.5], [2.0, 2.0, 2.0], [0.1, 0.9], [-3.0]]
    for ours, theirs in zip(advantages(groups, scale), reference_advantages(groups, scale), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rewards", [[], [1.0], [0.3, 0.1 + 0.2], [5.0] * 8, [1.0, 1.0 + 1e-13]])
def test_no_variance_means_exactly_zero(scale, rewards):
    assert not has_variance(rewards)
    assert group_advantages(rewards, scale).tolist() == [0.0] * len(rewards)


def test_a_reward_at_the_mean_is_exactly_zero():
    assert group_advantages([0.1, 0.2, 0.3])[1] == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_reward_that_is_no_number_is_refused(bad):
    with pytest.raises(TrainError, match="not finite"):
        group_advantages([1.0, bad])


@pytest.mark.parametrize(("balance", "expected"), [(0.0, [1, -1]), (1.0, [1, 0]), (-1.0, [0, -1]), (0.25, [1, -0.75])])
def test_balance(balance, expected):
    np.testing.assert_allclose(group_advantages([2.0, 0.0], "none", balance), expected)


def test_balance_outside_its_range_is_refused():
    with pytest.raises(TrainError, match="-1 to 1"):
        group_advantages([1.0, 0.0], balance=1.5)


def test_who_does_not_count_neither_shifts_the_mean_nor_gets_an_advantage():
    counts = [np.array([True, False, True])]
    np.testing.assert_allclose(advantages([[1.0, -50.0, 0.0]], "none", counts=counts)[0], [0.5, 0.0, -0.5])


@given(
    st.lists(st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), max_size=9), max_size=6),
    st.sampled_from(list(SCALES)),
)
@settings(max_examples=60)
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order(groups, scale):
    for rewards, values in zip(groups, advantages(groups, scale), strict=True):
        assert np.isfinite(values).all()
        assert abs(values.sum()) < 1e-6
        if len(rewards) > 1 and has_variance(rewards):
            assert values[int(np.argmax(rewards))] > 0 > values[int(np.argmin(rewards))]


def test_unknown_names_say_what_exists():
    with pytest.raises(TrainError, match="group, batch, none"):
        advantages([[1.0, 0.0]], "std")
    assert find_option(SCALES, max) is max


# reductions


def step_loss(losses, lengths, coef):
    """The contract: the loss of a step is the plain sum of coefficient times token loss."""
    return sum(c * loss for row_losses, c in zip(losses, coef, strict=True) for loss in row_losses)


def reference_reduction(losses, trajectory, group, A, reduction, max_tokens):
    live = [i for i in range(len(losses)) if losses[i]]
    losses = [[x * (A[i] != 0) for x in row] for i, row in enumerate(losses)]
    units = {"token": lambda i: 0, "sequence": lambda i: (group[i], trajectory[i]), "prompt": lambda i: group[i]}
    if reduction == "constant":
        return sum(x for i in live for x in losses[i]) / (len({(group[i], trajectory[i]) for i in live}) * max_tokens)
    tokens = {}
    for i in live:
        tokens.setdefault(units[reduction](i), []).extend(losses[i])
    return sum(sum(t) / len(t) for t in tokens.values()) / len(tokens)


steps = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 2), st.integers(0, 2), st.sampled_from([0.0, 1.0, -0.5])),
    min_size=1,
    max_size=10,
)


@given(steps, st.sampled_from(["token", "sequence", "prompt", "constant"]), st.randoms())
@settings(max_examples=150)
def test_reductions_equal_plain_means(step, reduction, random):
    lengths, trajectory, group, A = map(list, zip(*step, strict=True))
    losses = [[random.uniform(-1, 1) for _ in range(n)] for n in lengths]
    coef, *_ = entry_weights(lengths, trajectory, A, reduction, 16, group)
    if not any(n and a for n, a in zip(lengths, A, strict=True)):
        assert not coef.any()
        return
    expected = reference_reduction(losses, trajectory, group, A, reduction, 16)
    assert step_loss(losses, lengths, coef) == pytest.approx(expected, abs=1e-12)


@given(steps, st.sampled_from(list(REDUCTIONS)), st.randoms())
@settings(max_examples=60)
def test_row_order_does_not_matter(step, reduction, random):
    order = list(range(len(step)))
    random.shuffle(order)
    plain = entry_weights(*columns(step)[:2], columns(step)[3], reduction, 16, columns(step)[2])
    mixed = columns([step[i] for i in order])
    shuffled = entry_weights(mixed[0], mixed[1], mixed[3], reduction, 16, mixed[2])
    for a, b in zip(plain, shuffled, strict=True):
        np.testing.assert_allclose(a[order], b, rtol=1e-12)


def columns(step):
    return [list(column) for column in zip(*step, strict=True)]


STEP = [3, 40, 5, 0], [0, 7, 1, 2], [1.0, 0.0, -1.0, 1.0]  # tokens, trajectory, advantage


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows_without_an_advantage_count_in_every_mean_but_arts(reduction):
    alone = entry_weights([3, 5], [0, 1], [1.0, -1.0], reduction, 16, [0, 0])
    crowd = entry_weights(*STEP, reduction, 16, [0, 1, 0, 0])
    share = {"token": 8 / 48, "sequence": 2 / 3, "prompt": 1 / 2, "constant": 2 / 3, "art": 1.0}[reduction]
    np.testing.assert_allclose(crowd[0], share * np.array([alone[0][0], 0.0, alone[0][1], 0.0]))
    np.testing.assert_allclose(crowd[1], [alone[1][0], 0.0, alone[1][1], 0.0])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_term_that_trains_silent_rows_leaves_the_other_factors_alone(reduction):
    without = entry_weights(*STEP, reduction, 16, [0, 1, 0, 0])
    with_them = entry_weights(*STEP, reduction, 16, [0, 1, 0, 0], silent=True)
    np.testing.assert_array_equal(with_them[0][[0, 2, 3]], without[0][[0, 2, 3]])
    np.testing.assert_array_equal(with_them[1], without[1])
    assert with_them[0][1] > 0 == without[0][1]
    assert np.isfinite(entry_weights([3, 5], [0, 1], [0.0, 0.0], reduction, 16, silent=True)).all()


def test_an_entropy_or_kl_term_wants_the_rows_of_equal_groups():
    tokens, sampled = np.arange(4, dtype=np.int32), np.array([False, True, True, True])
    rows = [[TokenRow(tokens, sampled, np.zeros(4, np.float32), i, False) for i in range(2)] for _ in range(2)]
    kept = [
        len(train_rows([[0.0, 1.0], [1.0, 1.0]], rows, StepConfig(**options)))
        for options in ({}, {"entropy_coef": 0.01}, {"kl_coef": 0.1}, {"kl_shaping": 0.1})
    ]
    assert kept == [2, 4, 4, 2]


def test_the_constant_needs_its_length():
    with pytest.raises(TrainError, match="max_tokens"):
        entry_weights([3], [0], [1.0], "constant")


def test_a_step_without_rows():
    coef, A, _ = entry_weights([], [], [])
    assert coef.shape == A.shape == (0,)


# ART, written out token by token as art/preprocessing and art/loss.py do it


def art_by_hand(groups_rewards, rows_of, token_loss, balance):
    """rows_of[g][i] = list of row lengths; token_loss(advantage) -> loss of one token."""
    entries = []  # one a trained token: advantage, weight
    for rewards, trajectories in zip(groups_rewards, rows_of, strict=True):
        mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
        for reward, lengths in zip(rewards, trajectories, strict=True):
            advantage = 0.0 if std < 1e-12 else (reward - mean) / (std + 1e-6)
            if advantage == 0:
                continue
            weight = 1 / (sum(lengths) + 1e-6)
            entries += [[advantage, weight] for _ in range(sum(lengths))]
    mean_weight = statistics.fmean(w for _, w in entries)
    entries = [(a, w / mean_weight) for a, w in entries]
    if balance > 0:
        entries = [(a if a > 0 else a * (1 - balance), w) for a, w in entries]
    if balance < 0:
        entries = [(a if a < 0 else a * (1 + balance), w) for a, w in entries]
    size = statistics.fmean(abs(a) * w for a, w in entries)
    return sum(token_loss(a / size) * w for a, w in entries) / (len(entries) + 1e-18)


@pytest.mark.parametrize("balance", [0.0, 0.5, -0.3])
def test_reduction_art_reproduces_art(balance):
    rewards = [[1.0, 0.0, 0.5], [3.0, 3.0], [0.0, 0.2, 0.9, 0.1]]
    lengths = [[[3], [10, 4], [1]], [[5], [5]], [[7], [2, 2, 2], [30], [1]]]
    rows = [[row(i, n) for i, many in enumerate(group) for n in many] for group in lengths]
    weighed = weigh_rows(rewards, rows, reduction="art", balance=balance)
    ours = sum(
        c * math.tanh(a) * r.sampled.sum()
        for r, c, a in zip(weighed.rows, weighed.coef_R, weighed.advantages_R, strict=True)
    )
    assert ours == pytest.approx(art_by_hand(rewards, lengths, math.tanh, balance), rel=1e-12)


def test_art_does_not_see_the_scale_of_rewards():
    rows = [[row(i, n) for i, n in enumerate((3, 9, 4))]]
    one, thousand = (
        weigh_rows([[k * r for r in (1.0, 0.0, 0.2)]], rows, scale="none", reduction="art") for k in (1, 1000)
    )
    np.testing.assert_allclose(one.advantages_R, thousand.advantages_R)
    tokens = np.array([r.sampled.sum() for r in one.rows])
    assert (np.abs(one.advantages_R) * one.coef_R * tokens).sum() == pytest.approx(1.0)


# a whole step


def test_trajectory_numbers_count_within_their_group():
    rows = [[row(0, 2), row(0, 6), row(1, 4)], [row(0, 1), row(1, 3)]]
    weighed = weigh_rows([[1.0, 0.0], [0.0, 1.0]], rows, reduction="sequence")
    np.testing.assert_allclose(weighed.coef_R, [1 / 32, 1 / 32, 1 / 16, 1 / 4, 1 / 12])
    assert weighed.group_R.tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(("rule", "trained", "first"), [("keep", 3, 2 / 3), ("mask", 2, 2 / 3), ("drop", 2, 1 / 2)])
def test_truncated_rows(rule, trained, first):
    rows = [[row(0, 3), row(1, 5, truncated=True), row(2, 2)]]
    weighed = weigh_rows([[1.0, 0.0, 0.0]], rows, scale="none", truncated=rule)
    assert len(weighed.rows) == trained
    assert weighed.advantages_R[0] == pytest.approx(first)
    assert sum(c * r.sampled.sum() for c, r in zip(weighed.coef_R, weighed.rows, strict=True)) == pytest.approx(1.0)


def test_masking_spares_the_other_rows_of_a_trajectory():
    rows = [[row(0, 3), row(0, 2, truncated=True), row(1, 4)]]
    assert [r.sampled.sum() for r in weigh_rows([[1.0, 0.0]], rows, truncated="mask").rows] == [3, 4]
    assert not weigh_rows([[1.0, 0.0]], rows, truncated="drop").rows  # one is left: no comparison


@pytest.mark.parametrize("rule", TRUNCATED)
def test_an_empty_step_gives_empty_arrays(rule):
    for rewards, rows in (([], []), ([[]], [[]]), ([[1.0, 1.0]], [[]])):
        weighed = weigh_rows(rewards, rows, truncated=rule)
        assert weighed.rows == []
        assert weighed.coef_R.shape == (0,)


# the signal report, on real trajectories


def choice(ids=(1, 2, 3), prompt=5, finish="stop", logprobs=True):
    content = [{"token": str(i), "logprob": -1.0, "top_logprobs": []} for i in ids]
    return Choice(
        index=0,
        finish_reason=finish,
        message=ChatCompletionMessage(role="assistant", content="b2"),
        logprobs={"content": content, "refusal": None} if logprobs else None,
        **({"token_ids": list(ids), "prompt_token_ids": [0] * prompt} if ids else {}),
    )


def group(rewards, *entries, histories=(), exceptions=()):
    made = [
        Trajectory(
            messages_and_choices=[{"role": "user", "content": "?"}, *entries],
            reward=r,
            additional_histories=list(histories),
        )
        for r in rewards
    ]
    return TrajectoryGroup([*made, *exceptions])


dict_reply = {"role": "assistant", "content": "b2"}


@pytest.mark.parametrize(
    ("groups", "options", "reason"),
    [
        ([], {}, "no trajectories: 0 groups, 0 failed"),
        ([group([], exceptions=[ValueError("x")] * 3)], {}, "no trajectories: 1 groups, 3 failed"),
        ([group([1, 0], dict_reply), group([1, 0])], {}, "no choice: 4 trajectories"),
        ([group([1, 0], choice(ids=()))], {}, "no token IDs: the choices of 2"),
        ([group([1, 0], choice(logprobs=False))], {}, "no logprobs: the choices of 2"),
        (
            [group([1, 1], choice()), group([0, 0, 0], choice())],
            {},
            "no variance: in each of 2 groups (5 trajectories)",
        ),
        (
            [
                group([1, 1], choice()),
                group([0, 0], choice()),
                group([1, 1], choice()),
                group([], exceptions=[ValueError()]),
            ],
            {},
            "no variance: in 2 of 3 groups all rewards are 1, the highest of the step. If these scenarios are",
        ),
        ([group([1], choice())], {}, "no variance"),
        ([group([1, 0], choice())], {"max_length": 7}, "all too long: the shortest row of 2 trajectories has 8 tokens"),
        ([group([1, 0], choice(finish="length"))], {"truncated": "mask"}, "all truncated: 2 trajectories"),
        ([group([1, 0], choice(finish="length"))], {"truncated": "drop"}, "all truncated: 2 trajectories"),
    ],
)
def test_why_nothing_would_train(groups, options, reason):
    report = signal_report(groups, step=3, **options)
    assert report.reason.startswith(reason)
    assert (report.step, report.groups, report.trainable_groups, report.rows) == (3, len(groups), 0, 0)


def test_a_report_of_a_healthy_step():
    groups = [group([1, 0], choice()), group([1, 1], choice()), group([1, 0, 0.5], dict_reply, choice(finish="length"))]
    report = signal_report(groups)
    assert (report.trainable_groups, report.rows, report.reason) == (2, 4, "")
    assert signal_report([group([1, 0], choice(logprobs=False))], allow_missing_logprobs=True).reason == ""


def test_choices_in_additional_histories_are_seen():
    histories = [History(messages_and_choices=[{"role": "user", "content": "?"}, choice()])]
    report = signal_report([group([1, 0], dict_reply, histories=histories)])
    assert report.reason == ""
    cut = [History(messages_and_choices=[{"role": "user", "content": "?"}, choice(finish="length")])]
    assert signal_report([group([1, 0], choice(), histories=cut)], truncated="mask").reason == ""
    assert signal_report([group([1, 0], choice(), histories=cut)], truncated="drop").reason.startswith("all truncated")


def test_rows_say_more_than_choices():
    rows = [[row(0, 3, prompt=90), row(0, 3), row(1, 3, prompt=200)]]
    assert signal_report([group([1, 0], choice())], rows, max_length=50).rows == 2
    assert signal_report([group([1, 0], choice())], rows, max_length=2).reason.startswith("all too long")


def test_groups_with_the_highest_reward_of_a_step():
    def group(*rewards):
        return TrajectoryGroup([Trajectory(messages_and_choices=[], reward=reward) for reward in rewards])

    def counts(*groups):
        return [*highest_reward_metrics(groups).values()]

    assert counts(group(1.0, 1.0), group(0.0, 1.0), group()) == [1.0, 1]
    assert counts(group(0.2, 0.2), group(0.2, 0.2)) == [0.2, 2]
    assert counts(group()) == counts() == [0.0, 0]
