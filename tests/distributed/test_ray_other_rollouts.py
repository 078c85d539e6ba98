"""Rollouts of `art.evaluate` and `PipelineTrainer` in other processes, and the sessions of rollouts in this one."""

import asyncio
import os
import signal
import sys
import threading

import pytest
import pytest_asyncio
from support.ray_parts import roll_out, wait_until

import art_nb as art
from art_nb.core.events import GroupDone, RolloutDone, RolloutStarted
from art_nb.pipeline.settings import make_group_rollout_fn
from art_nb.pipeline.trainer import PipelineTrainer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

LOCK = threading.Lock()
SMALL = {"num_rollout_workers": 4, "min_batch_size": 2, "max_batch_size": 2, "max_steps": 2, "show": False}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def registered(cluster, make_backend, make_model):
    """A model with two replicas and two workers, shared by the tests of this file."""
    cluster.ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as functions of a notebook
    backend, model = make_backend(samplers=2, rollout_workers=2), make_model("others")
    await model.register(backend)
    yield backend, model
    await backend.close()


async def reply(model, scenario, temperature=1.0):
    """One reply, with the process in which the rollout ran."""
    messages = [{"role": "user", "content": f"A1 B2 {scenario}"}]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=8, logprobs=True, temperature=temperature
    )
    choice = completion.choices[0]
    reward, metadata = float(len(choice.message.content or "") % 5), {"pid": os.getpid()}
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=reward, metadata=metadata)


async def in_pipeline(model, scenario, config):
    trajectory = await reply(model, scenario, temperature=0)
    if scenario % 5 == 4 and trajectory.reward >= 0:
        raise ValueError(config["message"])
    trajectory.reward = sum(trajectory.messages_and_choices[1].token_ids) % 11
    return trajectory


async def custom_group(model, scenario, config):
    """A group function of the user."""
    return await art.TrajectoryGroup(in_pipeline(model, scenario, config) for _ in range(3))


def pids_of(backend, model):
    return {record.place.pid for record in backend.runtime(model).rollout_workers.records.values()}


def sessions_of(backend, model):
    return [len(replica.sessions) for replica in backend.runtime(model).sampler.table.replicas.values()]


async def test_an_evaluation_runs_in_the_workers_at_its_step(registered):
    backend, model = registered
    result = await art.evaluate(model, reply, range(12), step=0, request_overrides={"temperature": 0}, log=False)
    assert {t.metadata["pid"] for t in result.trajectories} == pids_of(backend, model)
    choices = [t.messages_and_choices[1] for t in result.trajectories]
    assert {(choice.policy_version, choice.temperature) for choice in choices} == {(0, 0)}
    assert sessions_of(backend, model) == [0, 0]


async def several(model, scenario):
    return [await reply(model, scenario) for _ in range(2)]


async def test_a_rollout_of_an_evaluation_may_return_several_trajectories(registered):
    _, model = registered
    result = await art.evaluate(model, several, range(3), log=False)
    assert len(result.trajectories) == 6


async def test_an_evaluation_that_cannot_be_sent_is_refused(registered):
    _, model = registered

    async def locked(model, scenario):
        with LOCK:
            return await reply(model, scenario)

    with pytest.raises(art.TrainError, match="`LOCK` .* cannot be pickled"):
        await art.evaluate(model, locked, [0])


@pytest.mark.parametrize("rollout_fn", [make_group_rollout_fn(in_pipeline, n=3), custom_group], ids=["made", "custom"])
async def test_a_pipeline_rolls_out_in_the_workers(registered, rollout_fn):
    backend, model = registered
    events = []
    unsubscribe = backend.bus.subscribe(events.append, RolloutStarted, RolloutDone, GroupDone)
    config, fields = {"message": "no moves left"}, {"temperature": 1}
    trainer = PipelineTrainer(model, backend, rollout_fn, range(200), config, request_overrides=fields, **SMALL)
    before = await model.get_step()
    run = await trainer.train()
    unsubscribe()
    assert run.step == before + 2
    trajectories = [t for group in run.groups for t in group]
    assert {t.metadata["pid"] for t in trajectories} <= pids_of(backend, model)
    assert {t.messages_and_choices[1].temperature for t in trajectories} == {1}
    assert all(t.initial_policy_version is not None for t in trajectories)
    done = {event.rollout: event for event in events if isinstance(event, RolloutDone)}
    assert {t.metadata["rollout_id"] for t in trajectories} <= {*done}
    assert {*done} == {event.rollout for event in events if isinstance(event, RolloutStarted)}
    assert {event.step for event in done.values()} <= {*range(before + 1, before + 4)}
    assert "ValueError: no moves left" in {event.error for event in done.values()}
    assert {event.group for event in done.values()} == {e.group for e in events if isinstance(e, GroupDone)}
    assert sessions_of(backend, model) == [0, 0]
    assert [row["rollouts"] for row in backend.workers(model) if "worker" in row] == [0, 0]


async def test_a_pipeline_that_cannot_be_sent_is_refused_before_its_first_rollout(registered):
    backend, model = registered
    trainer = PipelineTrainer(model, backend, custom_group, range(8), {"lock": LOCK}, **SMALL)
    with pytest.raises(art.TrainError, match="cannot be pickled"):
        await trainer.train()


async def locked_scenario(model, scenario, config):
    return art.TrajectoryGroup([])


async def test_a_scenario_that_cannot_be_sent_names_the_cause(registered):
    backend, model = registered
    trainer = PipelineTrainer(model, backend, locked_scenario, ({"lock": LOCK} for _ in range(40)), None, **SMALL)
    with pytest.raises(art.TrainError, match="A scenario cannot be sent to the workers"):
        await trainer.train()


async def test_a_new_replica_gets_its_share_at_once(registered):
    """`gather_trajectory_groups` has no bus. The sessions of its rollouts end all the same."""
    backend, model = registered
    table = backend.runtime(model).sampler.table
    await roll_out(model, groups=4, rollouts=4, turns=1)
    assert sessions_of(backend, model) == [0, 0]
    victim = table.replicas[0]
    os.kill(victim.place.pid, signal.SIGKILL)
    await wait_until(lambda: table.replicas[0] is not victim and len(table.serving()) == 2)
    most = [0, 0]
    playing = asyncio.ensure_future(roll_out(model, groups=4, rollouts=4, turns=3, pause_s=0.2))
    while not playing.done():
        most = [max(pair) for pair in zip(most, sessions_of(backend, model), strict=True)]
        await asyncio.sleep(0.002)
    groups = await playing
    assert not any(group.exceptions for group in groups)
    assert most == [8, 8]
    assert sessions_of(backend, model) == [0, 0]
