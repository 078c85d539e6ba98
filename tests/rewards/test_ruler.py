"""RULER: the scores of a judge become the rewards of a group."""

import asyncio
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted_judge import ASK, FAST, GOOD, address, animals, parsed, saying, says, scored, table, well

from art_nb.core.events import Bus, Judged, Warned
from art_nb.core.types import JudgeError
from art_nb.rewards.journal import Journal
from art_nb.rewards.llm_judges import JudgeReply, ListwiseJudge, ModelReply
from art_nb.rewards.rubrics import Verdict
from art_nb.rewards.ruler import (
    Round,
    kendall_tau,
    mean_kendall_tau,
    mean_verdict,
    position_bias,
    presentation_orders,
    ruler,
    ruler_score_group,
    score_group,
)
from art_nb.rollouts.gather import gather_trajectory_groups
from art_nb.rollouts.trajectories import Trajectory, TrajectoryGroup
from art_nb.runs.store import RunStore
from art_nb.tokens.advantages import advantages, signal_report

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("error")]


# ---- the group


class Tagged(Trajectory):
    tag: str  # a required field of a subclass


class TaggedGroup(TrajectoryGroup):
    batch: int = 0


async def test_everything_of_the_group_is_kept():
    own = [
        Tagged(
            tag=f"t{i}",
            initial_policy_version=3,
            reward=i,
            logs=["own"],
            metadata={"seed": i},
            messages_and_choices=[ASK, {"role": "assistant", "content": f"a{i}"}],
        )
        for i in range(2)
    ]
    before = TaggedGroup(
        own,
        exceptions=[ValueError("failed")],
        metadata={"scenario_id": "s"},
        metrics={"m": 1},
        logs=["group log"],
        batch=7,
    )
    after = await ruler_score_group(before, lambda t: 0.1 + t.reward / 2, cache=None)
    assert (type(after), after.batch, after.logs, after.metrics["m"]) == (TaggedGroup, 7, ["group log"], 1)
    assert after.metadata["scenario_id"] == "s"
    assert [e.message for e in after.exceptions] == ["failed"]
    assert [(t.tag, t.initial_policy_version, t.metadata["seed"]) for t in after] == [("t0", 3, 0), ("t1", 3, 1)]
    assert [t.start_time for t in after] == [t.start_time for t in before]
    assert [t.logs[0] for t in after] == ["own", "own"]
    assert [(t.reward, t.logs, t.metrics) for t in before] == [(0.0, ["own"], {}), (1.0, ["own"], {})]


async def test_judged_twice_the_first_reward_stays():
    once = await ruler_score_group(animals(2), lambda t: 0.5, cache=None)
    twice = await ruler_score_group(once, lambda t: 0.9, cache=None)
    assert [(t.reward, t.metrics["independent_reward"]) for t in twice] == [(0.9, 0.25)] * 2


async def test_same_conversations_get_the_same_score(judge):
    judge.script = says(well)
    group = TrajectoryGroup([saying(text) for text in ("cat", "dog", "cat", "dog", "cow")])
    scores = (await scored(judge, group)).scores()
    assert judge.asked[0]["messages"][1]["content"].count("<trajectory id") == 3
    assert scores[0] == scores[2]
    assert scores[1] == scores[3]


async def test_one_or_identical_trajectories_get_an_absolute_score(judge):
    judge.script = says(table([0.7]))
    assert (await scored(judge, TrajectoryGroup([saying("cat")] * 3))).scores() == [0.7] * 3
    assert (await scored(judge, TrajectoryGroup([saying("cat")]))).scores() == [0.7]


async def test_an_empty_group_sends_no_request():
    group = TrajectoryGroup([ValueError("all failed")])
    assert await ruler_score_group(group, "openai/o3") is group
    assert await ruler([], "openai/o3") == []


async def test_ruler_on_message_lists(judge):
    judge.script = says(table(GOOD[:2]))
    lists = [saying(text).messages() for text in "abc"]
    found = await ruler(lists, address(judge), FAST, cache=None)
    assert [(s.trajectory_id, s.score) for s in found] == [("1", 0.2), ("2", 0.9), ("3", None)]
    trajectory = saying("c")
    with pytest.raises(ValueError, match="reward"):
        trajectory.reward = found[2].score


async def test_debug_prints_what_was_said(judge, capsys):
    judge.script = says(well)
    await ruler_score_group(animals(), address(judge), FAST, debug=True, cache=None)
    assert "because" in capsys.readouterr().out


# ---- rewards


