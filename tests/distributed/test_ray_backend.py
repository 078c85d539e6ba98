"""`RayBackend` on real Ray processes, of which some are killed."""

import asyncio
import os
import signal
import time

import numpy as np
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

import art_nb as art
from art_nb.core.events import GradientStep, Warned
from art_nb.distributed import learner_group
from art_nb.learners.base import Learner, optimizer_steps
from art_nb.learners.settings import StepConfig
from art_nb.policy.adapters import copy_adapter
from art_nb.policy.loading import load_policy
from art_nb.policy.packing import WeightedRow

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def registered(make_backend, make_model):
    """A model with two replicas and two ranks, shared by the tests of this file."""
    backend, model = make_backend(samplers=2, learners=2), make_model("shared")
    await model.register(backend)
    yield backend, model
    await backend.close()


async def conversation(model, scenario=None, turns=3, tokens=12, pause_s=0.0):
    """A conversation whose reward is the share of the letter e."""
    client, messages = model.openai_client(), [{"role": "user", "content": "A1 B2 C3 " * 4}]
    trajectory = art.Trajectory(messages_and_choices=[*messages], reward=0.0)
    for turn in range(turns):
        completion = await client.chat.completions.create(
            model=model.get_inference_name(),
            messages=trajectory.messages(),
            max_tokens=tokens,
            logprobs=True,
            extra_body={"ignore_eos": True},
        )
        trajectory.messages_and_choices += [completion.choices[0], {"role": "user", "content": f"line {turn}"}]
        trajectory.reward += (completion.choices[0].message.content or "").count("e") + turn * 0.1
        await asyncio.sleep(pause_s)
    trajectory.reward += np.random.default_rng(abs(hash(str(trajectory.messages())))).normal()
    return trajectory


async def roll_out(model, groups=3, rollouts=4, **options):
    """Groups of conversations. Failed rollouts are counted as exceptions."""
    return await art.gather_trajectory_groups(
        [art.TrajectoryGroup(conversation(model, **options) for _ in range(rollouts)) for _ in range(groups)],
        pbar_desc=None,
        max_exceptions=groups * rollouts,
    )


async def wait_until(condition, timeout_s=240):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


def some_rows(n=10, groups=4, seed=0):
    """Rows of different lengths with advantages, as a step has them."""
    random, rows = np.random.default_rng(seed), []
    for i in range(n):
        tokens = random.integers(3, 250, 12 + 5 * (i % 4)).astype(np.int32)
        sampled = np.arange(len(tokens)) > 6
        logprobs = np.where(sampled, random.normal(-3, 1, len(tokens)), np.nan).astype(np.float32)
        rows.append(WeightedRow(tokens, sampled, logprobs, i % groups, float(random.normal()), 0.01 * (1 + i % 3)))
    return rows


CONFIGS = {
    "cispo": {},
    "rows_per_step": {"rows_per_step": 4},
    "rescored": {"rescored": True, "rows_per_step": 5},
    "row_power": {"row_power": 0.5},
    "kl": {"kl_coef": 0.1},
    "kl_shaping": {"kl_shaping": 0.1},
    "entropy": {"entropy_coef": 0.01},
}


def three_steps(step):
    """Three training steps on different rows."""
    return [step(some_rows(seed=seed)) for seed in range(3)]


def go_back(runtime, state):
    """Give the ranks a state that the group had before."""
    group = runtime.learner
    group.files, group.adapter = state
    runtime.worker.call(group.restore)


def largest_difference(one, other):
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.parametrize("name", CONFIGS)
async def test_two_ranks_take_the_steps_of_one(registered, tiny_model_dir, name):
    backend, model = registered
    runtime = backend.runtime(model)
    group, config = runtime.learner, StepConfig(learning_rate=1e-4, **CONFIGS[name])
    state = group.files, group.adapter
    policy = load_policy(tiny_model_dir, device="cpu", dtype=runtime.policy.dtype)
    local = Learner(policy)
    try:
        metrics = await asyncio.to_thread(
            runtime.worker.call, three_steps, lambda rows: group.step(rows, config, lambda *_: None, None)
        )
        expected = three_steps(lambda rows: optimizer_steps(local, rows, config))
        weights = backend._connection.ray.get(group.weights())
        reference = {key: tensor.numpy() for key, tensor in copy_adapter(policy).items()}
        assert largest_difference(weights, reference) < 1e-6
        assert max(float(np.abs(values).max()) for values in reference.values()) > 1e-2
        for one, other in zip(metrics, expected, strict=True):
            shared = one.keys() & other.keys() - {"data/packing_ratio", "data/step_trainer_tokens"}
            assert {"loss/train", "loss/grad_norm", "data/step_num_gradient_steps"} <= shared
            assert {key: one[key] for key in shared} == pytest.approx({key: other[key] for key in shared}, abs=1e-4)
        assert [len(row.tokens) for row, _ in group.seen] and len(group.seen) == len(local.seen)
    finally:
        await asyncio.to_thread(go_back, runtime, state)


