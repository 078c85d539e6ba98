"""What every server of `art-nb run` does, whatever its backend. Test files have the fixtures server, named and far."""

import asyncio

import httpx
import numpy as np
import openai
import pytest
from support.registered import QUESTION, a_group, ask, heard
from support.remote_parts import LONG, a_long_group

import art_nb as art
from art_nb.core.events import AdapterServed, CheckpointSaved, Failed, GradientStep, SignalReport, StepDone
from art_nb.core.types import ServeError, StoreError, TokenError


async def until(what, work):
    """Wait for something that happens in the course of some work."""
    while not what():
        assert not work.done(), work
        await asyncio.sleep(0.02)


def files(folder):
    """What lies below a folder, by name."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_a_remote_backend_keeps_the_contract(server, named, tmp_path):
    found = await art.check_backend(server.client(tmp_path), named(), learning_rate=1e-2)
    assert found["step"] == 1
    assert found["rise"] > 0.1
    assert found["drift"] < 0.05


async def test_events_come_to_the_bus_here(named, far):
    model, events = named(), heard(far)
    await model.register(far)
    await far.train(model, [await a_group(model)], learning_rate=1e-2)
    kinds = [type(event) for event in events]
    found = [kind for kind in kinds if kind is not GradientStep]
    assert found == [SignalReport, AdapterServed, CheckpointSaved]
    assert GradientStep in kinds
    assert {event.run for event in events} == {"ttt"}
    assert [type(event) for event in model.store.events()] == kinds


async def test_both_spellings_log_on_both_sides(named, far, server):
    model = named()
    await model.register(far)
    group = await a_group(model)
    await model.train([group], config=art.TrainConfig(learning_rate=1e-2))
    await model.log([group], split="val", metrics={"accuracy": 0.5})
    kept = art.RunStore(server.folder / model.project / "models" / "ttt")
    assert kept.history() == model.store.history()
    assert [row["step"] for row in kept.history()] == [1, 1]
    for split in ("train", "val"):
        ours, theirs = (store.read_groups(split, 1)[0] for store in (model.store, kept))
        assert ours.trajectories == theirs.trajectories
        assert theirs.trajectories[0].messages_and_choices[-1].model_extra["token_ids"]
    assert kept.steps_saved() == [0, 1]
    assert model.store.steps_saved() == []


async def test_checkpoints_are_deleted_and_forked_there(named, far):
    model, fork = named(), named("fork")
    await model.register(far)
    group = await a_group(model)
    for value in (0.1, 0.9, 0.5, 0.2):
        result = await far.train(model, [group], learning_rate=1e-2)
        await model.log(metrics={"reward": value}, split="val", step=result.step)
    await model.delete_checkpoints()
    await ask(model, "ttt@2")
    with pytest.raises(openai.NotFoundError):
        await ask(model, "ttt@1")
    await far._experimental_fork_checkpoint(fork, from_model="ttt", not_after_step=3)
    await fork.register(far)
    assert await fork.get_step() == 2
    assert (await ask(fork, temperature=0)).message == (await ask(model, "ttt@2", temperature=0)).message
    apart = named(project="apart from it")
    await far._experimental_fork_checkpoint(apart, from_model="ttt", from_project=model.project)
    await apart.register(far)
    assert await apart.get_step() == 4
    with pytest.raises(StoreError, match="registered already"):
        await far._experimental_fork_checkpoint(fork, from_model="ttt", not_after_step=3)


async def test_a_checkpoint_is_pulled(server, named, far, tmp_path, capsys):
    model, mine = named(), tmp_path / "mine"
    await model.register(far)
    await far.train(model, [await a_group(model)], learning_rate=1e-2)
    there = art.RunStore(server.folder / model.project / "models" / "ttt")
    pulled = await far._experimental_pull_model_checkpoint(model, verbose=True)
    assert pulled == str(model.store.checkpoint_dir(1)) == capsys.readouterr().out.strip()
    assert model.store.steps_saved() == [1]
    assert files(model.store.checkpoint_dir(1)) == files(there.checkpoint_dir(1))
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    unregistered = named()
    for step in (1, 0, "latest", 0):  # each in place of the one before
        await far._experimental_pull_model_checkpoint(unregistered, step=step, local_path=str(mine))
        assert files(mine) == files(there.checkpoint_dir(1 if step else 0)) | {"notes.txt": b"mine"}
    assert [path.name for path in tmp_path.rglob("*.tmp")] == []
    async with art.LocalBackend(path=far.path, verbose=False) as local:  # and goes on here
        await model.register(local)
        assert await model.get_step() == 1


async def test_sft(named, far):
    model = named()
    await model.register(far)
    shown = [art.Trajectory(messages_and_choices=[*QUESTION, {"role": "assistant", "content": "B2"}])] * 4
    first = await model.train_sft(shown, art.TrainSFTConfig(learning_rate=1e-2))
    second = await model.train_sft(shown, art.TrainSFTConfig(learning_rate=1e-2))
    assert (first.step, second.step) == (1, 2)
    assert second.metrics["sft/final_loss"] < first.metrics["sft/final_loss"]


async def test_a_whole_run(named, far):
    model, events = named(), heard(far)
    await model.register(far)

    async def rollout(model, scenario):
        choice = await ask(model)
        return art.Trajectory(messages_and_choices=[*QUESTION, choice], reward=float(len(choice.message.content)))

    run = await art.train(model, rollout, ["a", "b"], steps=2, groups_per_step=2, rollouts_per_group=4, show=False)
    assert (run.status, run.step) == ("done", 2)
    assert not [event for event in events if isinstance(event, Failed)]
    assert [event.step for event in events if isinstance(event, StepDone)] == [1, 2]
    assert model.store.steps("train") == [1, 2]


async def test_cancelling_undoes_the_step(named, far):
    model, steps = named(), heard(far, GradientStep)
    await model.register(far)
    group, before = await a_long_group(model), await ask(model, temperature=0)
    training = asyncio.create_task(far.train(model, [group], **LONG))
    await until(lambda: steps, training)
    assert steps[0].micro_batches > 20, "too short to be given up in"
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert await model.get_step() == 0
    after = await ask(model, temperature=0)
    assert after.message == before.message
    logprobs = [[entry.logprob for entry in said.logprobs.content] for said in (after, before)]
    np.testing.assert_allclose(*logprobs, atol=0.05)
    assert (await far.train(model, [await a_group(model)])).step == 1


async def test_two_clients_of_one_run(server, named, far, tmp_path):
    mine, yours, steps = named(), named(), heard(far, GradientStep)
    await mine.register(far)
    group = await a_long_group(mine)
    training = asyncio.create_task(far.train(mine, [group], **LONG))
    await until(lambda: steps, training)
    async with server.client(tmp_path / "second") as second:
        quiet = heard(second, GradientStep)
        await yours.register(second)  # waits for the step
        assert await yours.get_step() == 1
        assert not quiet
        assert (await training).step == 1
        assert (await second.train(yours, [await a_group(yours)])).step == 2
    assert await mine.get_step() == 2
    await ask(mine)
    with pytest.raises(openai.AuthenticationError):
        await ask(yours)


async def test_tokens_that_the_model_does_not_know_are_refused(named, far):
    model = named()
    await model.register(far)
    group = await a_group(model)
    group.trajectories[2].messages_and_choices[-1].token_ids[0] = 10**6
    with pytest.raises(TokenError, match="1000000"):
        await far.train(model, [group])
    assert await model.get_step() == 0
    await ask(model)


async def test_a_wrong_key_is_rejected(server, named, far, tmp_path):
    model, other = named(), named("other")
    for one in (model, other):
        await one.register(far)
    for key in ("wrong", "", server.key[:-1], model.inference_api_key):
        with pytest.raises(ServeError, match="ART_NB_API_KEY") as caught:
            await named().register(server.client(tmp_path, api_key=key or "none"))
        assert caught.value.status == 401
    for url, key in (
        (other.inference_base_url, model.inference_api_key),
        (model.inference_base_url, server.key),
        (model.inference_base_url, "x"),
    ):
        with pytest.raises(openai.AuthenticationError):
            await openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0).models.list()
    assert httpx.get(f"{server.url}/health", timeout=60).json() == {"status": "ok"}
    assert httpx.get(f"{server.url}/metrics", timeout=60).status_code == 401