@settings(max_examples=60)
@given(st.lists(st.none() | st.floats(-2, 3), min_size=1, max_size=6))
def test_rewards_are_the_judges_scores_and_nothing_else(said):
    by_text = {f"animal {i}": score for i, score in enumerate(said)}
    group = animals(len(said))

    async def judged():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return await ruler_score_group(
                group, lambda t: by_text[t.messages()[1]["content"]], cache=None, swallow_exceptions=True
            )

    after = asyncio.run(judged())
    expected = [min(max(score, 0.0), 1.0) for score in said if score is not None]
    assert [t.reward for t in after or ()] == expected
    assert (after is None) == (expected == [])
    if after is not None:
        assert np.isfinite(advantages([[t.reward for t in after]])[0]).all()
        assert len(after.exceptions) == said.count(None)


async def test_a_judged_group_survives_the_disk(judge, tmp_path):
    judge.script = says(table([0.2, 0.9]))
    with pytest.warns(UserWarning, match="unscored"):
        group = await ruler_score_group(animals(), address(judge), FAST, cache=None)
    store = RunStore(tmp_path)
    store.write_groups("train", 1, [group])
    again = store.read_groups("train", 1)[0]
    assert [t.reward for t in again] == [0.2, 0.9]
    assert again.metadata["unscored"][0]["problem"] == "the judge gave no score"
    assert again.trajectories[1].metadata["ruler_explanation"] == "because 0.9"


# ---- in a gather


async def roll(text):
    return saying(text, reward=-1.0)


def pending(*texts):
    return [TrajectoryGroup((roll(text) for text in group), metadata={"scenario_id": group[0]}) for group in texts]


async def test_after_each_judges_every_group(judge):
    judge.script, bus, heard = says(well), Bus(), []
    bus.subscribe(heard.append, Judged, Warned)
    groups = await gather_trajectory_groups(
        pending(["a", "b"], ["c", "d", "e"]),
        pbar_desc=None,
        bus=bus,
        step=4,
        after_each=lambda g: ruler_score_group(g, address(judge), FAST, cache=None, swallow_exceptions=True),
    )
    assert [sorted(t.reward for t in g) for g in groups] == [[0, 0.5], pytest.approx([0, 1 / 3, 2 / 3])]
    assert [type(event) for event in heard] == [Judged, Judged]
    assert {event.group for event in heard} == {g.metadata["group_id"] for g in groups}
    assert all(event.tokens == 120 and event.judge == address(judge) for event in heard)


async def test_a_group_that_cannot_be_judged_is_dropped_with_a_warning(judge):
    judge.script, bus, heard = says("no"), Bus(), []
    bus.subscribe(heard.append, Warned)
    hook = lambda g: ruler_score_group(g, address(judge), FAST, cache=None, swallow_exceptions=True)
    groups = await gather_trajectory_groups(pending(["a", "b"], ["c", "d"]), pbar_desc=None, bus=bus, after_each=hook)
    assert groups == []
    assert [("dropped" in event.message, "scored none of 2" in event.message) for event in heard] == [(True, True)] * 2
    assert "no trajectories" in signal_report(groups).reason


async def test_without_swallowing_the_gather_ends(judge):
    judge.script = says("no")
    with pytest.raises(JudgeError):
        await gather_trajectory_groups(
            pending(["a", "b"]),
            pbar_desc=None,
            after_each=lambda g: ruler_score_group(g, address(judge), FAST, cache=None),
        )


async def test_journal_has_a_line_for_each(judge, tmp_path):
    judge.script, journal = says(table([0.2, 0.9])), Journal(tmp_path)
    bus = Bus()
    groups = await gather_trajectory_groups(
        pending(["a", "b", "c"]),
        pbar_desc=None,
        bus=bus,
        step=6,
        after_each=lambda g: ruler_score_group(g, address(judge), FAST, cache=None, journal=journal, seed=9),
    )
    rows = journal.read()
    assert sorted((r.trajectory, r.score) for r in rows if r.score is not None) == [(0, 0.2), (1, 0.9)]
    assert [(r.trajectory, r.reason) for r in rows if r.score is None] == [(-1, "the judge gave no score")]
    assert {(r.step, r.judge, r.by, r.order_seed, r.tokens) for r in rows} == {(6, address(judge), "judge", 9, 120)}
    for i, trajectory in enumerate(groups[0]):
        counts = journal.current(groups[0])[i]
        assert (counts.score, counts.rollout) == (trajectory.reward, trajectory.metadata["rollout_id"])


async def test_a_group_of_failures_has_nothing_to_write_down(tmp_path):
    failed = TrajectoryGroup([], exceptions=[ValueError("all broke")])
    assert await ruler_score_group(failed, lambda t: 0.5, cache=None, journal=Journal(tmp_path)) is failed
    assert Journal(tmp_path).read() == []


# ---- repeats, Kendall tau and position bias


