"""`RayBackend` on real Ray processes, of which some are killed."""

import asyncio
import os
import signal
from contextlib import suppress

import numpy as np
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI
from support.ray_parts import conversation, largest_difference, roll_out, some_rows, wait_until

import art_nb as art
from art_nb.core.events import GradientStep, RolloutDone, StepDone, Warned
from art_nb.distributed import learner_group
from art_nb.distributed.replicas import tensors_from_arrays
from art_nb.distributed.routing import ReplicaRecord
from art_nb.learners.base import Learner
from art_nb.learners.settings import StepConfig
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


def go_back(runtime, state):
    """Give the ranks a state that the group had before."""
    group = runtime.learner
    group.files, group.adapter = state
    runtime.worker.call(group.restore)


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


async def test_a_replica_that_hangs_is_replaced_and_loses_no_rollout(registered, monkeypatch):
    backend, model = registered
    replicas, warnings = backend.runtime(model).sampler, []
    table, asked = replicas.table, replicas.table.counts["asked again"]
    monkeypatch.setattr(replicas, "stall_s", 10.0)
    unsubscribe = backend.bus.subscribe(lambda event: warnings.append(event.message), Warned)
    victim, other = sorted(table.serving(), key=ReplicaRecord.load)  # the first one gets new conversations
    number = victim.number
    pid = victim.facts["place"].pid
    playing = asyncio.ensure_future(roll_out(model, turns=4, tokens=60))
    await wait_until(lambda: victim.requests >= 4)
    os.kill(pid, signal.SIGSTOP)
    try:
        groups = await playing
        await wait_until(lambda: len(table.serving()) == 2)
    finally:
        unsubscribe()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert sum(len(group.exceptions) for group in groups) == 0
    assert all(len(trajectory.messages_and_choices) == 9 for group in groups for trajectory in group)
    assert table.counts["asked again"] > asked
    assert any(f"Replica {number} of shared is stuck" in message for message in warnings)
    assert any(f"Replica {number} of shared is lost" in message for message in warnings)
    assert table.replicas[number] is not victim and other.state == "serving"
    await roll_out(model, groups=1, turns=1)
    assert table.replicas[number].assigned > 0


async def test_each_reply_has_the_logprobs_of_the_version_that_it_names(registered, tiny_model_dir):
    backend, model = registered
    runtime, ray = backend.runtime(model), backend._connection.ray
    replicas, random = runtime.sampler, np.random.default_rng(0)
    adapters = {runtime.step: runtime.learner.adapter}
    for step in (runtime.step + 1, runtime.step + 2):
        noise = lambda array: array + random.normal(scale=0.1, size=array.shape).astype(np.float32)
        adapters[step] = {name: noise(array) for name, array in runtime.learner.adapter.items()}
    choices = []

    async def ask_three_times():
        for _ in range(3):
            reply = await model.openai_client().chat.completions.create(
                model="shared",
                messages=[{"role": "user", "content": "A1 B2"}],
                max_tokens=60,
                logprobs=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            choices.append((reply.system_fingerprint, reply.choices[0]))

    asking = [asyncio.ensure_future(ask_three_times()) for _ in range(32)]
    for count, step in zip((8, 48), [*adapters][1:], strict=True):
        await wait_until(lambda count=count: len(choices) >= count)
        assert sum(replica.requests for replica in replicas.table.serving()) > 8
        await asyncio.to_thread(replicas.publish, runtime.key(step), ray.put(adapters[step]))
    await asyncio.gather(*asking)
    await asyncio.to_thread(runtime.worker.call, runtime.publish, runtime.step)
    for step in [*adapters][1:]:
        replicas.unload(runtime.key(step))

    learner = Learner(load_policy(tiny_model_dir, device="cpu", dtype=torch.float32))
    versions = {step: tensors_from_arrays(arrays) for step, arrays in adapters.items()}
    named, others = {step: [] for step in versions}, []  # the largest difference of each reply
    for key, choice in choices:
        version = choice.model_extra["policy_version"]
        assert key == runtime.key(version)
        prompt, sampled = choice.model_extra["prompt_token_ids"], choice.model_extra["token_ids"]
        tokens = np.array([*prompt, *sampled], np.int32)
        row = WeightedRow(tokens, np.arange(len(tokens)) >= len(prompt), np.zeros(len(tokens), np.float32))
        (batch,) = learner.packed([row], 1024, False)
        logprobs = np.array([token.logprob for token in choice.logprobs.content])
        for step, weights in versions.items():
            scored = learner.reference([batch], 1.0, weights=weights)[0][batch.node_E].numpy()
            (named[step] if step == version else others).append(float(np.abs(scored - logprobs).max()))
    assert all(named.values())  # each version has answered
    assert max(max(values) for values in named.values()) < 1e-3
    assert min(others) > 1e-2


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
    table, start, steps, errors = backend.runtime(model).sampler.table, await model.get_step(), [], []
    asked = table.counts["asked again"]
    run = art.train(
        model,
        lambda model, scenario: conversation(model, turns=2, tokens=30),
        [{"id": i} for i in range(4)],
        steps=10_000,
        groups_per_step=2,
        rollouts_per_group=4,
        max_staleness=1,
        show=False,
    )
    run.bus.subscribe(lambda event: steps.append(event.step), StepDone)
    run.bus.subscribe(lambda event: errors.append(event.error), RolloutDone)
    await backend.scale(3)
    assert [row["state"] for row in backend.workers(model)[:3]] == ["serving"] * 3
    assert steps  # it trains meanwhile
    await wait_until(lambda: all(replica.assigned for replica in table.serving()))
    await backend.scale(1)
    count = len(steps)
    await wait_until(lambda: len(steps) > count + 1)
    await asyncio.to_thread(run.stop, after_step=True)
    assert [row["replica"] for row in backend.workers(model) if "replica" in row] == [0]
    assert await model.get_step() == run.step == steps[-1] > start
    assert steps == [*range(start + 1, run.step + 1)]
    assert {error for error in errors if error and "cancel" not in error.lower()} == set()
    assert table.counts["asked again"] == asked  # the replicas that were removed have finished their requests
    assert run.step in model.store.steps_saved()


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
