"""A pipeline with a real backend: stale groups, full queues, hanging rollouts, failures, signals, kills."""

import asyncio
import json
import os
import signal
import threading

import pytest
from support.forked_runs import the_job
from support.registered import at_home, heard, until
from support.remote_parts import Server

import art_nb as art
from art_nb.core.events import Failed, GroupDone, RolloutDone, RolloutStarted, StepDone, Warned
from art_nb.core.types import TrainError
from art_nb.pipeline.freshness import is_stale, token_ages
from art_nb.pipeline.retention import keep_recent_and_top
from art_nb.pipeline.settings import PipelineAutotuneConfig, PipelineRuntimeConfig, make_group_rollout_fn
from art_nb.pipeline.trainer import PipelineTrainer, StatusReporter
from art_nb.tokens.learner_records import read_record
from art_nb.training.progress import Progress
from art_nb.training.run import AttachedRun, Run

SMALL = {"num_rollout_workers": 2, "min_batch_size": 2, "max_batch_size": 3}


async def say(model, scenario, config, max_tokens=4):
    """One reply; its reward is drawn from its place, so that a group always teaches."""
    messages = [{"role": "user", "content": f"free: {scenario}"}]
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=max_tokens, logprobs=True
    )
    config["n"] = config.get("n", 0) + 1
    return art.Trajectory(messages_and_choices=[*messages, reply.choices[0]], reward=config["n"])


async def flat(model, scenario, config):
    trajectory = await say(model, scenario, config)
    trajectory.reward = 1.0
    return trajectory


@pytest.fixture
async def home(tiny_model_dir, tmp_path):
    async with at_home(tiny_model_dir, tmp_path) as pair:
        yield pair


def pipeline(home, rollout=say, scenarios=range(12), n=2, config=None, **options):
    model, backend = home
    config = {} if config is None else config
    group = make_group_rollout_fn(rollout, n=n) if n else rollout
    return PipelineTrainer(model, backend, group, scenarios, config, **{"show": False} | SMALL | options)


def discarded(model):
    return [g for step in model.store.steps("discarded") for g in model.store.read_groups("discarded", step)]


def state_of(model):
    return model.store.read_own_state("_pipeline_trainer")


# a run like any other


async def test_it_trains_until_the_scenarios_end(home):
    model, backend = home
    events = heard(backend, RolloutStarted, RolloutDone, GroupDone, StepDone)
    model.overwrite_state({"mine": 1})
    run = await pipeline(home).train()
    assert isinstance(run, Run)
    assert (run.status, run.step) == ("done", await model.get_step())
    rows = [row for row in model.store.history() if "train/reward" in row]
    assert [row["step"] for row in rows] == list(range(1, run.step + 1)) == model.store.steps("train")
    assert sum(row["data/step_num_groups_submitted"] for row in rows) == 12
    assert all(2 <= row["data/step_num_groups_submitted"] <= 3 for row in rows[:-1])
    kinds = [type(event) for event in events]
    assert [kinds.count(kind) for kind in (RolloutStarted, RolloutDone, GroupDone)] == [24, 24, 12]
    assert kinds.count(StepDone) == run.step
    assert {event.run for event in events} == {"tiny"}
    assert model.read_state() == {"mine": 1}
    state = state_of(model)
    assert (state["scenario_offset"], state["training_step"], state["counts"]["accepted"]) == (12, run.step, 12)


async def test_its_figures_are_those_of_the_taxonomy(home):
    run = await pipeline(home, scenarios=range(8)).train()
    row = run.history[-1]
    known = {definition.key for definition in art.PIPELINE_RL_METRIC_DEFINITIONS}
    assert known <= set().union(*run.history)
    assert set(art.PIPELINE_RL_SCORE_METRICS) | set(art.PIPELINE_RL_DASHBOARD_DEFAULT_METRICS) <= known
    assert 0 < row["sample_efficiency/freshness_discount"] <= 1
    assert row["throughput/accepted_train_tok_per_s"] == pytest.approx(
        row["data/step_trainable_assistant_tokens"] / row["time/step_wall_s"]
    )
    assert row["train/staleness"] >= 0
    assert row["data/cum/num_unique_scenarios"] == 8
    assert row["discarded/cum/stale_groups"] == 0


