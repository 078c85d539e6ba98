"""Python functions and persons as judges, the cache of a judge, and recordings."""

import asyncio

import pytest
from support.scripted_judge import FAST, GOOD, KEY, address, animals, says, served_model, table, well

from art_nb.core.types import JudgeError
from art_nb.rewards import judges
from art_nb.rewards.judges import CachedJudge, JudgeCache, Person, ReplayJudge, as_judge
from art_nb.rewards.llm_judges import JudgeReply
from art_nb.rewards.rubrics import Verdict
from art_nb.rewards.ruler import ruler_score_group, score_group, with_scores
from art_nb.rollouts.trajectories import TrajectoryGroup

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("error")]


# ---- functions and persons


async def test_a_rule_plain_or_async():
    async def slow(trajectory):
        await asyncio.sleep(0)
        return True

    by_rule = lambda t: (0.5, "half") if "1" in t.messages()[1]["content"] else 1 / 0
    verdicts = (await score_group(animals(2), by_rule, cache=None)).verdicts
    assert [v.score for v in verdicts] == [None, 0.5]
    assert verdicts[1].explanation == "half"
    assert "ZeroDivisionError" in verdicts[0].problem
    assert (await score_group(animals(2), slow, cache=None)).scores() == [1.0, 1.0]


@pytest.mark.parametrize("value", [None, "high", float("nan"), object()], ids=lambda v: type(v).__name__)
async def test_what_a_rule_may_not_say(value):
    with pytest.raises(JudgeError, match="returned"):
        await score_group(animals(2), lambda t: value, cache=None)


async def test_a_person_answers_from_another_thread():
    asked_of = []
    person = Person(on_question=lambda key, question: asked_of.append(key))
    waiting = asyncio.ensure_future(score_group(animals(2), person, cache=None))
    while not asked_of:
        await asyncio.sleep(0.001)
    with pytest.raises(JudgeError, match="1 scores for 2"):
        person.answer(asked_of[0], [0.5])
    await asyncio.to_thread(person.answer, asked_of[0], [0.9, 1.4], ["good", "better"])
    result = await waiting
    assert result.scores() == [0.9, 1.0]
    assert not person.pending
    with pytest.raises(JudgeError, match="answered or withdrawn"):
        person.answer(asked_of[0], [0.5, 0.5])


@pytest.mark.parametrize("score", [float("nan"), "good", [1]])
async def test_a_person_must_answer_with_numbers(score):
    person = Person()
    waiting = asyncio.ensure_future(score_group(animals(2), person, cache=None))
    while not person.pending:
        await asyncio.sleep(0.001)
    [key] = person.pending
    with pytest.raises(JudgeError, match="Invalid score .* of trajectory 1: expected a number from 0 to 1, or None"):
        person.answer(key, [0.5, score])
    person.answer(key, [0.5, None])  # the question is still open
    assert [t.reward for t in with_scores(animals(2), await waiting)] == [0.5]


async def test_a_person_who_leaves():
    person = Person()
    waiting = asyncio.ensure_future(score_group(animals(2), person, cache=None))
    while not person.pending:
        await asyncio.sleep(0.001)
    person.withdraw(next(iter(person.pending)))
    with pytest.raises(JudgeError, match="withdrawn"):
        await waiting
    waiting = asyncio.ensure_future(score_group(animals(2), person, cache=None))
    while not person.pending:
        await asyncio.sleep(0.001)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not person.pending


@pytest.mark.parametrize("what", [None, 3, "", object()], ids=lambda v: type(v).__name__)
def test_what_is_no_judge(what):
    with pytest.raises(JudgeError, match="Invalid judge"):
        as_judge(what)


async def test_a_rubric_in_the_place_of_the_parameters():
    with pytest.raises(JudgeError, match="use `rubric=`"):
        await ruler_score_group(animals(), "openai/o3", "Be strict.")


def test_parameters_go_with_names_only():
    with pytest.raises(JudgeError, match="parameters temperature have no effect on"):
        as_judge(len, {"temperature": 1})


# ---- the cache and recordings