def favouring_first(bonus):
    """A judge that likes what stands first."""

    def answer(messages):
        shown = parsed(messages[1]["content"])
        n = len(shown) - 1
        texts = [shown[f'<trajectory id="{i}">'][0]["content"] for i in range(1, n + 1)]
        return table([0.3 + 0.1 * int(text[-1]) + bonus * (n - 1 - i) / n for i, text in enumerate(texts)])

    async def complete(messages):
        return ModelReply(answer(messages), tokens=1, cost=0.5)

    return ListwiseJudge("favouring", complete)


async def test_repeats_cancel_an_even_preference():
    once = await score_group(animals(4), favouring_first(0.6), cache=None)
    twice = await score_group(animals(4), favouring_first(0.6), repeats=2, cache=None)
    assert np.argsort(once.scores()).tolist() == [3, 2, 1, 0]
    assert np.argsort(twice.scores()).tolist() == [0, 1, 2, 3]
    assert np.diff(twice.scores()) == pytest.approx([0.1] * 3)
    assert (twice.cost, twice.tokens, twice.calls) == (1.0, 2, 2)
    assert mean_kendall_tau(twice.rounds) < 1


async def test_position_bias_is_found_and_only_where_it_is():
    async def session(bonus):
        ask = lambda seed: score_group(animals(4), favouring_first(bonus), repeats=4, seed=seed, cache=None)
        many = [await ask(seed) for seed in range(8)]
        return position_bias(r for one in many for r in one.rounds)

    fair, biased = await session(0.0), await session(0.6)
    assert fair.warning == ""
    assert "prefers early places" in biased.warning
    assert biased.mean_rank == sorted(biased.mean_rank)
    assert biased.rounds == 32


def test_chance_is_not_called_a_bias():
    rng = np.random.default_rng(0)
    by_chance = lambda: Round(rng.permutation(5).tolist(), [Verdict(float(s)) for s in rng.random(5)])
    z = [position_bias(by_chance() for _ in range(30)).z for _ in range(200)]
    assert abs(np.mean(z)) < 0.25
    assert 0.8 < np.std(z) < 1.2


@given(st.integers(1, 9), st.integers(1, 7), st.integers(0, 5))
def test_orders_are_orders(n, repeats, seed):
    drawn = presentation_orders(n, repeats, seed)
    assert len(drawn) == repeats
    assert all(sorted(order) == list(range(n)) for order in drawn)
    assert all(a == b[::-1] for a, b in zip(drawn[::2], drawn[1::2], strict=False))
    assert drawn == presentation_orders(n, repeats, seed)


def tau_by_count(a, b):
    """τ-b from its definition, pair by pair."""
    pairs = [(i, j) for i in range(len(a)) for j in range(i)]
    alike = sum((a[i] > a[j]) == (b[i] > b[j]) for i, j in pairs if a[i] != a[j] and b[i] != b[j])
    both = sum(a[i] != a[j] and b[i] != b[j] for i, j in pairs)
    n_a, n_b = (sum(x[i] != x[j] for i, j in pairs) for x in (a, b))
    return (2 * alike - both) / (n_a * n_b) ** 0.5 if n_a and n_b else float("nan")


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8))
def test_kendall_tau_is_tau_b(pairs):
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    assert kendall_tau(a, b) == pytest.approx(tau_by_count(a, b), nan_ok=True)


@pytest.mark.parametrize("error", [JudgeError("down"), KeyError("down")], ids=["its own", "another"])
async def test_a_round_that_fails_leaves_the_others(error):
    calls = iter([error, None])

    class Flaky:
        name, lasting = "flaky", False

        async def judge(self, question, repeat=0):
            error = next(calls)
            if error:
                raise error
            return JudgeReply([Verdict(0.5) for _ in question.trajectories])

    result = await score_group(animals(2), Flaky(), repeats=2, cache=None)
    assert result.scores() == [0.5, 0.5]
    assert "down" in result.verdicts[0].problem


@pytest.mark.parametrize("n", [0, 1, 3])
async def test_a_wrong_number_of_verdicts_is_an_error(n):
    class Miscounting:
        name, lasting = "miscounting", False

        async def judge(self, question, repeat=0):
            return JudgeReply([Verdict(0.5) for _ in range(n)])

    message = rf"miscounting returned {n} verdicts for 2 trajectories\. Return one verdict per trajectory"
    with pytest.raises(JudgeError, match=message):
        await score_group(animals(2), Miscounting(), cache=None)
    with pytest.warns(UserWarning, match=message):
        assert await ruler_score_group(animals(2), Miscounting(), cache=None, swallow_exceptions=True) is None


def test_the_mean_is_over_the_rounds_that_scored():
    assert mean_verdict([Verdict(0.2), Verdict(None, problem="x"), Verdict(0.4)]).score == pytest.approx(0.3)
    assert mean_verdict([Verdict(None, problem="x")] * 2).score is None