async def test_a_rank_without_rows_and_a_step_that_all_drop(registered):
    backend, model = registered
    runtime = backend.runtime(model)
    group = runtime.learner
    state = group.files, group.adapter

    def step(rows):
        return runtime.worker.call(group.step, rows, StepConfig(learning_rate=1e-3), lambda *_: None, None)

    try:
        metrics = await asyncio.to_thread(step, some_rows(1))
        assert metrics["data/step_num_gradient_steps"] == 1
        await asyncio.to_thread(go_back, runtime, state)
        before = backend._connection.ray.get(group.weights())
        broken = some_rows(4)
        broken[0].advantage = float("inf")
        pids = [facts["place"].pid for facts in group.facts]
        with pytest.raises(art.TrainError, match="norm"):
            await asyncio.to_thread(step, broken)
        assert largest_difference(before, backend._connection.ray.get(group.weights())) == 0
        assert [facts["place"].pid for facts in group.facts] == pids  # the ranks go on
    finally:
        await asyncio.to_thread(go_back, runtime, state)


async def test_a_step_that_is_canceled_after_its_last_row_changes_no_weights(registered):
    backend, model = registered
    runtime = backend.runtime(model)
    group, ray = runtime.learner, backend._connection.ray
    before = ray.get(group.weights())

    def cancel(done, of, tokens):
        if done == of:
            group._settle(timeout_s=60)  # the ranks end the step before they know
            raise art.TrainError("canceled")

    with pytest.raises(art.TrainError, match="canceled"):
        await asyncio.to_thread(
            runtime.worker.call, group.step, some_rows(), StepConfig(learning_rate=1e-3), cancel, None
        )
    assert largest_difference(before, ray.get(group.weights())) == 0


async def test_conversations_stay_and_other_clients_are_served(registered):
    backend, model = registered
    runtime, table = backend.runtime(model), backend.runtime(model).sampler.table
    groups = await roll_out(model, groups=2, rollouts=4)
    assert not any(group.exceptions for group in groups)
    assert {replica.assigned > 0 for replica in table.serving()} == {True}
    assert not any(replica.requests for replica in table.serving())
    async with AsyncOpenAI(base_url=runtime.endpoint.base_url, api_key=runtime.endpoint.api_key) as client:
        question = {"messages": [{"role": "user", "content": "A1"}], "max_tokens": 4}
        for name in ("shared", "shared@0"):
            reply = await client.chat.completions.create(model=name, **question)
            assert reply.choices[0].message.content is not None
        with pytest.raises(Exception, match="Unknown model 'shared@7'"):
            await client.chat.completions.create(model="shared@7", **question)
        runtime.sampler.unload("shared@0")
        both = [client.chat.completions.create(model="shared@0", **question) for _ in range(4)]
        assert all(reply.choices for reply in await asyncio.gather(*both))


async def test_the_doctor_examines_rollouts_of_a_cluster(registered):
    _, model = registered
    found = await art.doctor(model, conversation, [0, 1], groups=1, show_progress=False)
    assert "max_completion_tokens (or max_tokens)" in found["length"].advice
    assert "of 512 that fit" in found["context"].finding


async def test_a_killed_replica_loses_no_rollout(registered):
    backend, model = registered
    table, warnings = backend.runtime(model).sampler.table, []
    unsubscribe = backend.bus.subscribe(lambda event: warnings.append(event.message), Warned)
    victim = table.replicas[0]
    playing = asyncio.ensure_future(roll_out(model, turns=4, tokens=60))
    await wait_until(lambda: victim.requests >= 4)
    os.kill(victim.facts["place"].pid, signal.SIGKILL)
    groups = await playing
    assert sum(len(group.exceptions) for group in groups) == 0
    assert all(len(trajectory.messages_and_choices) == 9 for group in groups for trajectory in group)
    assert table.counts["asked again"] >= 1
    await wait_until(lambda: len(table.serving()) == 2)
    assert table.replicas[0] is not victim
    unsubscribe()
    assert any("Replica 0 of shared is lost" in message for message in warnings)
    await roll_out(model, groups=1, turns=1)
    assert table.replicas[0].assigned > 0  # new conversations use it