async def test_the_same_question_is_asked_once(judge, tmp_path):
    judge.script, cache = says(well), tmp_path / "cache.jsonl"
    ask = lambda group, **options: score_group(group, address(judge), params=FAST, cache=cache, **options)
    first = await ask(animals())
    second = await ask(animals())
    assert (len(judge.asked), first.cached, second.cached) == (1, False, True)
    assert (second.cost, second.tokens, second.calls) == (0, 0, 0)
    assert second.verdicts == first.verdicts
    await ask(animals(), rubric="Longer is better.")
    await ask(TrajectoryGroup(animals().trajectories[::-1]))
    await score_group(animals(), address(judge, "another"), params=FAST, cache=cache)
    await score_group(animals(), address(judge), params=FAST | {"temperature": 0}, cache=cache)
    assert len(judge.asked) == 5
    await ask(animals(), repeats=3)
    assert len(judge.asked) == 8
    assert KEY not in cache.read_text()


async def test_an_invalid_reply_is_not_cached(judge, tmp_path):
    judge.script, cache = says("no", "no", "no", table(GOOD)), tmp_path / "cache.jsonl"
    with pytest.raises(JudgeError):
        await score_group(animals(), address(judge), params=FAST, cache=cache)
    assert (await score_group(animals(), address(judge), params=FAST, cache=cache)).scores() == GOOD


async def test_a_cache_survives_a_torn_line_and_another_process(judge, tmp_path):
    judge.script, cache = says(well), tmp_path / "cache.jsonl"
    ask = lambda n: score_group(animals(n), address(judge), params=FAST, cache=cache)
    await ask(2)
    with cache.open("ab") as file:
        file.write(b'{"key": "torn')
    await ask(3)
    lines = cache.read_bytes().splitlines(keepends=True)
    cache.write_bytes(b"".join(lines))
    judges.judge_cache.cache_clear()  # as a new process sees it
    assert (await ask(2)).cached
    assert (await ask(3)).cached
    assert len(judge.asked) == 2


def test_two_caches_with_the_same_file(tmp_path):
    mine, theirs = JudgeCache(tmp_path / "t.jsonl"), JudgeCache(tmp_path / "t.jsonl")
    mine.put("a", "j", JudgeReply([Verdict(0.5)]))
    assert theirs.get("a").verdicts == [Verdict(0.5)]
    mine.put("b", "j", JudgeReply([Verdict(0.25)]))
    assert theirs.get("b").verdicts == [Verdict(0.25)]
    assert theirs.get("c") is None


async def test_a_recording_is_replayed_without_the_judge(judge, tmp_path):
    judge.script, path = says(well), tmp_path / "strong.jsonl"
    params = FAST | {"temperature": 0.5}
    before = await score_group(animals(), address(judge), params=params, repeats=2, cache=path)
    judge.script = [(500, "down")]
    again = await score_group(animals(), f"recording:{path}", repeats=2)
    assert again.scores() == before.scores()
    assert again.judge == address(judge)
    assert again.tokens == 240  # what it took when it was recorded
    with pytest.raises(JudgeError, match="holds no answer"):
        await score_group(animals(4), f"recording:{path}")
    with pytest.raises(JudgeError, match="pass the rubric of the recording"):
        await score_group(animals(), f"recording:{path}", "Short answers are better.")
    with pytest.raises(JudgeError, match="holds no answer"):
        await score_group(animals(), ReplayJudge(JudgeCache(tmp_path / "nothing.jsonl")))


async def test_what_a_person_said_can_be_recorded(tmp_path):
    path, person = tmp_path / "person.jsonl", Person("a careful reader")
    waiting = asyncio.ensure_future(score_group(animals(2), CachedJudge(person, JudgeCache(path))))
    while not person.pending:
        await asyncio.sleep(0.001)
    person.answer(next(iter(person.pending)), [0.9, 0.1], ["good", "bad"])
    await waiting
    again = await score_group(animals(2), f"recording:{path}")
    assert (again.judge, again.scores()) == ("a careful reader", [0.9, 0.1])
    assert [v.explanation for v in again.verdicts] == ["good", "bad"]


async def test_changing_weights_are_not_kept(judge, tmp_path):
    judge.script = says(well)
    for _ in range(2):
        await score_group(animals(), served_model(judge, trainable=True), cache=tmp_path / "c.jsonl")
    assert len(judge.asked) == 2
