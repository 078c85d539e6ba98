"""Rollouts in other processes, of which some are killed."""

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import pytest_asyncio

import art_nb as art
from art_nb.core.events import RolloutDone, Warned
from art_nb.runs.metrics import MetricsBuilder
from art_nb.training.steps import TrainOptions, place_rollouts, roll_out_step

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

LOCK = threading.Lock()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def registered(cluster, make_backend, make_model):
    """A model with a replica and two workers, shared by the tests of this file."""
    cluster.ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as functions of a notebook
    backend, model = make_backend(samplers=1, rollout_workers=2), make_model("workers")
    await model.register(backend)
    yield backend, model
    await backend.close()


async def ask(model, messages, **options):
    completion = await model.openai_client().chat.completions.create(
        model=options.pop("name", None) or model.get_inference_name(), messages=messages, logprobs=True, **options
    )
    return completion.choices[0]


async def conversation(model, scenario):
    """Some turns, with the process in which they ran."""
    messages = [{"role": "user", "content": f"A1 B2 {scenario['id']}"}]
    for _ in range(scenario.get("turns", 1)):
        choice = await ask(model, [*art.Trajectory(messages_and_choices=messages).messages()], max_tokens=8)
        messages += [choice, {"role": "user", "content": "next"}]
    reward = float(len(choice.message.content or "") % 5)
    return art.Trajectory(messages_and_choices=messages[:-1], reward=reward, metadata={"pid": os.getpid()})


async def roll_out(model, rollout, scenarios, rollouts=4, **options):
    """The groups of one step whose rollouts run in the workers. Failed rollouts are recorded."""
    options = {"steps": 1, "max_exceptions": 10_000} | options
    options |= {"groups_per_step": len(scenarios), "rollouts_per_group": rollouts}
    plan = TrainOptions(rollout=rollout, scenarios=scenarios, **options)
    plan.start = place_rollouts(model, rollout, scenarios)
    return await roll_out_step(model, plan, 0, model._bus)


def workers_of(backend, model):
    return backend.runtime(model).rollout_workers


async def wait_until(condition, timeout_s=120):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


async def test_a_run_whose_rollouts_are_in_two_processes(registered):
    backend, model = registered
    done = []
    unsubscribe = backend.bus.subscribe(done.append, RolloutDone)
    step = await model.get_step()
    run = await art.train(
        model, conversation, [{"id": i} for i in range(4)], steps=step + 2, groups_per_step=2, show=False
    )
    unsubscribe()
    assert run.step == step + 2
    pids = {t.metadata["pid"] for group in run.groups for t in group}
    assert len(pids) == 2 and os.getpid() not in pids
    assert pids == {record.place.pid for record in workers_of(backend, model).records.values()}
    assert len(done) == 32 and {event.rollout for event in done} >= {
        t.metadata["rollout_id"] for group in run.groups for t in group
    }
    assert run.history[-1]["data/step_num_trajectories"] == 16
    choice = run.groups[0].trajectories[0].messages_and_choices[1]
    assert choice.policy_version == step + 1 and len(choice.token_ids) == len(choice.logprobs.content) > 0
    assert [row["rollouts"] for row in backend.workers(model) if "worker" in row] == [0, 0]


async def test_the_same_seed_gives_the_same_replies_as_in_this_process(registered):
    _, model = registered
    scenarios = [{"id": 0, "turns": 2}, {"id": 1, "turns": 2}]
    there = await roll_out(model, conversation, scenarios, seed=7)
    options = {"steps": 1, "groups_per_step": 2, "rollouts_per_group": 4, "seed": 7}
    here = await roll_out_step(model, TrainOptions(rollout=conversation, scenarios=scenarios, **options), 0, model._bus)
    texts = [[t.messages() for group in groups for t in group] for groups in (there, here)]
    assert texts[0] == texts[1]


class BoardError(Exception):
    """An error of a game."""


async def failing(model, scenario):
    if scenario["id"] == 0:
        raise BoardError("the board is gone")
    if scenario["id"] == 1:
        return {}["price"]
    if scenario["id"] == 2:
        sys.exit(3)
    await asyncio.sleep(600)


async def test_errors_arrive_with_type_message_and_traceback(registered):
    _, model = registered
    groups = await roll_out(model, failing, [{"id": i} for i in range(3)], rollouts=1)
    groups += await roll_out(model, failing, [{"id": 3}], rollouts=1, timeout_s=2.0)
    records = {group.metadata["scenario_id"]: group.exceptions[0] for group in groups}
    board, key, left, late = (records[f"id: {i}"] for i in range(4))
    assert board.type.endswith("BoardError") and board.message == "the board is gone"
    assert 'raise BoardError("the board is gone")' in board.traceback
    assert (key.type, key.message) == ("KeyError", "'price'")
    assert "SystemExit" in left.message
    assert "after 2 s" in late.message and "await asyncio.sleep(600)" in late.traceback


async def beating(model, scenario):
    """Write a file again and again until it is canceled."""
    try:
        for beat in range(10_000):
            Path(scenario["path"]).write_text(str(beat))
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        Path(scenario["path"]).write_text("canceled")
        raise


