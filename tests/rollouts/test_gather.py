"""Gathering rollouts that crash, hang, lie, and finish in any order; on any event loop."""

import asyncio
import gc
import io
import math
import random
import threading
import time

import numpy as np
import pytest
from openai.types.chat.chat_completion import Choice
from support.registered import until
from tqdm import tqdm

from art_nb.core import aio as tasks
from art_nb.core.aio import limit_concurrency, retry
from art_nb.core.events import Bus, GroupDone, RolloutDone, RolloutStarted
from art_nb.core.types import RolloutError
from art_nb.rollouts.gather import (
    GatherState,
    Means,
    current_rollout,
    gather_trajectories,
    gather_trajectory_groups,
    trajectory_group_batches,
)
from art_nb.rollouts.trajectories import History, Trajectory, TrajectoryGroup

pytestmark = pytest.mark.filterwarnings("error")
QUIET = {"pbar_desc": None}


def said(**extra):
    message = {"role": "assistant", "content": "x"}
    return Choice.model_validate({"index": 0, "finish_reason": "stop", "message": message, **extra})


def sampled(n):
    return said(token_ids=list(range(n)), prompt_token_ids=[1])


def spelt(n):
    return said(logprobs={"content": [{"token": "a", "logprob": -0.1, "top_logprobs": []}] * n})


async def make(reward=0.0, pause_s=0.0, entries=()):
    await asyncio.sleep(pause_s)
    return Trajectory(messages_and_choices=list(entries), reward=reward)


async def crash(pause_s=0.0):
    await asyncio.sleep(pause_s)
    raise ValueError("boom")


async def hang():
    await asyncio.Event().wait()


class Sleepers:
    """Rollouts that sleep, and know how they ended."""

    def __init__(self):
        self.started = self.cancelled = 0

    async def __call__(self):
        self.started += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # clean-up that takes a moment
            self.cancelled += 1
            raise


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    yield
    gc.collect()  # a coroutine that nobody awaited speaks up here


# the limit of failures


@pytest.mark.parametrize(
    ("limit", "crashes", "of", "passes"),
    [
        (0, 0, 4, True),
        (0, 1, 4, False),
        (1, 1, 4, True),
        (1, 2, 4, False),
        (1.0, 2, 4, False),
        (3, 3, 4, True),
        (0.5, 2, 4, True),
        (0.5, 3, 4, False),
        (0.25, 1, 4, True),
        (0.99, 4, 4, False),
        (math.inf, 4, 4, True),
    ],
)
async def test_max_exceptions_is_a_count_or_a_share(limit, crashes, of, passes):
    def rollouts():
        return [crash() for _ in range(crashes)] + [make() for _ in range(of - crashes)]

    if passes:
        results = await gather_trajectories(rollouts(), max_exceptions=limit, **QUIET)
        assert [isinstance(r, ValueError) for r in results] == [True] * crashes + [False] * (of - crashes)
        [group] = await gather_trajectory_groups([TrajectoryGroup(rollouts())], max_exceptions=limit, **QUIET)
        assert (len(group), len(group.exceptions)) == (of - crashes, crashes)
        assert all("in crash" in e.traceback and e.type == "ValueError" for e in group.exceptions)
        return
    with pytest.raises(ValueError, match="boom") as caught:
        await gather_trajectories(rollouts(), max_exceptions=limit, **QUIET)
    assert caught.value.__notes__[0].startswith("\nfailure ") and "max_exceptions" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="boom"):
        await gather_trajectory_groups([TrajectoryGroup(rollouts())], max_exceptions=limit, **QUIET)


async def test_failures_are_counted_over_all_groups():
    def groups():
        return [TrajectoryGroup([make(), crash()]) for _ in range(3)]

    assert len(await gather_trajectory_groups(groups(), max_exceptions=3, **QUIET)) == 3
    with pytest.raises(ValueError, match="boom"):
        await gather_trajectory_groups(groups(), max_exceptions=2, **QUIET)