async def test_the_store_shows_it_as_any_run(home):
    model = home[0]
    run = await pipeline(home, max_steps=2).train()
    seen = AttachedRun(model.store)
    assert (seen.status, seen.step, seen.progress.steps) == ("done", 2, 2)
    assert [row["step"] for row in seen.progress.rows] == [1, 2]
    ids = {group.metadata["group_id"] for group in run.recent}
    assert {group.id for group in seen.progress.groups} >= {g.metadata["group_id"] for g in run.groups}
    assert {g.metadata["group_id"] for g in run.groups} <= ids


async def test_finished_groups_of_the_user_also_emit_events(home):
    async def whole(model, scenario, config):
        return art.TrajectoryGroup(await asyncio.gather(*(say(model, scenario["q"], config) for _ in range(2))))

    started = heard(home[1], RolloutStarted)
    scenarios = [{"q": i, "metadata": {"scenario_id": f"s{i}", "level": i}} for i in range(4)]
    run = await pipeline(home, whole, scenarios, n=0).train()
    assert len(started) == 8
    assert {event.scenario for event in started} == {"s0", "s1", "s2", "s3"}
    assert run.groups[0].metadata["scenario_level"] in range(4)
    assert all(t.initial_policy_version is not None for group in run.groups for t in group)


@pytest.mark.parametrize("kind", ["generator", "async generator", "async iterator"])
async def test_scenarios_may_be_any_iterable(home, kind):
    async def slowly():
        for i in range(5):
            await asyncio.sleep(0)
            yield i

    class Endless:
        n = -1

        def __aiter__(self):
            return self

        async def __anext__(self):
            self.n += 1
            return self.n

    made = {"generator": lambda: (i for i in range(5)), "async generator": slowly, "async iterator": Endless}[kind]()
    run = await pipeline(home, scenarios=made, max_steps=2).train()
    assert run.step == 2


async def test_max_steps_counts_the_steps_of_a_call_and_the_next_call_resumes(home):
    first = await pipeline(home, scenarios=range(100), max_steps=2).train()
    second = await pipeline(home, scenarios=range(100), max_steps=1).train()
    assert (first.step, second.step, second.options.steps) == (2, 3, 3)
    assert (await pipeline(home, max_steps=0).train()).step == 3
    played = [g.metadata["scenario_id"] for step in (1, 2, 3) for g in home[0].store.read_groups("train", step)]
    assert len(played) == len(set(played))


async def test_a_trainer_loses_no_scenario_of_a_generator_between_its_calls(home):
    trainer = pipeline(home, scenarios=(i for i in range(10)), max_steps=1, num_rollout_workers=3, max_batch_size=2)
    steps = [(await trainer.train()).step for _ in range(6)]
    assert steps == [1, 2, 3, 4, 5, 5]
    played = [
        g.metadata["scenario_id"] for s in home[0].store.steps("train") for g in home[0].store.read_groups("train", s)
    ]
    assert sorted(played) == sorted(map(str, range(10)))
    assert state_of(home[0])["scenario_offset"] == 10


async def test_it_registers_the_model_where_that_was_not_done(tiny_model_dir, tmp_path):
    model = art.TrainableModel(name="new", project="tests", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path=tmp_path, verbose=False) as backend:
        assert (await pipeline((model, backend), max_steps=1).train()).step == 1


# staleness, queues, discards


async def test_a_group_that_grew_old_is_dropped_and_counted(home):
    gate, late = asyncio.Event(), []

    async def sometimes(model, scenario, config):
        said = await say(model, scenario, config)
        if scenario == 0:
            late.append(scenario)
            await gate.wait()
        return said

    model, backend = home
    backend.bus.subscribe(lambda event: event.step == 2 and loop.call_soon_threadsafe(gate.set), StepDone)
    loop = asyncio.get_running_loop()
    run = await pipeline(home, sometimes, range(20), max_steps_off_policy=1).train()
    assert len(late) == 2
    assert run.source.counts["stale"] >= 1
    assert run.source.counts["accepted"] + run.source.counts["stale"] == 20
    zero = [
        g
        for s in model.store.steps("train")
        for g in model.store.read_groups("train", s)
        if g.metadata["scenario_id"] == "0"
    ]
    assert zero == []
    assert run.history[-1]["discarded/rate/stale_groups"] > 0
    assert state_of(model)["scenario_offset"] == 20


