"""Intervals against independent sums, steps that do not mix, rollouts that fail."""

import asyncio
import functools
import itertools
import math
import threading
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.registered import at_home

import art_nb as art
from art_nb.core.types import RolloutError
from art_nb.training.evaluation import (
    Evaluation,
    conversation_lines,
    difference_interval,
    evaluate,
    evaluate_steps,
    mean_interval,
    paired_interval,
    proportion_interval,
    student_interval,
    t95,
    wilson,
)

Z = 1.959963984540054


def trajectory(reward, **metrics):
    return art.Trajectory(messages_and_choices=[], reward=reward, metrics=metrics)


def evaluation(*rewards, **fields):
    return Evaluation("m", 0, [trajectory(r) for r in rewards], **fields)


# intervals


def by_score_test(successes, n, upper):
    """Wilson's border by its definition: the p whose score test just accepts the observed share."""
    low, high = (successes / n, 1.0) if upper else (0.0, successes / n)
    for _ in range(200):
        p = (low + high) / 2
        accepted = abs(successes / n - p) <= Z * math.sqrt(p * (1 - p) / n)
        low, high = ((p, high) if accepted else (low, p)) if upper else ((low, p) if accepted else (p, high))
    return (low + high) / 2


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (1, 2), (0, 10), (3, 10), (10, 10), (300, 500), (1, 999)])
def test_wilson_is_the_score_test_turned_round(successes, n):
    low, high = wilson(successes, n)
    assert low == pytest.approx(by_score_test(successes, n, upper=False), abs=1e-9)
    assert high == pytest.approx(by_score_test(successes, n, upper=True), abs=1e-9)


def test_wilson_of_published_values():
    """Newcombe, Statistics in Medicine 17 (1998), table I, method 3."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0, 0.1611), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


@given(st.integers(1, 10**6), st.floats(0, 1))
def test_wilson_contains_the_share_and_is_symmetric(n, share):
    successes = round(share * n)
    low, high = wilson(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    assert (low, high) == pytest.approx([1 - x for x in wilson(n - successes, n)[::-1]], abs=1e-12)


def test_wilson_holds_what_it_says():
    """Over all outcomes of 50 games: at p = 0.3 the interval contains p in about 95 % of them."""
    p, n = 0.3, 50
    chance = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    covered = sum(c for k, c in enumerate(chance) if wilson(k, n)[0] <= p <= wilson(k, n)[1])
    assert 0.93 < covered < 0.97


def test_the_exact_square_root_free_form():
    """The borders are the roots of (1 + z²/n) x² - (2p + z²/n) x + p²."""
    for successes, n in ((3, 10), (7, 9)):
        p, z2 = Fraction(successes, n), Fraction(Z) ** 2
        for x in map(Fraction, wilson(successes, n)):
            assert abs((1 + z2 / n) * x**2 - (2 * p + z2 / n) * x + p**2) < 1e-12


SCIPY = {
    1: 12.706204736,
    2: 4.30265273,
    3: 3.182446305,
    4: 2.776445105,
    5: 2.570581836,
    9: 2.262157163,
    10: 2.228138852,
    19: 2.093024054,
    35: 2.030107928,
    63: 1.998340543,
    143: 1.976692198,
    499: 1.964729391,
    1000: 1.962339081,
    1001: 1.962336705,
    20000: 1.960082605,
}


@pytest.mark.parametrize("df", SCIPY)
def test_students_t_is_that_of_scipy(df):
    """scipy.stats.t.ppf(0.975, df), rounded to nine decimals."""
    assert t95(df) == pytest.approx(SCIPY[df], abs=4e-9)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=50))
def test_the_interval_of_a_mean_is_so_many_standard_errors(values):
    reach = t95(len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    low, high = np.mean(values) - reach, np.mean(values) + reach
    if all(0 <= value <= 1 for value in values):
        low, high = wilson(sum(values), len(values)) if len({*values}) == 1 else (max(low, 0), min(high, 1))
    assert mean_interval(values) == pytest.approx((low, high), abs=1e-6)


@pytest.mark.parametrize("n", [3, 5, 10, 20])
def test_the_interval_of_few_values_holds_what_it_says(n):
    """The normal interval covers 81, 88, 92 and 94 % here."""
    samples = np.random.default_rng(0).normal(size=(2000, n))
    covered = [low <= 0 <= high for low, high in map(mean_interval, samples.tolist())]
    assert 0.935 < np.mean(covered) < 0.965


def test_intervals_of_values_between_0_and_1_end_there():
    samples = np.random.default_rng(0).beta(7.2, 0.8, size=(200, 5)).tolist()
    assert max(student_interval(sample)[1] for sample in samples) > 1
    assert all(0 <= low and high <= 1 for low, high in map(mean_interval, samples))
    assert mean_interval([0, 1]) == (0, 1) and mean_interval([0, 1.1])[0] < 0


@pytest.mark.parametrize(("n", "rates"), [(20, (0.1, 0.5)), (48, (0.73, 0.9)), (150, (0.02, 0.04)), (48, (0.9, 0.9))])
@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_the_interval_of_paired_proportions_holds_what_it_says(n, rates, correlation):
    """Shared thresholds correlate the pairs. Newcombe's method 10 covers about 95 %, and rarely less than 93 %."""
    generator = np.random.default_rng(0)
    shared, own = generator.random((2000, 1, n)), generator.random((2000, 2, n))
    thresholds = np.where(generator.random((2000, 1, n)) < correlation, shared, own)
    first, second = (thresholds[:, i] < rate for i, rate in enumerate(rates))
    found = [paired_interval(a.tolist(), b.tolist()) for a, b in zip(first, second, strict=True)]
    assert 0.93 < np.mean([low <= rates[0] - rates[1] <= high for low, high in found]) < 0.99
    reverse = paired_interval(second[0].tolist(), first[0].tolist())
    assert reverse == pytest.approx((-found[0][1], -found[0][0]))


