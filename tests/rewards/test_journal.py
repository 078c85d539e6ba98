"""The journal of judgments: overrides, agreement and preference pairs."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scripted_judge import ASK, animals, saying

from art_nb.core.types import JudgeError
from art_nb.rewards.journal import (
    Agreement,
    Journal,
    agreement,
    compare,
    current,
    disagreements,
    override,
    preference_pairs,
    with_overrides,
)
from art_nb.rewards.judges import Judgment
from art_nb.rewards.ruler import ranks, ruler_score_group, score_group, with_scores
from art_nb.rollouts.trajectories import History, TrajectoryGroup

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("error")]


def human(i, score, **more):
    return Judgment("g1", i, score, by="human", judge="human", **more)


async def test_a_person_stands_above_the_judge(tmp_path):
    journal, group = Journal(tmp_path / "judgements.jsonl"), animals()
    by_number = lambda t: 0.1 * int(t.messages()[1]["content"][-1])
    judged = await ruler_score_group(group, by_number, cache=None, journal=journal)
    journal.append(override(group, {0: 0.8, 2: 7.0}, "better than it looks"))
    after = with_overrides(judged, journal.current(group))
    assert [t.reward for t in after] == [0.8, 0.1, 1.0]
    assert [t.metrics["ruler_score"] for t in after] == [0.0, 0.1, 0.2]
    assert after.trajectories[0].metadata["human_reason"] == "better than it looks"
    assert [t.reward for t in judged] == [0.0, 0.1, 0.2]
    journal.append(override(group, {0: None}))
    assert [t.reward for t in with_overrides(judged, journal.current(group))] == [0.0, 0.1, 1.0]
    assert len(journal.read()) == 6  # nothing was rewritten


def test_the_journal_reads_what_others_wrote(tmp_path):
    journal = Journal(tmp_path)
    assert journal.read() == []
    journal.append([human(0, 0.5, reason="\ud800</script>\x00")])
    with journal.path.open("ab") as file:
        file.write(b'{"group": "g1", "trajectory": 1, "score": 0.25, "of_the_future": 1}\n{"note": "x"}\n{"torn')
    journal.append([human(2, None)])
    rows = journal.read()
    assert [(r.trajectory, r.score) for r in rows] == [(0, 0.5), (1, 0.25), (2, None)]
    assert rows[0].reason.endswith("</script>\x00")


def test_agreement_is_counted():
    rows = [Judgment("g1", i, s, judge="j") for i, s in enumerate([0.9, 0.6, 0.3])]
    rows += [human(0, 0.2), human(1, 0.9), human(2, 0.1)]
    found = agreement(rows)
    assert (found.agree, found.disagree, found.tied) == (2, 1, 0)
    assert str(found) == "2 of 3 pairs ordered alike"
    assert [(d.pair, d.judge, d.human) for d in disagreements(rows)] == [((0, 1), (0.9, 0.6), (0.2, 0.9))]
    assert agreement(rows, judge="somebody else").pairs == 0
    assert agreement([*rows, Judgment("g1", 0, 0.95, judge="k", step=1)]).pairs == 3


def test_a_tie_of_one_rater_is_counted_as_such():
    assert compare([0.5, 0.5, 0.1], [0.9, 0.8, 0.1]) == Agreement(2, 0, 1, [pytest.approx(0.8165, abs=1e-4)])
    assert compare([0.5, 0.5], [0.9, 0.9]).pairs == 0


def test_ranks_share_the_mean_of_their_places():
    assert ranks([0.9, None, 0.5, 0.5, 0.1]) == [1.0, None, 2.5, 2.5, 4.0]


@pytest.mark.parametrize(("n", "percent"), [(19, False), (20, True)])
def test_no_percentage_below_twenty_pairs(n, percent):
    assert ("%" in str(Agreement(agree=n))) == percent


@given(st.lists(st.tuples(st.none() | st.integers(0, 3), st.none() | st.integers(0, 3)), max_size=7))
def test_agreement_is_symmetric_and_counts_each_pair_once(pairs):
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    one, other = compare(a, b), compare(b, a)
    assert (one.agree, one.disagree, one.tied) == (other.agree, other.disagree, other.tied)
    n = sum(x is not None and y is not None for x, y in pairs)
    assert one.pairs <= n * (n - 1) / 2


SAID = st.tuples(st.integers(0, 2), st.none() | st.floats(0, 1), st.sampled_from(["judge", "human"]))


@given(st.lists(SAID, max_size=12))
def test_what_counts_is_the_latest_of_the_person_else_of_the_judge(said):
    rows = [Judgment("g", i, score, by=by) for i, score, by in said]
    for i in range(3):
        humans = [s for j, s, by in said if j == i and by == "human"]
        scores = [s for j, s, by in said if j == i and by == "judge" and s is not None]
        expected = next((s for s in (humans[-1:] + scores[-1:]) if s is not None), None)
        found = current(rows).get(i)
        assert (found.score if found else None) == expected


def test_preference_pairs():
    group = TrajectoryGroup([saying("cat", reward=0.9), saying("dog", reward=0.5), saying("cow", reward=0.45)])
    pairs = preference_pairs([group], margin=0.1)
    assert [(p["chosen"][0]["content"], p["rejected"][0]["content"]) for p in pairs] == [("cat", "dog"), ("cat", "cow")]
    assert all(p["prompt"] == [ASK] for p in pairs)
    assert preference_pairs([TrajectoryGroup([saying("cat")])]) == []
    assert preference_pairs([TrajectoryGroup([saying("cat", reward=0.5), saying("dog", reward=0.5)])]) == []


def test_preference_pairs_have_the_messages_of_the_conversation():
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}
    trajectories = [saying("cat", reward=0.9), saying("dog", reward=0.1)]
    for trajectory in trajectories:
        trajectory.messages_and_choices.insert(0, image)
    [pair] = preference_pairs([TrajectoryGroup(trajectories)])
    assert pair["prompt"] == [image, ASK]


def test_additional_histories_are_no_preference_pair():
    group = TrajectoryGroup([saying("cat", reward=0.9), saying("dog", reward=0.1)])
    group.trajectories[0].additional_histories = [History(messages_and_choices=[ASK])]
    with pytest.raises(ValueError, match="additional histories"):
        preference_pairs([group])


@pytest.mark.parametrize("score", [float("nan"), float("inf"), "good", [1]])
def test_an_override_must_be_a_number(score):
    with pytest.raises(JudgeError, match=r"Invalid score .* of trajectory 2: expected a number from 0 to 1, or None"):
        override("g1", {0: 0.5, 2: score})


def test_with_scores_leaves_the_input_alone():
    group = animals(2)
    scores = asyncio.run(score_group(group, lambda t: 0.5, cache=None))
    after = with_scores(group, scores)
    after.trajectories[0].messages_and_choices.append(ASK)
    after.trajectories[0].metrics["x"] = 1
    assert len(group.trajectories[0].messages_and_choices) == 2
    assert group.trajectories[0].metrics == {}