async def test_a_stop_ends_the_rollouts_in_their_workers(registered, tmp_path):
    backend, model = registered
    scenarios = [{"id": i, "path": str(tmp_path / f"beat-{i}")} for i in range(4)]
    options = {"groups_per_step": 4, "rollouts_per_group": 1}
    run = art.train(model, beating, scenarios, steps=100, show=False, **options)
    await wait_until(lambda: len(list(tmp_path.iterdir())) == 4)
    await asyncio.to_thread(run.stop)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"canceled"}
    assert [row["rollouts"] for row in backend.workers(model) if "worker" in row] == [0, 0]


async def slow(model, scenario):
    """A rollout that a signal can reach."""
    Path(scenario["path"], f"{os.getpid()}-{time.monotonic_ns()}").touch()
    await asyncio.sleep(1.0)
    return await conversation(model, scenario)


async def test_a_killed_worker_loses_no_rollout(registered, tmp_path):
    backend, model = registered
    workers, warnings = workers_of(backend, model), []
    unsubscribe = backend.bus.subscribe(lambda event: warnings.append(event.message), Warned)
    victim = workers.records[0]
    playing = asyncio.ensure_future(roll_out(model, slow, [{"id": i, "path": str(tmp_path)} for i in range(3)]))
    await wait_until(lambda: len(list(tmp_path.iterdir())) == 12)
    assert victim.rollouts == 6
    os.kill(victim.place.pid, signal.SIGKILL)
    groups = await playing
    assert [len(group.exceptions) for group in groups] == [0, 0, 0]
    assert [len(group) for group in groups] == [4, 4, 4] and workers.repeated == 6
    await wait_until(lambda: [record.state for record in workers.records.values()] == ["serving"] * 2)
    assert workers.records[0] is not victim
    groups = await roll_out(model, conversation, [{"id": 0}])
    assert workers.records[0].place.pid in {t.metadata["pid"] for t in groups[0]}
    unsubscribe()
    assert any("Worker 0 of workers is lost" in message for message in warnings)
    assert any("serves again" in message for message in warnings)


async def deadly(model, scenario):
    if scenario["id"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return await conversation(model, scenario)


async def test_a_rollout_that_kills_its_worker_fails_in_its_group(registered):
    backend, model = registered
    workers = workers_of(backend, model)
    await roll_out(model, conversation, [{"id": 0}])  # the workers have loaded the modules
    groups = await roll_out(model, deadly, [{"id": 1}], rollouts=1)
    assert len(groups[0]) == 0
    assert "were lost 2 times" in groups[0].exceptions[0].message
    await wait_until(lambda: [record.state for record in workers.records.values()] == ["serving"] * 2)


async def test_a_killed_replica_loses_no_rollout_of_the_workers(registered):
    backend, model = registered
    replica = backend.runtime(model).sampler.table.replicas[0]
    playing = asyncio.ensure_future(roll_out(model, conversation, [{"id": i, "turns": 6} for i in range(3)]))
    pid = replica.place.pid
    calls = backend._connection.ray.get(replica.actor.open_requests.remote())
    while not calls and not playing.done():
        calls = await replica.actor.open_requests.remote()
    os.kill(pid, signal.SIGKILL)
    groups = await playing
    assert [len(group) for group in groups] == [4, 4, 4]


async def paying(model, scenario):
    MetricsBuilder.get_active().add_cost("train/judge", 0.5)
    choice = await ask(model, [{"role": "user", "content": "A1"}], name=f"{model.name}@0", max_tokens=2)
    metadata = {"step": await model.get_step(), "version": choice.policy_version}
    return art.Trajectory(messages_and_choices=[{"role": "user", "content": "A1"}, choice], metadata=metadata)


async def test_costs_the_step_and_an_earlier_adapter(registered):
    backend, model = registered
    runtime = backend.runtime(model)
    runtime.sampler.unload("workers@0")
    with MetricsBuilder("train").activate_context() as builder:
        groups = await roll_out(model, paying, [{"id": 0}])
    assert builder.take()["costs/train/judge"] == 2.0
    step = await model.get_step()
    assert [t.metadata for t in groups[0]] and {t.metadata["version"] for t in groups[0]} == {0}
    assert {t.metadata["step"] for t in groups[0]} == {step}


async def test_what_cannot_be_sent_is_refused_before_the_first_step(registered):
    _, model = registered
    client = model.openai_client()

    async def locked(model, scenario):
        with LOCK:
            return await conversation(model, scenario)

    async def with_client(other, scenario):
        return await client.chat.completions.create()

    async def with_model(other, scenario):
        return await conversation(model, scenario)

    step = await model.get_step()
    for rollout, name in ((locked, "LOCK"), (with_client, "client"), (with_model, "model")):
        with pytest.raises(art.TrainError, match=f"`{name}` .* cannot be pickled"):
            art.train(model, rollout, [{"id": 0}], steps=step + 1, show=False)
    with pytest.raises(art.TrainError, match=r"`scenarios\[0\]`"):
        art.train(model, conversation, [{"id": LOCK}], steps=step + 1, show=False)
    with pytest.raises(art.TrainError, match="Use the argument `model`"):
        art.train(model, with_model, [{"id": 0}], steps=step + 1, show=False)
    assert await model.get_step() == step