@pytest.mark.parametrize(
    ("counts", "interval"), [((36, 12, 2, 0), (0.0569, 0.3404)), ((1, 1, 7, 12), (-0.5070, -0.0256))]
)
def test_the_interval_of_paired_proportions_of_published_values(counts, interval):
    """Newcombe, Statistics in Medicine 17 (1998), p. 2635-2650, method 10."""
    both, only_first, only_second, none = counts
    first = [True] * (both + only_first) + [False] * (only_second + none)
    second = [True] * both + [False] * only_first + [True] * only_second + [False] * none
    assert paired_interval(first, second) == pytest.approx(interval, abs=1e-4)


def test_the_interval_of_equal_differences_has_a_width():
    assert difference_interval([(0.0, 0.0)] * 48) == pytest.approx((-0.0741, 0.0741), abs=1e-4)
    low, high = difference_interval([(1.0, 0.0)] * 48)
    assert 0.85 < low < 0.9 and high == 1
    assert difference_interval([(1.0, 0.5), (0.2, 0.9)]) == (-1, 1)
    assert difference_interval([(5.0, 1.0), (4.0, 1.0)]) == student_interval([4.0, 3.0])


async def test_a_difference_skips_scenarios_whose_rollout_failed(tmp_path):
    async def rollout(model, scenario):
        if scenario == 1 and model.name == "later":
            raise ValueError("no")
        entries = [trajectory(scenario + (model.name == "later")) for _ in range(1 + (scenario == 2))]
        return entries if scenario == 2 else entries[0]

    models = [art.Model(name=name, project="p") for name in ("earlier", "later")]
    found = [await evaluate(m, rollout, range(4), step=0, log=False, max_exceptions=0.5) for m in models]
    assert found[1].positions == [0, 2, 2, 3]
    difference = found[1].difference(found[0])
    assert (difference.mean, difference.n) == (1.0, 3)


def test_correlated_pairs_have_a_narrower_interval():
    first, second = [True] * 30 + [False] * 20, [True] * 25 + [False] * 25
    apart = second[::-1]
    assert np.ptp(paired_interval(first, second)) < np.ptp(paired_interval(first, apart))