async def test_nothing_that_is_trained_is_older_than_allowed(home):
    model = home[0]
    run = await pipeline(home, scenarios=range(16), max_steps_off_policy=0).train()
    assert run.source.counts["stale"] + run.source.counts["accepted"] == 16
    for step in model.store.steps("train"):
        for group in model.store.read_groups("train", step):
            assert {age for age, _ in token_ages(group, step - 1)} == {0}
            assert not is_stale(group, step - 1, 0, 0.0)


async def test_the_mean_age_can_be_limited_alone(home):
    run = await pipeline(home, max_steps_off_policy=None, limit_mean_steps_off_policy=0.5, max_steps=3).train()
    assert all(row["offpolicy/token_weighted_policy_age_steps"] <= 0.5 for row in run.history)


async def test_a_full_queue_holds_the_workers_back(home):
    begun, gate = [], asyncio.Event()

    async def counts(model, scenario, config):
        begun.append(scenario)
        return await say(model, scenario, config)

    async def stays(model, step, config):
        await gate.wait()
        return []

    trainer = pipeline(home, counts, iter(int, 1), queue_maxsize=2, max_steps=1, eval_fn=stays)
    work = asyncio.ensure_future(trainer.train())
    await until(lambda: trainer.run is not None and trainer.run.status == "running" and trainer.run.step == 1)
    await until(trainer.run.source.queue.full)
    await asyncio.sleep(0.3)
    assert len(begun) <= 2 * (3 + 2 + 2)  # a batch, the queue, the workers; two rollouts a group
    gate.set()
    run = await work
    assert run.status == "done"


async def test_groups_without_variance_are_dropped_and_kept_to_look_at(home):
    async def odd_ones_teach(model, scenario, config):
        return await (say if scenario % 2 else flat)(model, scenario, config)

    model = home[0]
    run = await pipeline(home, odd_ones_teach).train()
    assert (run.source.counts["accepted"], run.source.counts["zero_variance"]) == (6, 6)
    shown = discarded(model)
    assert [len({t.reward for t in g}) for g in shown] == [1] * 6  # those after the last step, too
    assert max(model.store.steps("discarded")) <= run.step + 1
    assert [row for row in model.store.history() if "discarded/reward" in row]


async def test_a_collapse_stops_the_run_and_says_so(home):
    said = heard(home[1], Warned)
    run = await pipeline(home, flat, iter(int, 1), discard_queue_multiplier=3).train()
    assert (run.status, run.step, run.source.counts["zero_variance"]) == ("stopped", 0, 6)
    assert "6 groups" in next(event.message for event in said if event.key == "collapse")
    assert home[0].store.steps("discarded") == [1]
    assert len(discarded(home[0])) == 6


async def test_groups_that_fail_are_no_collapse(home):
    said = heard(home[1], Warned)

    async def mostly_fails(model, scenario, config):
        if scenario % 3:
            raise ConnectionError("the environment is away")
        return art.TrajectoryGroup([await flat(model, scenario, config)])

    run = await pipeline(home, mostly_fails, range(9), n=0, discard_queue_multiplier=2).train()
    assert (run.status, run.source.counts["zero_variance"], run.source.counts["failed"]) == ("done", 3, 6)
    assert "collapse" not in [event.key for event in said]
    assert sorted(len(g.exceptions) for g in discarded(home[0])) == [0] * 3 + [1] * 6


# what fails


async def test_a_rollout_that_fails_is_data(home):
    async def fragile(model, scenario, config):
        said = await say(model, scenario, config)
        if config["n"] % 3 == 0:
            raise ValueError("illegal move")
        return said

    model = home[0]
    run = await pipeline(home, fragile, n=3).train()
    kept = [
        e for step in model.store.steps("train") for g in model.store.read_groups("train", step) for e in g.exceptions
    ]
    assert run.status == "done"
    assert kept and {e.message for e in kept} == {"illegal move"}