async def test_a_killed_rank_changes_no_result(registered):
    backend, model = registered
    ray, group = backend._connection.ray, backend.runtime(model).learner
    groups = await roll_out(model)
    first, ends = (group.files, group.adapter), []
    for kill in (False, True):
        killed = []

        def on_step(event, kill=kill, killed=killed):
            if kill and not killed:
                killed.append(group.facts[1]["place"].pid)
                os.kill(killed[0], signal.SIGKILL)

        unsubscribe = backend.bus.subscribe(on_step, GradientStep)
        await backend.train(model, groups, learning_rate=1e-3, save_checkpoint=False)
        unsubscribe()
        ends.append(ray.get(group.weights()))
        assert bool(killed) == kill
        await asyncio.to_thread(go_back, backend.runtime(model), first)
    assert group.losses == 1
    assert largest_difference(*ends) == 0


async def test_a_rank_that_is_lost_after_a_step_loses_nothing(registered):
    backend, model = registered
    runtime = backend.runtime(model)
    group, before, losses = runtime.learner, runtime.learner.adapter, runtime.learner.losses
    step = await model.get_step()

    def train(kill):
        runtime.unsaved = group.step(some_rows(seed=step), StepConfig(learning_rate=1e-3), lambda *_: None, None)
        trained = group.adapter
        if kill:
            os.kill(group.facts[0]["place"].pid, signal.SIGKILL)
            group._lives(group.actors[0])
        runtime.publish(runtime.step + 1)
        runtime.save()
        return trained

    trained = await asyncio.to_thread(runtime.worker.call, train, True)
    assert await model.get_step() == step + 1 and step + 1 in model.store.steps_saved()
    assert largest_difference(trained, before) > 0 and group.losses == losses
    await asyncio.to_thread(runtime.worker.call, train, False)
    assert group.losses == losses + 1  # the next step finds the loss, and continues from this one
    assert 0 < largest_difference(group.adapter, trained) < 0.1


async def test_a_rank_whose_node_is_gone_ends_the_step_and_training_continues_later(registered, monkeypatch):
    backend, model = registered
    runtime = backend.runtime(model)
    group, before = runtime.learner, runtime.learner.adapter
    monkeypatch.setattr(learner_group, "PROCESS_START_S", 0.0)
    monkeypatch.setattr(group, "wait_s", 0.5)

    def step():
        return runtime.worker.call(group.step, some_rows(), StepConfig(learning_rate=1e-3), lambda *_: None, None)

    with monkeypatch.context() as missing:
        missing.setattr(group, "options", {"num_cpus": 100})
        os.kill(group.facts[1]["place"].pid, signal.SIGKILL)
        with pytest.raises(art.TrainError, match="2 of 2 ranks .*CPU: 200 needed"):
            await asyncio.to_thread(step)
        assert largest_difference(group.adapter, before) == 0
    monkeypatch.undo()
    await asyncio.to_thread(step)
    assert largest_difference(group.adapter, before) > 0
    await asyncio.to_thread(runtime.worker.call, runtime.publish, runtime.step + 1)


async def test_training_with_staleness_while_the_number_of_replicas_changes(registered):
    backend, model = registered
    start = await model.get_step()
    run = art.train(
        model,
        lambda model, scenario: conversation(model, turns=2),
        [{"id": i} for i in range(4)],
        steps=start + 3,
        groups_per_step=2,
        rollouts_per_group=4,
        max_staleness=1,
        show=False,
    )
    await backend.scale(3)
    assert [row["state"] for row in backend.workers(model)[:3]] == ["serving"] * 3
    await backend.scale(1)
    await run
    assert await model.get_step() == start + 3
    assert [row["replica"] for row in backend.workers(model) if "replica" in row] == [0]
    assert {start + 1, start + 2, start + 3} <= {*model.store.steps_saved()}


async def test_supervised_steps(registered):
    backend, model = registered
    step = await model.get_step()
    lines = [{"role": "user", "content": "A1"}, {"role": "assistant", "content": "<move>B2</move>"}]
    data = [art.Trajectory(messages_and_choices=lines, reward=0.0)] * 8
    await model.train_sft(data)
    assert await model.get_step() == step + 1
    os.kill(backend.runtime(model).learner.facts[1]["place"].pid, signal.SIGKILL)
    with pytest.raises(art.TrainError, match="The adapter is unchanged: train again"):
        await model.train_sft(data)
    await model.train_sft(data)
    assert await model.get_step() == step + 2