def test_a_difference_compares_the_scenarios_that_both_evaluations_contain():
    before = Evaluation("m", 0, [trajectory(r) for r in (0.0, 1.0, 2.0)], positions=[0, 1, 3])
    after = Evaluation("m", 4, [trajectory(r) for r in (5.0, 1.0, 2.0, 9.0)], positions=[0, 1, 1, 2])
    difference = after.difference(before)  # scenario 0: 5, scenario 1: 0.5
    assert (difference.mean, difference.n) == (2.75, 2)
    assert (difference.low, difference.high) == student_interval([5.0, 0.5])
    assert (
        repr(difference) == "EvaluationDifference(m step 4 against step 0: reward +2.750, 95 % -25.839 to +31.339, n=2)"
    )
    with pytest.raises(RolloutError, match="no scenario in common"):
        after.difference(Evaluation("other", 0, [trajectory(1.0)], positions=[7]))


def test_a_difference_of_proportions_has_their_interval():
    before = evaluation(0, 0, 0, 1, proportion=True)
    after = evaluation(1, 1, 0, 1, proportion=True)
    difference = after.difference(before)
    assert (difference.low, difference.high) == paired_interval([True, True, False, True], [False, False, False, True])
    assert difference.mean == 0.5


# clusters


def clustered_half_width(values, clusters):
    """The formula of Miller, arXiv 2411.00640, as a double sum, with the correction for few clusters."""
    n, mean, g = len(values), np.mean(values), len({*clusters})
    within = sum(
        (values[i] - mean) * (values[j] - mean)
        for i, j in itertools.permutations(range(n), 2)
        if clusters[i] == clusters[j]
    )
    variance = np.var(values) / n + within / n**2
    return t95(g - 1) * math.sqrt(variance * g / (g - 1))


@pytest.mark.parametrize("sizes", [(8,) * 6, (1, 5, 2, 9, 4), (3, 3)])
def test_the_clustered_interval_is_that_of_the_published_formula(sizes):
    generator = np.random.default_rng(sum(sizes))
    clusters = [str(i) for i, size in enumerate(sizes) for _ in range(size)]
    values = (generator.normal(size=len(sizes)).repeat(sizes) + generator.normal(size=len(clusters))).tolist()
    half_width = clustered_half_width(values, clusters)
    expected = np.mean(values) - half_width, np.mean(values) + half_width
    order = generator.permutation(len(values))
    mixed = [values[i] for i in order], [clusters[i] for i in order]
    assert mean_interval(*mixed) == pytest.approx(expected) == difference_interval([(v, 0.0) for v in values], clusters)


def test_clusters_of_one_value_change_nothing_and_equal_sizes_give_the_interval_of_their_means():
    values = [0.2, 0.4, 0.3, 0.9, 0.7, 0.6]
    assert mean_interval(values, "abcdef") == pytest.approx(mean_interval(values))
    assert mean_interval(values, "aabbcc") == pytest.approx(mean_interval([0.3, 0.6, 0.65]))
    assert mean_interval(values, "aaaaaa") == (-math.inf, math.inf)


def test_the_clustered_interval_ends_at_0_and_1_only_if_the_values_do():
    low, high = mean_interval([1.0] * 30 + [0.9, 0.5], ["a"] * 10 + ["b"] * 20 + ["c"] * 2)
    assert 0 < low < 0.9 and high == 1
    assert mean_interval([-1.0, 2.0, -1.2, 2.3], "aabb")[0] < 0.5 < mean_interval([-1.0, 2.0, -1.2, 2.3], "aabb")[1]
    assert mean_interval([-1.0, 2.0, -4.0, 5.0, -3.0, 5.0], "aabbcc")[1] > 1
    pairs = [(1.0, 0.0)] * 30 + [(0.0, 1.0)]
    assert difference_interval(pairs, ["a"] * 10 + ["b"] * 20 + ["c"])[1] == 1