async def test_a_rollout_function_that_fails_is_data_too(home):
    async def fragile(model, scenario, config):
        if scenario % 2:
            raise ConnectionError("the environment is away")
        return await make_group_rollout_fn(say, n=2)(model, scenario, config)

    done = heard(home[1], RolloutDone)
    run = await pipeline(home, fragile, n=0).train()
    assert (run.source.counts["accepted"], run.source.counts["failed"]) == (6, 6)
    assert len([event for event in done if event.error and "away" in event.error]) == 6


async def test_when_every_worker_fails_the_run_says_why(home):
    async def broken(model, scenario, config):
        raise KeyError("moves")

    with pytest.raises(TrainError, match="16 groups in a row.*KeyError.*moves"):
        await pipeline(home, broken, iter(int, 1)).train()
    assert home[0].store.steps_saved() == [0]
    assert {e.message for g in discarded(home[0]) for e in g.exceptions} == {"'moves'"}


async def test_scenarios_that_fail_end_the_run(home):
    def breaks():
        yield from range(3)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        await pipeline(home, scenarios=breaks()).train()


async def test_a_train_call_that_fails_ends_the_run_and_keeps_what_was_made(home):
    model, backend = home
    failed = heard(backend, Failed)
    with pytest.raises(TrainError, match="boom"):
        await pipeline(home, scenarios=range(50), loss_fn=Bomb(2)).train()
    assert model.store.steps_saved() == [0, 1, 2]
    assert model.store.steps("train") == [1, 2, 3]  # the groups of the step that failed, too
    assert len(failed) == 1
    state = state_of(model)
    assert state["training_step"] == 2
    over = state["scenario_offset"] + len(state["scenarios_ahead"])
    assert over == state["counts"]["accepted"]
    run = await pipeline(home, scenarios=range(12)).train()
    assert (run.status, state_of(model)["scenario_offset"]) == ("done", 12)