async def test_beyond_the_limit_siblings_are_cancelled_and_awaited():
    sleep = Sleepers()
    groups = [TrajectoryGroup(sleep() for _ in range(5)) for _ in range(3)] + [TrajectoryGroup([crash(0.01), sleep()])]
    with pytest.raises(ValueError, match="boom"):
        await gather_trajectory_groups(groups, **QUIET)
    assert (sleep.started, sleep.cancelled) == (16, 16)
    with pytest.raises(ValueError, match="boom"):
        await gather_trajectories([sleep(), crash(0.01)], **QUIET)
    assert sleep.cancelled == 17
    assert len(asyncio.all_tasks()) == 1


async def test_rollouts_that_never_started_are_closed_quietly():
    sleep = Sleepers()
    with pytest.raises(ValueError, match="boom"):
        await gather_trajectory_groups([crash(), TrajectoryGroup([sleep()]), sleep()], **QUIET)
    task = asyncio.ensure_future(gather_trajectory_groups([TrajectoryGroup([sleep()])], **QUIET))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    gc.collect()


async def test_cancelling_the_gather_cancels_the_rollouts():
    sleep, bus, heard = Sleepers(), Bus(), []
    bus.subscribe(heard.append, RolloutDone)
    task = asyncio.create_task(gather_trajectory_groups([TrajectoryGroup([sleep(), sleep()])], bus=bus, **QUIET))
    await until(lambda: sleep.started == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sleep.cancelled == 2
    assert [e.error.split(":")[0] for e in heard] == ["cancelled", "cancelled"]


# bad rollouts


async def test_a_hung_rollout_is_a_failure_with_the_place_it_hung():
    """Nothing but the deadline ends `hang`, so the gather returns only if the deadline works."""
    group = TrajectoryGroup([make(1), hang(), make(2)])
    gathered = gather_trajectory_groups([group], max_exceptions=1, timeout_s=0.5, **QUIET)
    [group] = await asyncio.wait_for(gathered, 60)
    assert sorted(t.reward for t in group) == [1, 2]
    assert "0.5 s" in group.exceptions[0].message
    assert "in hang" in group.exceptions[0].traceback


async def test_a_rollout_that_swallows_its_cancellation_does_not_hold_the_gather(monkeypatch):
    free, ended = asyncio.Event(), asyncio.Event()

    async def stubborn():
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                pass
        ended.set()

    monkeypatch.setattr(tasks.cancel_and_wait, "__defaults__", (0.05,))
    gathered = gather_trajectories([stubborn(), make()], timeout_s=0.5, max_exceptions=1, **QUIET)
    results = await asyncio.wait_for(gathered, 60)
    assert isinstance(results[0], RolloutError) and isinstance(results[1], Trajectory)
    assert not ended.is_set()
    free.set()
    await asyncio.wait_for(ended.wait(), 60)


async def test_a_gather_that_is_canceled_twice_still_waits_for_its_rollouts():
    """As when two groups fail at once: the second cancellation arrives while the first one is awaited."""
    sleep = Sleepers()
    gathered = asyncio.ensure_future(gather_trajectories([sleep(), sleep()], **QUIET))
    await until(lambda: sleep.started == 2)
    for _ in range(2):
        gathered.cancel()
        await asyncio.sleep(0.001)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(gathered, 60)
    assert sleep.cancelled == 2
    assert len(asyncio.all_tasks()) == 1


async def test_a_rollout_that_cancels_itself_is_a_failure_not_our_end():
    async def gives_up():
        raise asyncio.CancelledError("scope left")

    results = await gather_trajectories([gives_up(), make(1)], max_exceptions=1, **QUIET)
    assert "canceled from within" in str(results[0])
    assert results[1].reward == 1


@pytest.mark.parametrize("value", [None, 3, "text", {"reward": 1}, ValueError("returned")])
async def test_what_is_no_trajectory_is_a_failure(value):
    pending = TrajectoryGroup([asyncio.sleep(0, value), make()])
    [group] = await gather_trajectory_groups([pending], max_exceptions=1, **QUIET)
    assert (len(group), group.exceptions[0].type) == (1, "art_nb.types.RolloutError")
    assert type(value).__name__ in group.exceptions[0].message


@pytest.mark.parametrize("reward", [math.nan, math.inf, np.float32("nan")])
async def test_a_reward_that_is_no_finite_number_is_a_failure(reward):
    async def ready():
        return TrajectoryGroup([await make(reward), await make(1)])

    finished = TrajectoryGroup([await make(reward), await make(1)])
    groups = [TrajectoryGroup([make(reward), make(1)]), ready(), finished]
    for group in await gather_trajectory_groups(groups, max_exceptions=3, **QUIET):
        assert [t.reward for t in group] == [1]
        assert "reward is" in group.exceptions[0].message
    assert len(finished) == 2
    with pytest.raises(RolloutError):
        await gather_trajectories([make(reward)], **QUIET)


async def test_metrics_that_are_no_numbers_do_not_break_the_gather():
    async def noted(value):
        trajectory = Trajectory()
        trajectory.metrics["note"] = value
        return trajectory

    results = await gather_trajectories([noted("text"), noted(None), noted(np.arange(3))], max_exceptions=1, **QUIET)
    assert [isinstance(r, Trajectory) for r in results] == [True, True, False]


# shapes of input and output


async def test_trajectories_keep_input_order_in_groups_too():
    results = await gather_trajectories([make(0, 0.03), make(1, 0.02), make(2)], **QUIET)
    assert [t.reward for t in results] == [0, 1, 2]
    groups = [TrajectoryGroup([make(0, 0.03), make(1)]), TrajectoryGroup([make(2)])]
    first, second = await gather_trajectory_groups(groups, **QUIET)
    assert [t.reward for t in first] == [0, 1]
    assert [t.reward for t in second] == [2]


async def test_a_rollout_may_return_several_trajectories():
    async def two():
        return [await make(1), await make(2)]

    single, several = await gather_trajectories([make(0), two()], **QUIET)
    assert single.reward == 0
    assert [t.reward for t in several] == [1, 2]


async def test_groups_may_be_finished_pending_or_coroutines():
    async def coroutine():
        return TrajectoryGroup([await make(1)])

    async def nested():
        return await TrajectoryGroup([make(2), crash()], metadata={"s": 1})

    async def nothing():
        return None

    groups = [TrajectoryGroup([await make(0)]), coroutine(), nested(), nothing(), crash(), asyncio.sleep(0, "wrong")]
    gathered = await gather_trajectory_groups(groups, max_exceptions=3, **QUIET)
    assert [[t.reward for t in g] for g in gathered] == [[0], [1], [2], [], []]
    assert [len(g.exceptions) for g in gathered] == [0, 0, 1, 1, 1]
    assert gathered[2].metadata == {"s": 1}
    assert await gather_trajectory_groups([], **QUIET) == []
    assert await gather_trajectories([], **QUIET) == []


@pytest.mark.parametrize(("succeeded", "failed", "said"), [(0, 3, True), (1, 3, False), (0, 1, False)])
async def test_the_limit_says_that_no_rollout_has_succeeded(succeeded, failed, said):
    gather = GatherState(total=8, max_exceptions=failed - 1)
    for _ in range(succeeded):
        await gather.run_rollout(make())
    for _ in range(failed - 1):
        await gather.run_rollout(crash())
    with pytest.raises(ValueError, match="boom") as caught:
        await gather.run_rollout(crash())
    assert ("no rollout has succeeded" in caught.value.__notes__[0]) is said


async def test_a_nested_failure_beyond_the_limit_is_counted_once():
    async def nested():
        return await TrajectoryGroup([crash()])

    with pytest.raises(ValueError, match="boom") as caught:
        await gather_trajectory_groups([nested()], **QUIET)
    assert len(caught.value.__notes__) == 1


async def test_the_strict_way_returns_after_a_gather():
    await gather_trajectory_groups([TrajectoryGroup([crash(), make()])], max_exceptions=1, **QUIET)
    with pytest.raises(ValueError, match="boom"):
        await TrajectoryGroup([crash(), make()])


# after_each


async def test_after_each_replaces_splits_and_drops():
    def after(group):
        reward = group.trajectories[0].reward
        return {0: group, 1: None, 2: [group, group]}[reward]

    async def after_async(group):
        return after(group)

    for callback in (after, after_async):
        groups = [TrajectoryGroup([make(r)]) for r in range(3)]
        gathered = await gather_trajectory_groups(groups, after_each=callback, **QUIET)
        assert [g.trajectories[0].reward for g in gathered] == [0, 2, 2]


async def test_after_each_runs_while_others_still_roll_out():
    judged = asyncio.Event()

    def after(group):
        judged.set()
        return group

    async def until_judged():
        await judged.wait()
        return await make(0)

    groups = [TrajectoryGroup([until_judged()]), TrajectoryGroup([make(1)])]
    assert len(await asyncio.wait_for(gather_trajectory_groups(groups, after_each=after, **QUIET), 120)) == 2


async def test_after_each_that_fails_ends_the_gather_and_the_rest():
    def broken(group):
        raise KeyError("judge")

    sleep = Sleepers()
    groups = [TrajectoryGroup([make()]), TrajectoryGroup([sleep()])]
    with pytest.raises(KeyError):
        await gather_trajectory_groups(groups, after_each=broken, max_exceptions=9, **QUIET)
    assert sleep.started == sleep.cancelled
    with pytest.raises(TypeError, match="after_each"):
        await gather_trajectory_groups([TrajectoryGroup([make()])], after_each=lambda g: 3, **QUIET)


async def test_after_each_never_sees_an_empty_group():
    seen = []

    def after(group):
        seen.append(len(group))
        return group

    groups = [TrajectoryGroup([crash()]), TrajectoryGroup([make()])]
    gathered = await gather_trajectory_groups(groups, after_each=after, max_exceptions=1, **QUIET)
    assert seen == [1]
    assert len(gathered) == 2


# tokens, the bar, events


async def test_completion_tokens_come_from_ids_or_logprobs():
    async def with_history():
        history = History(messages_and_choices=[sampled(5)])
        return Trajectory(messages_and_choices=[sampled(2), spelt(3)], additional_histories=[history])

    entries = [[sampled(4)], [spelt(3)], [said(), sampled(1)], []]
    results = await gather_trajectories([*(make(entries=e) for e in entries), with_history()], **QUIET)
    assert [t.metrics.get("completion_tokens") for t in results] == [4, 3, None, None, 10]
    [group] = await gather_trajectory_groups([TrajectoryGroup([make(entries=[sampled(4)])])], **QUIET)
    assert group.trajectories[0].metrics == {"completion_tokens": 4}


def test_running_means():
    means = Means()
    for i in range(4):
        means.add({"reward": i, "won": i > 1, "completion_tokens": 10} | ({"rare": np.float32(3)} if i == 0 else {}))
    assert means.postfix(0) == {"reward": 1.5, "won": 0.5, "rare": 3.0, "completion_tokens": 10.0}
    assert list(means.postfix(2)) == ["reward", "won", "rare", "exceptions", "completion_tokens"]
    assert means.postfix(0, max_metrics=1) == {"reward": 1.5}
    assert means.postfix(0, total_tokens=True)["total_completion_tokens"] == 40
    assert list(means.postfix(1, names=["reward", "missing", "won"])) == ["reward", "won", "exceptions"]


@pytest.fixture
def bars(monkeypatch):
    """The bars that were drawn, real ones that write elsewhere."""
    drawn = []

    class Bar(tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs, file=io.StringIO())
            drawn.append(self)

    monkeypatch.setattr("art_nb.rollouts.gather.progress_bar", Bar)
    return drawn


async def test_what_stands_behind_the_bar_can_be_chosen(bars):
    def rollouts():
        return [make(1, entries=[sampled(4)]), make(3, entries=[sampled(2)])]

    await gather_trajectory_groups([TrajectoryGroup(rollouts())])
    await gather_trajectory_groups([TrajectoryGroup(rollouts())], max_metrics=1)
    await gather_trajectory_groups([TrajectoryGroup(rollouts())], pbar_total_completion_tokens=True)
    await gather_trajectories(rollouts(), pbar_total_completion_tokens=True)
    await gather_trajectories(rollouts(), pbar_metrics=["reward"])
    total = "reward=2, total_completion_tokens=6"
    assert [bar.postfix for bar in bars] == ["reward=2, completion_tokens=3", "reward=2", total, total, "reward=2"]


async def test_the_bar_estimates_the_remaining_time_only_after_enough_rollouts(bars):
    states = {}

    async def late(i):
        await asyncio.sleep(0.05 * i)
        states[i] = str(bars[0])  # after i rollouts
        return await make(1)

    await gather_trajectories([late(i) for i in range(12)])
    assert [i for i, text in states.items() if "<" in text] == [8, 9, 10, 11]
    assert all("it/s" not in states[i] for i in range(8)) and "7/12 [00:00, reward=1]" in states[7]
    assert "12/12" in str(bars[0]) and "it/s" in str(bars[0])


async def test_the_bar_counts_every_rollout_once(bars):
    async def coroutine():
        return TrajectoryGroup([await make(1), await make(2)])

    async def nested():
        return await TrajectoryGroup([make(3), crash(), make(4)])

    groups = [TrajectoryGroup([make(0), crash()]), coroutine(), nested(), TrajectoryGroup([await make(5)])]
    await gather_trajectory_groups(groups, max_exceptions=0.25)
    assert (bars[0].n, bars[0].total) == (8, 8)
    assert "reward=2.5" in bars[0].postfix
    assert "exceptions=2" in bars[0].postfix
    await gather_trajectories([make(1), crash()], max_exceptions=1, pbar_desc="val")
    assert (bars[1].n, bars[1].total, bars[1].desc) == (2, 2, "val")


async def test_events_describe_each_rollout_and_group():
    bus, heard, inside = Bus(run="r"), [], {}
    bus.subscribe(heard.append)

    async def rollout(reward):
        inside[reward] = current_rollout()
        await asyncio.create_task(asyncio.sleep(0))
        assert await asyncio.create_task(asyncio.sleep(0, current_rollout())) == inside[reward]
        return await make(reward, entries=[sampled(3)])

    pending = TrajectoryGroup([rollout(0), rollout(1), crash()], metadata={"scenario_id": 7})
    [group] = await gather_trajectory_groups([pending], bus=bus, step=4, max_exceptions=1, **QUIET)
    assert current_rollout() is None
    started = [e for e in heard if isinstance(e, RolloutStarted)]
    done = {e.rollout: e for e in heard if isinstance(e, RolloutDone)}
    [last] = [e for e in heard if isinstance(e, GroupDone)]
    assert heard[-1] is last
    assert {e.rollout for e in started} == set(done)
    assert {(e.group, e.step, e.scenario, e.run) for e in started} == {(last.group, 4, "7", "r")}
    assert (sorted(last.rewards), last.exceptions, group.metadata["group_id"]) == ([0, 1], 1, last.group)
    for trajectory in group:
        event = done[trajectory.metadata["rollout_id"]]
        assert inside[trajectory.reward] == event.rollout
        assert (event.reward, event.metrics, event.error) == (trajectory.reward, {"completion_tokens": 3}, None)
        assert event.seconds_s > 0
    assert [e.error for e in done.values() if e.error] == ["ValueError: boom"]


async def test_without_a_bus_metadata_is_left_alone():
    [group] = await gather_trajectory_groups([TrajectoryGroup([make()])], **QUIET)
    assert (group.metadata, group.trajectories[0].metadata) == ({}, {})


async def test_a_broken_subscriber_does_not_break_the_gather():
    bus = Bus()
    bus.subscribe(lambda event: 1 / 0)
    assert len(await gather_trajectories([make(), make()], bus=bus, **QUIET)) == 2


# loops


def test_the_functions_work_on_several_loops_at_once():
    limited = limit_concurrency(2)(make)
    results, errors = [], []

    def work():
        try:
            groups = (TrajectoryGroup(limited(i, 0.001) for i in range(4)) for _ in range(5))
            results.append(asyncio.run(gather_trajectory_groups(groups, **QUIET)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [sum(len(g) for g in r) for r in results] == [20] * 4


async def test_fuzz_any_mix_loses_nothing():
    rng = random.Random(0)
    kinds = [lambda: make(1, rng.random() / 200), lambda: crash(rng.random() / 200), hang, lambda: make(math.nan)]
    for _ in range(20):
        sizes = [rng.randint(1, 6) for _ in range(rng.randint(1, 6))]
        groups = [TrajectoryGroup(rng.choice(kinds)() for _ in range(n)) for n in sizes]
        limit = rng.choice([0, 1, 3, 0.3, math.inf])
        try:
            gathered = await gather_trajectory_groups(groups, max_exceptions=limit, timeout_s=0.02, **QUIET)
        except (ValueError, RolloutError):
            assert limit != math.inf
        else:
            assert [len(g) + len(g.exceptions) for g in gathered] == sizes
        assert len(asyncio.all_tasks()) == 1


async def test_two_thousand_rollouts_cost_no_more_each_than_two_hundred():
    """CPU time of this thread, the least of several: other processes hardly change it."""

    async def cost_s(size):
        times = []
        for _ in range(3):
            start_s = time.thread_time()
            groups = (TrajectoryGroup(make() for _ in range(10)) for _ in range(size))
            assert sum(map(len, await gather_trajectory_groups(groups, **QUIET))) == 10 * size
            times.append(time.thread_time() - start_s)
        return min(times)

    assert await cost_s(200) < 40 * await cost_s(20)  # linear: 10, quadratic: 100


# batches


async def test_batches_come_in_order_with_a_rest_and_can_be_skipped():
    def groups():
        return (TrajectoryGroup([make(i, 0.02 - i * 0.002)]) for i in range(7))

    async def run(**options):
        batches = trajectory_group_batches(groups(), **options, **QUIET)
        return [[group.trajectories[0].reward for group in batch] async for batch in batches]

    assert await run(batch_size=3) == [[0, 1, 2], [3, 4, 5], [6]]
    assert await run(batch_size=3, skip_batches=1) == [[3, 4, 5], [6]]
    assert await run(batch_size=3, max_concurrent_batches=1) == [[0, 1, 2], [3, 4, 5], [6]]
    assert await run(batch_size=3, skip_batches=9) == []


@pytest.mark.parametrize("ahead", [1, 2, 4])
async def test_batches_run_only_so_far_ahead_of_an_endless_source(ahead):
    started = []

    async def rollout(i):
        started.append(i)
        return await make(i)

    def endless():
        i = 0
        while True:
            yield TrajectoryGroup([rollout(i)])
            i += 1

    batches = trajectory_group_batches(endless(), batch_size=1, max_concurrent_batches=ahead, **QUIET)
    for taken in range(3):
        await anext(batches)
        await until(lambda n=taken + ahead: len(started) == n)
        await asyncio.sleep(0.01)
        assert len(started) == taken + ahead
    await batches.aclose()


async def test_leaving_the_batches_early_stops_the_rest():
    sleep = Sleepers()
    groups = (TrajectoryGroup([rollout()]) for rollout in (make, sleep, sleep, sleep))
    batches = trajectory_group_batches(groups, batch_size=1, max_concurrent_batches=3, **QUIET)
    await anext(batches)
    await until(lambda: sleep.started == 2)
    await asyncio.sleep(0.01)
    await batches.aclose()
    assert (sleep.started, sleep.cancelled) == (2, 2)


async def test_each_batch_has_its_failure_limit_and_its_step_number():
    bus, steps = Bus(), []
    bus.subscribe(lambda event: steps.append(event.step), GroupDone)
    groups = [TrajectoryGroup([make(), crash()]) for _ in range(4)]
    batches = trajectory_group_batches(groups, batch_size=2, max_batch_exceptions=2, skip_batches=1, bus=bus, **QUIET)
    assert [len(b) async for b in batches] == [2]
    assert steps == [2, 2]
    with pytest.raises(ValueError, match="boom"):
        async for _ in trajectory_group_batches([TrajectoryGroup([crash()])], batch_size=1, **QUIET):
            pass


# retry and limit_concurrency


@pytest.mark.parametrize("exceptions", [ConnectionError, (ConnectionError,), [OSError, KeyError]])
async def test_retry_calls_again_and_tells(exceptions):
    told = []
    options = {"delay": 0.001, "exceptions": exceptions, "on_retry": lambda error, attempt: told.append(attempt)}
    calls = []

    @retry(**options)
    async def later():
        calls.append(1)
        if len(calls) % 3:
            raise ConnectionResetError("reset")
        return "ok"

    @retry(**options)
    def now():
        calls.append(1)
        if len(calls) % 3:
            raise ConnectionResetError("reset")
        return "ok"

    assert (await later(), now()) == ("ok", "ok")
    assert told == [1, 2, 1, 2]
    assert later.__name__ == "later"
    assert asyncio.iscoroutinefunction(later)


async def test_retry_raises_the_last_error_and_all_other_errors():
    calls = []

    @retry(max_attempts=2, delay=0, exceptions=KeyError)
    async def fails(error):
        calls.append(1)
        raise error

    for error, times in [(KeyError("k"), 2), (ValueError("v"), 1), (asyncio.CancelledError(), 1)]:
        calls.clear()
        with pytest.raises(type(error)):
            await fails(error)
        assert len(calls) == times


def test_retry_pauses_grow(monkeypatch):
    pauses_s = []
    monkeypatch.setattr(tasks.time, "sleep", pauses_s.append)

    @retry(max_attempts=4, delay=0.01, backoff_factor=2)
    def fails():
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fails()
    assert pauses_s == [0.01, 0.02, 0.04]


async def test_limit_concurrency_applies_to_each_key_and_releases_on_failure():
    running, peak = {}, {}

    @limit_concurrency(2, derive_key=lambda key, fail=False: key)
    async def call(key, fail=False):
        running[key] = running.get(key, 0) + 1
        peak[key] = max(peak.get(key, 0), running[key])
        await asyncio.sleep(0.002)
        running[key] -= 1
        if fail:
            raise ValueError("x")

    await asyncio.gather(*(call(k, fail=i % 2 == 0) for i in range(6) for k in "ab"), return_exceptions=True)
    assert peak == {"a": 2, "b": 2}
    assert running == {"a": 0, "b": 0}


async def test_rollouts_start_in_several_passes_of_the_event_loop(monkeypatch):
    monkeypatch.setattr("art_nb.rollouts.gather.AT_ONCE", 4)
    passes, running = [], 0

    async def one(number: int):
        nonlocal running
        running += 1
        passes.append(running)
        await asyncio.sleep(0)
        running -= 1
        return Trajectory(reward=float(number))

    trajectories = await gather_trajectories([one(number) for number in range(40)], **QUIET)
    assert [trajectory.reward for trajectory in trajectories] == [*range(40)]
    assert max(passes) < 20  # the first ones went on before the last ones started


async def test_a_gather_that_is_canceled_while_it_starts_leaves_no_coroutine(monkeypatch):
    monkeypatch.setattr("art_nb.rollouts.gather.AT_ONCE", 1)
    started = []

    async def one():
        started.append(asyncio.current_task())
        if len(started) == 5:
            gathering.cancel()
        await hang()

    gathering = asyncio.ensure_future(gather_trajectories([one() for _ in range(1000)], **QUIET))
    with pytest.raises(asyncio.CancelledError):
        await gathering
    assert len(started) < 1000 and all(task.done() for task in started)
    gc.collect()  # a coroutine that never ran would warn here


async def test_garbage_is_collected_rarely_only_while_rollouts_run():
    before = gc.get_threshold()

    async def one():
        return Trajectory(reward=float(gc.get_threshold()[0]))

    (trajectory,) = await gather_trajectories([one()], **QUIET)
    assert trajectory.reward > before[0] and gc.get_threshold() == before