def test_equal_clusters_have_the_interval_of_as_many_proportions():
    clusters = [str(i // 10) for i in range(100)]
    assert mean_interval([0.0] * 100, clusters) == wilson(0, 10)
    assert mean_interval([0.1] * 7, "aabbbcc") == pytest.approx(wilson(0.3, 3))
    equal = difference_interval([(1.0, 0.0)] * 100, clusters)
    assert equal == pytest.approx(difference_interval([(1.0, 0.0)] * 10))


def test_the_clustered_interval_covers_the_mean_of_all_clusters():
    """Ten documents with ten questions each. The interval over questions covers the mean in 65 % of the samples."""
    generator = np.random.default_rng(0)
    rates = generator.beta(1, 1, size=(1000, 10, 1))
    samples = (generator.random((1000, 10, 10)) < rates).reshape(1000, 100).astype(float).tolist()
    clusters = [str(i // 10) for i in range(100)]
    covered = [low <= 0.5 <= high for low, high in (mean_interval(sample, clusters) for sample in samples)]
    assert 0.93 < np.mean(covered) < 0.97
    assert np.mean([low <= 0.5 <= high for low, high in map(mean_interval, samples)]) < 0.75


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_the_interval_of_a_clustered_proportion_covers_its_rate(rate):
    """16 items with six questions each. Student's interval covers a rate of 0.9 in 90 % of the samples."""
    generator = np.random.default_rng(0)
    rates = generator.beta(4 * rate, 4 - 4 * rate, size=(1000, 16, 1))
    samples = (generator.random((1000, 16, 6)) < rates).reshape(1000, 96).astype(float).tolist()
    clusters = [str(i // 6) for i in range(96)]

    def coverage(interval):
        return np.mean([low <= rate <= high for low, high in (interval(sample, clusters) for sample in samples)])

    assert 0.925 < coverage(proportion_interval) < 0.975
    assert rate == 0.5 or coverage(mean_interval) < 0.91


def test_the_interval_of_a_clustered_proportion():
    clusters = [str(i // 6) for i in range(96)]
    right = [1.0] * 90 + [0.0] * 6
    assert proportion_interval(right, range(96)) == pytest.approx(wilson(90, 96))  # each value is a cluster
    low, high = proportion_interval(right, clusters)  # all values of a cluster are equal
    assert low < wilson(15, 16)[0] and wilson(15, 16)[1] < high < 1
    assert proportion_interval([0.0] * 96, clusters) == wilson(0, 16)
    assert proportion_interval([0.0, 1.0] * 48, clusters) == wilson(8, 16)  # all clusters have the same mean
    assert proportion_interval([0.0, 1.0], "aa") == (-math.inf, math.inf)


def test_clusters_with_the_same_proportion_are_equal_despite_rounding():
    values, clusters = ([1.0] * 5 + [0.0] * 6) * 7, "a" * 11 + "b" * 11 + "c" * 55
    for interval in (proportion_interval, mean_interval):
        assert interval(values, clusters) == pytest.approx(wilson(15 / 11, 3))


BRANCHES = [{"branch": branch, "question": q} for branch in ("Tower Street", "Harbor", "Mill Lane") for q in range(4)]


async def opening_hours(model, scenario):
    right = scenario["branch"] != "Tower Street" and (model.name == "later" or scenario["question"] > 0)
    return trajectory(float(right), right=right)


async def test_an_evaluation_with_clusters(tmp_path):
    options = {"step": 0, "metric": "right", "log": False}
    earlier, later = (art.Model(name=name, project="p") for name in ("earlier", "later"))
    after = await evaluate(later, opening_hours, BRANCHES, cluster="branch", **options)
    right, branches = [0.0] * 4 + [1.0] * 8, [scenario["branch"] for scenario in BRANCHES]
    assert after.ci95() == proportion_interval(right, branches) and after.ci95("reward") == mean_interval([0, 1, 1])
    assert repr(after).endswith("n=12, 3 clusters)")
    [same] = await evaluate_steps(
        later, opening_hours, BRANCHES, [0], cluster=lambda scenario: scenario["branch"], metric="right", log=False
    )
    assert same.ci95() == after.ci95()
    before = await evaluate(earlier, opening_hours, BRANCHES, **options)
    assert before.ci95() == wilson(6, 12) and "cluster" not in repr(before)
    for first, second, sign in ((after, before, 1), (before, after, -1)):  # one of them has clusters
        difference = first.difference(second)
        assert (difference.low, difference.high) == student_interval([0, 0.25 * sign, 0.25 * sign])
        assert repr(difference).endswith("n=12, 3 clusters)")
    before.cluster = "branch"
    assert before.ci95() == proportion_interval([0.0] * 4 + [0.0, 1.0, 1.0, 1.0] * 2, branches)


@pytest.mark.parametrize(
    ("rewards", "text"),
    [((0, 0, 1, 1), "2 clusters)"), ((1, 1, 1, 1), "2 equal clusters)"), ((0, 1, 0, 1), "2 equal clusters)")],
)
def test_the_text_of_an_evaluation_says_if_all_clusters_are_equal(rewards, text):
    scenarios = [{"page": page} for page in (1, 1, 2, 2)]
    assert repr(evaluation(*rewards, scenarios=scenarios, cluster="page")).endswith(f", {text}")
    assert repr(evaluation(*rewards, scenarios=scenarios, cluster=lambda scenario: 0)).endswith(", 1 cluster)")


async def test_an_invalid_cluster_raises_before_the_rollouts_start():
    async def rollout(model, scenario):
        raise AssertionError("started")

    for scenarios in (BRANCHES, ["a", "b"]):
        with pytest.raises(RolloutError, match="Invalid `cluster='town'`: a scenario does not have this key"):
            await evaluate(art.Model(name="m", project="p"), rollout, scenarios, cluster="town", log=False)
    with pytest.raises(RolloutError, match="needs `scenarios`"):
        evaluation(0.0, 1.0, cluster="branch").ci95()
    assert evaluation(0.0, 1.0, 1.0, 1.0, scenarios=["ax", "ay", "bx", "by"], cluster=0).ci95() == mean_interval(
        [0.5, 1.0]
    )


# the lowest values


async def test_the_text_of_the_worst_names_their_clusters(tmp_path):
    async def rollout(model, scenario):
        return trajectory(float(scenario["branch"] != "Tower Street" and scenario["question"] > 0))

    found = await evaluate(art.Model(name="m", project="p"), rollout, BRANCHES, cluster="branch", log=False)
    assert found.worst_text(1).splitlines()[0] == (
        "6 of 12 have the lowest value, 0. Most frequent: branch='Tower Street' (4 of 4)."
    )
    found.cluster = lambda scenario: scenario["question"]
    assert found.worst_text(1).startswith("6 of 12 have the lowest value, 0. Most frequent: 0 (3 of 3).")
    found.cluster = None  # all scenarios differ
    assert found.worst_text(1).startswith("reward 0:")


def test_the_text_of_the_worst_names_repeated_scenarios_at_most_three():
    scenarios = [f"problem \x1b {'x' * 90 if i == 0 else i}" for i in range(5)] * 2
    rewards = [0.0, 0.0, 0.0, 0.0, 0.5] * 2
    first = evaluation(*rewards, scenarios=scenarios).worst_text(1).splitlines()[0]
    assert first.startswith("8 of 10 have the lowest value, 0. Most frequent: 'problem \\x1b xxx")
    assert first.count("(2 of 2)") == 3 and "x… (2 of 2), 'problem \\x1b 1' (2 of 2)" in first


@pytest.mark.parametrize(
    ("rewards", "scenarios"),
    [
        ([0, 0, 1, 1], "abcd"),  # no scenario has several
        ([0, 1, 2, 2], "aabb"),  # a single lowest value
        ([0, 0, 0, 0], "aabb"),  # all values are equal
        ([0, 0, 1, 1], "aaaa"),  # a single scenario
        ([math.nan, math.nan, math.nan, math.nan], "aabb"),
        ([0, 0, 1, 1], None),
    ],
)
def test_the_text_of_the_worst_has_no_first_line_without_information(rewards, scenarios):
    found = evaluation(*rewards, scenarios=scenarios and [*scenarios])
    assert found.worst_text(1).startswith("reward ")


@pytest.mark.parametrize(
    ("rewards", "shown", "last"),
    [
        ([1, 0, 0.5, 1], ["0:", "0.5:"], "No other value is below the highest one, 1."),
        ([math.nan, 0, 1], ["0:"], "No other value is below the highest one, 1."),
        ([1, 1], ["1:", "1:"], "No value is below the highest one, 1."),
        ([0, 0, 0, 1], ["0:", "0:", "0:"], "reward 0:"),
    ],
)
def test_the_text_of_the_worst_leaves_out_the_highest_value(rewards, shown, last):
    lines = evaluation(*rewards).worst_text(3).splitlines()
    assert [line.removeprefix("reward ") for line in lines if line.startswith("reward ")] == shown
    assert lines[-1] == last


def test_a_long_message_keeps_its_beginning_and_end():
    text = "".join(f"{i:04d}" for i in range(75)) + "\x1b"
    long = art.Trajectory(messages_and_choices=[{"role": "user", "content": text}])
    assert conversation_lines(long) == [f"  user: {text[:150]!r}".removesuffix("'") + "…" + repr(text[-150:])[1:]]
    short = art.Trajectory(messages_and_choices=[{"role": "user", "content": text[1:]}])
    assert Evaluation("m", 0, [short]).worst_text().splitlines()[1] == f"  user: {text[1:]!r}"


def test_the_interval_of_equal_differences_in_unequal_clusters_has_a_width():
    """The mean of a cluster is rounded, which must not make differences unequal."""
    values = [0.75, 0.375, 0.75, 0.375, 0.0, 0.25, 0.5]
    low, high = difference_interval([(value + 0.125, value) for value in values], [*"aabbbcd"])
    assert high - low > 0.3


def test_a_difference_names_the_rollout_functions_if_they_differ():
    first, second = evaluation(1.0, 0.0), evaluation(1.0, 1.0)
    assert first.difference(second).title == "m step 0 against step 0"
    first.rollout_name = "rollout_2"
    assert first.difference(second).title == "m step 0 against step 0"  # the other one is unknown
    second.rollout_name = "rollout"
    assert first.difference(second).title == "m step 0 (rollout_2) against step 0 (rollout)"
    second.rollout_name = "rollout_2"
    assert first.difference(second).title == "m step 0 against step 0"


async def test_an_evaluation_knows_the_name_of_its_rollout_function():
    found = [
        await evaluate(art.Model(name="m", project="p"), function, [1], log=False)
        for function in (broken, functools.partial(broken))
    ]
    assert [one.rollout_name for one in found] == ["broken", ""]


def test_what_too_few_values_tell():
    assert wilson(0, 0) == (0, 1)
    assert mean_interval([0.5]) == (-math.inf, math.inf)
    empty = evaluation()
    assert (math.isnan(empty.mean()), empty.ci95()) == (True, (0, 1))


def test_which_interval():
    assert evaluation(1, 0, 1, 1, proportion=True).ci95() == wilson(3, 4)
    assert evaluation(1, 0, 1, 1).ci95() == mean_interval([1, 0, 1, 1])  # a reward that happens to be 0 or 1
    assert evaluation(1, 0, 0.5).ci95() == mean_interval([1, 0, 0.5])
    count = Evaluation("m", 0, [trajectory(0.5, calls=n) for n in (0, 1, 1)], metric="calls")
    assert count.ci95() == mean_interval([0, 1, 1])
    with pytest.raises(RolloutError, match="proportion=True, but 'reward' has other values than 0 and 1"):
        evaluation(1, 0, 0.5, proportion=True).ci95()
    both = Evaluation("m", 0, [trajectory(0.5, win=True), trajectory(-1, win=False)], metric="win")
    assert (both.ci95(), both.ci95("reward")) == (wilson(1, 2), mean_interval([0.5, -1]))
    assert repr(both) == "Evaluation(m step 0: win 0.500, 95 % 0.095 to 0.905, n=2)"


def test_a_metric_that_some_lack():
    some = Evaluation("m", 0, [trajectory(0, win=1), trajectory(1)], metric="win")
    with pytest.raises(RolloutError, match="1 of 2 trajectories have no metric 'win'.*reward, win"):
        some.mean()


# steps


async def ask(model, scenario):
    """One reply; which step answered stands in the metrics."""
    messages = [{"role": "user", "content": f"free: {scenario}"}]
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=2, logprobs=True
    )
    step = int(reply.system_fingerprint.rpartition("@")[2])
    return art.Trajectory(messages_and_choices=[*messages, reply.choices[0]], reward=scenario, metrics={"step": step})


@pytest.fixture
async def model(tiny_model_dir, tmp_path):
    """A model of three steps."""
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        await art.train(model, ask, [1, 2, 3], steps=3, groups_per_step=1, rollouts_per_group=2, show=False)
        yield model


async def test_evaluations_at_once_keep_their_steps(model, tiny_model_dir):
    steps = [None, 0, 2, 1, 3, 0]
    found = await asyncio.gather(*(evaluate(model, ask, range(4), step=step, log=False) for step in steps))
    assert [e.step for e in found] == [3, 0, 2, 1, 3, 0]
    assert [set(e.values("step")) for e in found] == [{3}, {0}, {2}, {1}, {3}, {0}]
    assert model.get_inference_name() == "tiny"


async def test_the_steps_of_a_list(model):
    found = await evaluate_steps(model, ask, range(4), [0, 3], metric="step")
    assert [(e.step, e.mean(), e.mean("reward")) for e in found] == [(0, 0, 1.5), (3, 3, 1.5)]
    assert model.store.steps("val") == [0, 3]
    rows = [row for row in model.store.history() if "val/reward" in row]
    assert [(row["step"], row["val/reward"], row["val/step"]) for row in rows] == [(0, 1.5, 0), (3, 1.5, 3)]


async def test_the_latest_is_that_of_the_beginning(model):
    begun = asyncio.Event()

    async def slow(model, scenario):
        begun.set()
        await asyncio.sleep(0.02 * scenario)
        return await ask(model, scenario)

    job = asyncio.create_task(evaluate(model, slow, range(30)))
    await begun.wait()
    await art.train(model, ask, [1, 2], steps=5, groups_per_step=1, rollouts_per_group=2, show=False)
    found = await job
    assert (found.step, set(found.values("step")), await model.get_step()) == (3, {3}, 5)


async def test_a_step_that_was_never_saved(model):
    with pytest.raises(Exception, match="tiny@9"):
        await evaluate(model, ask, range(2), step=9)
    assert model.get_inference_name() == "tiny"


async def test_training_continues_after_an_evaluation_in_a_callback(model):
    found = []

    async def on_step(run):
        found.append(await evaluate(model, ask, range(2), metric="step"))

    run = await art.train(
        model, ask, [1, 2, 3], steps=5, groups_per_step=1, rollouts_per_group=2, show=False, on_step=on_step
    )
    assert [e.mean() for e in found] == [4, 5]
    assert {t.metrics["step"] for group in run.groups for t in group} == {4}


# rollouts that fail


async def broken(model, scenario):
    if scenario < 1:
        raise ValueError("boom")
    return trajectory(scenario % 2)


PROMPTED = {"name": "gpt", "project": "tests"}


async def test_a_few_failures_are_counted_beside_the_mean(tmp_path):
    model = art.Model(**PROMPTED, base_path=str(tmp_path))
    found = await evaluate(model, broken, range(11))
    assert (found.failed, len(found.trajectories), found.mean(), found.step) == (1, 10, 0.5, 0)
    assert repr(found).endswith("n=10, 1 failed)")
    [group] = model.store.read_groups("val", 0)
    assert (len(group), [error.message for error in group.exceptions]) == (10, ["boom"])
    assert group.metadata["scenario_id"] == "evaluation"  # the name of the group in the viewer
    assert model.store.history()[0]["val/exception_rate"] == pytest.approx(1 / 11)


async def test_the_scenarios_of_an_iterator_are_rolled_out(tmp_path):
    evaluation = await evaluate(art.Model(**PROMPTED, base_path=str(tmp_path)), broken, iter(range(11)))
    assert (evaluation.failed, len(evaluation.trajectories)) == (1, 10)


async def test_the_bar_shows_the_metric_that_was_asked_for(tmp_path, capfd):
    async def rollout(model, scenario):
        return art.Trajectory(reward=1, metrics={"solved": scenario > 2, "short": 1, "about": 0})

    await evaluate(art.Model(**PROMPTED), rollout, range(6), metric="solved", log=False, show_progress=True)
    bar = capfd.readouterr().err
    assert "evaluate gpt, step 0" in bar and "reward=1, solved=0.5]" in bar and "short" not in bar


@pytest.mark.parametrize("show", [True, False])
async def test_a_warning_about_requests_is_printed_with_the_bar(model, capsys, show):
    async def rollout(model, scenario):
        model.backend().bus.warn_once("tools", "The template does not support tools.")
        return trajectory(1.0)

    await evaluate(model, rollout, range(2), show_progress=show, log=False)
    assert capsys.readouterr().out.count("does not support tools") == show


async def test_too_many_failures_raise_the_last(tmp_path):
    model = art.Model(**PROMPTED, base_path=str(tmp_path))
    with pytest.raises(ValueError, match="boom") as caught:
        await evaluate(model, broken, range(9))
    assert "max_exceptions=0.1" in caught.value.__notes__[0]
    assert (await evaluate(model, broken, range(9), max_exceptions=1)).failed == 1
    with pytest.raises(RolloutError, match="No rollout of the evaluation succeeded: boom") as caught:
        await evaluate(model, broken, [0, 0], max_exceptions=2)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(RolloutError, match="none returned a trajectory"):
        await evaluate(model, broken, [])


async def test_a_late_rollout_is_a_failed_one(tmp_path):
    async def rollout(model, scenario):
        await asyncio.sleep(60 * (scenario == 3))
        return trajectory(1)

    found = await evaluate(art.Model(**PROMPTED, base_path=str(tmp_path)), rollout, range(10), timeout_s=1)
    assert (found.failed, found.mean()) == (1, 1)


async def test_synchronous_agents_do_not_wait_for_each_other(tmp_path):
    all_running = threading.Barrier(40)

    async def rollout(model, scenario):
        await asyncio.to_thread(all_running.wait, 60)
        return trajectory(1)

    assert (await evaluate(art.Model(**PROMPTED, base_path=str(tmp_path)), rollout, range(40))).mean() == 1


async def test_a_rollout_may_give_several_trajectories(tmp_path):
    count = itertools.count()

    async def rollout(model, scenario):
        return [trajectory(next(count)) for _ in range(2)]

    model = art.Model(**PROMPTED, base_path=str(tmp_path))
    found = await evaluate(model, rollout, range(3))
    assert (sorted(found.values()), found.failed) == ([0, 1, 2, 3, 4, 5], 0)
    assert len(model.store.read_groups("val", 0)[0]) == 6


async def test_only_so_many_at_once_and_waiting_is_not_lateness(tmp_path):
    running, most = 0, 0

    async def rollout(model, scenario):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.1)
        running -= 1
        return trajectory(1)

    model = art.Model(**PROMPTED, base_path=str(tmp_path))
    found = await evaluate(model, rollout, range(99), concurrency=3, timeout_s=3)
    assert (found.failed, len(found.trajectories), most) == (0, 99, 3)  # the last three waited for 3.2 s


async def test_nothing_is_written_unless_wanted(tmp_path):
    await evaluate(art.Model(**PROMPTED, base_path=str(tmp_path)), broken, range(1, 5), log=False)
    assert not list(tmp_path.iterdir())


async def test_a_missing_metric_is_said_after_the_trajectories_are_safe(tmp_path):
    model = art.Model(**PROMPTED, base_path=str(tmp_path))
    with pytest.raises(RolloutError, match="no metric 'win'"):
        await evaluate(model, broken, range(1, 5), metric="win")
    assert model.store.steps("val") == [0]