class Bomb:
    """CISPO, a number of times."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, tokens, **options):
        from art_nb.learners.losses import cispo

        self.calls -= 1
        if self.calls < 0:
            raise TrainError("boom")
        return cispo(tokens)


# evaluations


async def test_evaluations_run_beside_and_are_logged_under_their_step(home):
    model, steps = home[0], []

    async def test(model, step, config):
        steps.append(step)
        said = await say(model, "test", {})
        return {"val": [said], "test": [art.TrajectoryGroup([said])]}

    run = await pipeline(home, scenarios=range(100), max_steps=4, eval_fn=test, eval_every_n_steps=2).train()
    assert steps == [0, 2, 4]
    rows = {
        split: [row["step"] for row in model.store.history() if f"{split}/reward" in row] for split in ("val", "test")
    }
    assert rows == {"val": [0, 2, 4], "test": [0, 2, 4]}
    for step in steps:
        (group,) = model.store.read_groups("val", step)
        assert {v for t in group for v in (t.final_policy_version, t.initial_policy_version) if v is not None} <= {step}
        assert {age for age, _ in token_ages(group, step)} == {0}  # answered by the adapter of that step
    assert run.status == "done"
    again = await pipeline(home, scenarios=range(100), max_steps=1, eval_fn=test, eval_every_n_steps=2).train()
    assert (again.step, steps) == (5, [0, 2, 4])


async def test_evaluations_may_wait_for_the_first_steps(home):
    steps = []

    async def test(model, step, config):
        steps.append(step)
        return {}

    await pipeline(
        home, scenarios=range(100), max_steps=4, eval_fn=test, eval_every_n_steps=2, eval_at_start=False
    ).train()
    assert steps == [2, 4]


async def test_an_evaluation_that_fails_is_announced_and_costs_nothing(home, capsys):
    async def test(model, step, config):
        if step == 0:
            raise ZeroDivisionError("no scenarios")
        return [await say(model, "test", {})]

    said = heard(home[1], Warned)
    run = await pipeline(home, max_steps=2, eval_fn=test, eval_every_n_steps=1).train()
    assert run.status == "done"
    assert "ZeroDivisionError: no scenarios" in next(e.message for e in said if e.key == "evaluation 0")
    assert "evaluation of step 0 failed" in capsys.readouterr().out
    assert run.source.evaluations.done == {1, 2}


async def test_an_evaluation_of_a_step_that_was_not_saved_is_said_once(home):
    asked = []

    async def test(model, step, config):
        asked.append((step, model.get_inference_name()))
        return []

    with pytest.warns(UserWarning, match="no checkpoint of step") as said:
        await pipeline(home, max_steps=3, eval_fn=test, eval_every_n_steps=1, save_checkpoint=False).train()
    assert asked == [(0, "tiny@0"), *((step, "tiny") for step in (1, 2, 3))]
    assert len([one for one in said if "the newest policy" in str(one.message)]) == 1


async def test_costs_go_to_the_side_that_spent_them(home):
    from art_nb.runs.metrics import MetricsBuilder

    def spend():
        builder = MetricsBuilder.get_active()
        builder.add_cost(f"{builder.cost_context}/tool", 1)

    async def test(model, step, config):
        spend()
        return [await say(model, "test", {})]

    async def costly(model, scenario, config):
        spend()
        return await say(model, scenario, config)

    run = await pipeline(home, costly, max_steps=1, eval_fn=test).train()
    (held,) = (row for row in home[0].store.history() if "val/reward" in row)
    assert held["costs/eval"] == 1
    assert run.history[-1]["costs/train/tool"] >= 4


async def test_old_checkpoints_go(home):
    model = home[0]

    async def test(model, step, config):
        return [art.Trajectory(reward={1: 9, 2: 5}.get(step, 0))]

    await pipeline(
        home,
        scenarios=range(100),
        max_steps=6,
        max_steps_off_policy=1,
        eval_fn=test,
        eval_every_n_steps=1,
        checkpoint_retention_strategy=keep_recent_and_top(recent=1, top=1),
    ).train()
    saved = model.store.steps_saved()
    assert saved[-3:] == [4, 5, 6]
    assert set(saved) <= {1, 3, 4, 5, 6}
    assert 1 in saved


async def test_the_checkpoint_that_the_kl_is_measured_from_stays(home):
    keep = keep_recent_and_top(recent=0, top=0)
    run = await pipeline(
        home,
        scenarios=range(100),
        max_steps=6,
        max_steps_off_policy=1,
        kl_penalty_coef=0.1,
        kl_penalty_step_lag=3,
        checkpoint_retention_strategy=keep,
    ).train()
    assert (run.status, home[0].store.steps_saved()) == ("done", [3, 4, 5, 6])
    assert references(home[0], 6) == [0, 0, 0, 0, 1, 2]


def references(model, last):
    """The steps from whose checkpoints the KL of the first steps was measured."""
    found = [read_record(model.store, step).config["kl_reference"] for step in range(1, last + 1)]
    return [next(step for step in range(last) if path == str(model.store.checkpoint_dir(step))) for path in found]


async def test_a_reference_step_of_the_user_is_used_and_not_deleted(home):
    run = await pipeline(
        home,
        scenarios=range(100),
        max_steps=4,
        max_steps_off_policy=1,
        kl_penalty_coef=0.1,
        kl_penalty_step_lag=1,
        kl_penalty_reference_step=0,
        checkpoint_retention_strategy=keep_recent_and_top(recent=0, top=0),
    ).train()
    assert (run.status, home[0].store.steps_saved()) == ("done", [0, 3, 4])
    assert references(home[0], 4) == [0] * 4


async def test_a_lag_counts_for_a_kl_under_our_name_too(home):
    await pipeline(home, max_steps=3, kl_shaping=0.1, kl_penalty_step_lag=1).train()
    assert references(home[0], 3) == [0, 0, 1]


@pytest.mark.timeout(300)
async def test_on_another_machine_an_evaluation_has_its_step_too(tiny_model_dir, tmp_path):
    server, said = Server(tmp_path / "far"), []

    async def test(model, step, config):
        said.append((step, model.get_inference_name(), await say(model, "test", {})))
        return [said[-1][2]]

    try:
        async with server.client(tmp_path / "near") as backend:
            model = art.TrainableModel(name="tiny", project="tests", base_model=str(tiny_model_dir))
            with pytest.warns(UserWarning, match="checkpoint_retention_strategy has no effect"):
                await pipeline(
                    (model, backend),
                    scenarios=range(100),
                    max_steps=2,
                    eval_fn=test,
                    eval_every_n_steps=1,
                    checkpoint_retention_strategy=keep_recent_and_top(recent=0, top=0),
                ).train()
    finally:
        server.end()
    assert [(step, name) for step, name, _ in said] == [(step, f"tiny@{step}") for step in (0, 1, 2)]
    for step, _, trajectory in said:
        assert {age for age, _ in token_ages(art.TrajectoryGroup([trajectory]), step)} == {0}


# stop, cancel, hang


async def test_a_rollout_that_hangs_keeps_its_worker_only(home):
    cancelled = []

    async def hangs(model, scenario, config):
        if scenario == 0:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(scenario)
                raise
        return await say(model, scenario, config)

    run = await pipeline(home, hangs, iter(range(10**6)), max_steps=3).train()
    assert (run.status, run.step, cancelled) == ("done", 3, [0, 0])
    assert state_of(home[0])["scenario_offset"] == 0  # it is played again
    assert state_of(home[0])["scenarios_ahead"]


async def test_a_time_limit_ends_a_rollout_that_hangs(home):
    async def hangs(model, scenario, config):
        config["seen"] = config.get("seen", 0) + 1
        if config["seen"] == 1:
            await asyncio.Event().wait()
        return await say(model, scenario, config)

    await say(home[0], "the first reply takes longest", {})
    run = await pipeline(home, hangs, range(4), n=3, timeout_s=10).train()
    assert (run.status, run.source.counts["accepted"]) == ("done", 4)


@pytest.mark.parametrize("how", ["cancel", "request_stop", "stop", "file"])
async def test_everything_ends_when_it_is_stopped(home, how):
    open_rollouts = set()

    async def hangs(model, scenario, config):
        open_rollouts.add(asyncio.current_task())
        await asyncio.Event().wait()

    model, trainer = home[0], pipeline(home, hangs, iter(int, 1))
    work = asyncio.ensure_future(trainer.train())
    await until(lambda: len(open_rollouts) == 4)
    {
        "cancel": work.cancel,
        "request_stop": trainer.request_stop,
        "stop": lambda: trainer.run.stop(wait=False),
        "file": (model.store.path / "STOP_AFTER_STEP").touch,
    }[how]()
    if how == "cancel":
        with pytest.raises(asyncio.CancelledError):
            await work
    else:
        assert (await work).status == "stopped"
    assert all(task.done() for task in open_rollouts)
    assert trainer.run.status == "stopped"
    assert not [t for t in asyncio.all_tasks() if "Pipeline" in repr(t.get_coro())]
    assert (await pipeline(home, max_steps=1).train()).step == 1


async def test_it_can_be_paused_from_another_thread(home):
    trainer = pipeline(home, scenarios=iter(int, 1))
    work = asyncio.ensure_future(trainer.train())
    await until(lambda: trainer.run is not None and trainer.run.step >= 1)
    await asyncio.to_thread(trainer.run.pause)
    await until(lambda: trainer.run.status == "paused")
    step = trainer.run.step
    await asyncio.sleep(0.3)
    assert trainer.run.step == step
    trainer.run.resume()
    await until(lambda: trainer.run.step > step)
    trainer.request_stop()
    assert (await work).status == "stopped"


async def test_a_start_button_shows_how_the_run_resumes(home):
    run = await pipeline(home, max_steps=1).train()
    with pytest.raises(TrainError, match="await trainer.train"):
        run.start()
    assert run.status == "done"


async def test_one_pipeline_at_a_time_trains_a_model(home):
    async def hangs(model, scenario, config):
        await asyncio.Event().wait()

    first = pipeline(home, hangs, iter(int, 1))
    work = asyncio.ensure_future(first.train())
    await until(lambda: first.run is not None and first.run.status == "running")
    with pytest.raises(TrainError, match="being trained already"):
        await pipeline(home).train()
    first.run.stop(wait=False)
    await work


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("handle_signals", [True, False])
async def test_signals_are_heard_only_where_that_is_wanted(home, handle_signals):
    before, during = signal.getsignal(signal.SIGTERM), set()

    async def looks(model, scenario, config):
        during.add(signal.getsignal(signal.SIGTERM))
        return await say(model, scenario, config)

    await pipeline(home, looks, max_steps=1).train(handle_signals=handle_signals)
    assert (during == {before}) == (not handle_signals)
    assert signal.getsignal(signal.SIGTERM) is before


async def test_in_another_thread_signals_are_left_alone_and_that_is_said(tiny_model_dir, tmp_path):
    said, before = [], signal.getsignal(signal.SIGINT)

    async def main():
        async with at_home(tiny_model_dir, tmp_path) as home:
            home[1].bus.subscribe(said.append, Warned)
            return (await pipeline(home, max_steps=1).train()).status

    assert await asyncio.to_thread(asyncio.run, main()) == "done"
    assert "signals" in [event.key for event in said]
    assert signal.getsignal(signal.SIGINT) is before


# resume


async def test_what_was_not_trained_is_played_again_and_the_rest_is_not(home):
    model, batches = home[0], {"num_rollout_workers": 3, "min_batch_size": 2, "max_batch_size": 2}
    first = await pipeline(home, scenarios=range(10), max_steps=2, **batches).train()
    assert first.source.counts["accepted"] == 4
    second = await pipeline(home, scenarios=range(10), **batches).train()
    assert second.source.counts["accepted"] == 10
    played = [
        g.metadata["scenario_id"] for s in model.store.steps("train") for g in model.store.read_groups("train", s)
    ]
    assert sorted(played) == sorted(map(str, range(10)))
    assert second.history[-1]["data/cum/num_unique_scenarios"] == 10
    over = await pipeline(home, scenarios=range(10), **batches).train()
    assert (over.status, over.step) == ("done", second.step)
    fresh = await pipeline(home, scenarios=range(4), resume=False, **batches).train()
    assert fresh.step == second.step + 2


async def test_a_checkpoint_that_is_behind_is_said(home):
    said = heard(home[1], Warned)
    await pipeline(home, max_steps=1).train()
    home[0].store.write_own_state("_pipeline_trainer", state_of(home[0]) | {"training_step": 7})
    await pipeline(home, max_steps=1).train()
    assert "is at step 7, but the model is at step 1" in next(e.message for e in said if e.key == "pipeline step")


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="the children are forked from one warm process")


def the_pipeline(path, directory, scenarios):
    return the_job("pipeline", "tiny", path, directory, scenarios=scenarios)


@needs_fork
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_stops_at_the_next_safe_point(nursery, tiny_model_dir, tmp_path, name):
    life = nursery.live(the_pipeline(tmp_path, tiny_model_dir, 10**6), "GradientStep", 2, by=getattr(signal, name))
    assert life.lines[-1] == ["finished"]
    (status, step), store = life.lines[-2][1:], art.open_run(tmp_path / "crash" / "models" / "tiny")
    assert (life.lines[-2][0], status) == ("over", "stopped")
    assert int(step) >= 2
    assert max(store.steps_saved()) == int(step) == store.read_own_state("_pipeline_trainer")["training_step"]
    said = [" ".join(words) for words in life.lines]
    assert [line for line in said if line.startswith(f"{name}: stopping")]
    assert [line for line in said if line.startswith("tiny: step") and "queue" in line]  # a terminal's status


@needs_fork
@pytest.mark.parametrize(
    ("word", "times"), [("RolloutStarted", 9), ("GradientStep", 2), ("CheckpointSaved", 3), ("StepDone", 2)]
)
async def test_it_resumes_after_a_kill(nursery, tiny_model_dir, tmp_path, word, times):
    life = nursery.live(the_pipeline(tmp_path, tiny_model_dir, 12), word, times)
    assert life.status == signal.SIGKILL
    store = art.open_run(tmp_path / "crash" / "models" / "tiny")
    before = max(store.steps_saved())
    life = nursery.live(the_pipeline(tmp_path, tiny_model_dir, 12))
    assert life.steps("registered") == [before]
    assert (life.lines[-2][:2], life.lines[-1]) == (["over", "done"], ["finished"])
    assert store.read_own_state("_pipeline_trainer")["scenario_offset"] == 12
    rows, last = [row["step"] for row in store.history() if "train/reward" in row], max(store.steps_saved())
    assert rows == sorted(set(rows))
    assert set(range(1, last + 1)) - set(rows) <= {before}  # killed between the checkpoint and its row
    played = [g.metadata["scenario_id"] for s in range(1, last + 1) for g in store.read_groups("train", s)]
    assert set(played) == set(map(str, range(12)))
    assert len(played) - 12 <= 3  # at most the batch of that step, once more


@pytest.mark.skipif(os.name != "posix", reason="signals")
async def test_a_second_signal_does_not_wait_for_the_step(home):
    class Slow:
        """A loss that waits for the second signal."""

        def __call__(self, tokens, **options):
            from art_nb.learners.losses import cispo

            begun.set()
            second_signal.wait(60)  # after the step, nothing handles signals: a signal would end pytest
            return cispo(tokens)

    begun, second_signal, before = threading.Event(), threading.Event(), signal.getsignal(signal.SIGTERM)
    trainer = pipeline(home, scenarios=iter(int, 1), loss_fn=Slow())
    work = asyncio.ensure_future(trainer.train())
    await until(begun.is_set)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: trainer.run.status == "stopping")
    os.kill(os.getpid(), signal.SIGTERM)
    second_signal.set()
    run = await work
    assert run.status == "stopped"
    assert signal.getsignal(signal.SIGTERM) is before


# settings


def test_settings_that_cannot_be_are_refused(tmp_path):
    model = art.TrainableModel(name="m", project="p", base_model="b", base_path=str(tmp_path))

    def make(**options):
        return PipelineTrainer(model, None, say, [], {}, **options)

    with pytest.raises(TrainError, match="autotuning"):
        make(autotune=PipelineAutotuneConfig(mode="online", window_steps=4))
    for name, value in (
        ("max_steps", -1),
        ("max_steps_off_policy", -1),
        ("discard_queue_multiplier", 0),
        ("log_interval_seconds", 0),
        ("eval_every_n_steps", -1),
        ("checkpoint_retention_interval", 0),
    ):
        with pytest.raises(ValueError, match=name):
            make(**{name: value})
    with pytest.raises(ValueError, match="not both"):
        make(pipeline=PipelineRuntimeConfig(), min_batch_size=2)
    with pytest.raises(ValueError, match="less than min_batch_size"):
        make(min_batch_size=4, max_batch_size=2)
    with pytest.raises(ValueError, match="save_checkpoint=True"):
        make(kl_penalty_coef=0.1, kl_penalty_step_lag=2, save_checkpoint=False)
    with pytest.raises(ValueError, match="Invalid `n=0`"):
        make_group_rollout_fn(say, n=0)
    assert make(autotune=PipelineAutotuneConfig(mode="off"), min_batch_size=2).queue_maxsize == 64
    assert make(max_steps_off_policy=0).queue_maxsize == 1
    assert make(queue_maxsize=7).queue_maxsize == 7


async def test_settings_given_as_a_record_are_in_effect(home):
    now, most = [], []

    async def counts(model, scenario, config):
        now.append(scenario)
        most.append(len(now))
        said = await say(model, scenario, config)
        now.remove(scenario)
        return said

    settings = PipelineRuntimeConfig(num_rollout_workers=1, min_batch_size=3, max_batch_size=3, queue_maxsize=2)
    run = await PipelineTrainer(
        *home,
        make_group_rollout_fn(counts, n=2),
        range(8),
        {},
        pipeline=settings,
        normalize_advantages=False,
        show=False,
    ).train()
    assert max(most) == 2  # one group at a time
    assert [row["data/step_num_groups_submitted"] for row in run.history] == [3, 3, 2]
    assert {row["queue/groups_depth_max"] for row in run.history} == {2}
    assert read_record(home[0].store, 1).config["scale"] == "none"


def test_the_reporter_prints_now_and_then():
    lines, progress = [], Progress("tiny", 3, status="running")
    reporter = StatusReporter(log_interval_seconds=60, more=lambda: "queue 1/2", write=lines.append)
    for _ in range(10):
        reporter.show(progress)
    assert lines == ["tiny: step 0 of 3 | starting | queue 1/2"]


def test_top_level_names_are_those_of_art():
    for name in ("MetricDefinition", "PipelineAutotuneConfig", "PipelineRuntimeConfig"):
        assert getattr(art, name).__name__ == name
    assert art.pipeline_trainer.PipelineTrainer is PipelineTrainer
    assert json.dumps([one.model_dump() for one in art.PIPELINE_RL_METRIC_DEFINITIONS])
    assert threading.current_thread() is threading.main_thread()
