"""LocalBackend on a tiny model: both spellings of training, several steps served at once, full disks, forks, an end."""

import asyncio
import errno
import gc
import os
import re
import shutil
import socket
import subprocess
import threading
import weakref
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from support.registered import QUESTION, a_group, ask, heard, saved_adapter, until
from transformers import PreTrainedModel

import art_nb as art
from art_nb.core.events import Bus, CheckpointSaved, Informed, SignalReport, Warned, print_warnings
from art_nb.core.types import ServeError, StoreError, TrainConfig, TrainError, TrainSFTConfig
from art_nb.learners import checkpoints
from art_nb.models.gguf import LOADING
from art_nb.policy import adapter_files
from art_nb.policy.adapters import load_adapter
from art_nb.policy.loading import load_policy
from art_nb.policy.lora import sequence_logprobs

NEAR = 0.05  # of two logprobs under the same weights, where the model computes in bf16


def logprobs(choice):
    return np.array([entry.logprob for entry in choice.logprobs.content])


async def greedy(model, name=None):
    """The likeliest reply and the logprobs of its tokens."""
    choice = await ask(model, name, temperature=0)
    return choice.model_extra["token_ids"], logprobs(choice)


def threads():
    return {t for t in threading.enumerate() if t.name.startswith(("art-nb", "art_nb"))}


def listens(url):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", httpx.URL(url).port)) == 0


# the contract


async def test_the_local_backend_keeps_the_contract(keeps_contract):
    await keeps_contract()


class Idle(art.LocalBackend):
    async def train(self, model, groups, **options):
        return art.LocalTrainResult(step=self.runtime(model).step)


class Unmoved(art.LocalBackend):
    async def train(self, model, groups, **options):
        return await super().train(model, groups, **options | {"learning_rate": 0.0})


class Forgetful(art.LocalBackend):
    def _model_inference_name(self, model, step=None):
        return model.name


class Restless(art.LocalBackend):
    async def close(self):
        pass


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (Idle, "did not advance"),
        (Unmoved, "is not more likely"),
        (Forgetful, "replies of step 0 changed"),
        (Restless, "still answered"),
    ],
)
async def test_a_backend_that_breaks_a_promise_is_caught(named, tmp_path, broken, what):
    backend = broken(path=tmp_path, verbose=False)
    with pytest.raises(ServeError, match=what):
        await art.check_backend(backend, named(), learning_rate=1e-2)
    await art.LocalBackend.close(backend)


# training


async def test_both_spellings_train_the_same(named, local):
    older, newer = named("older"), named("newer")
    for model in (older, newer):
        await model.register(local)
    group = await a_group(older)
    for _ in range(2):
        result = await local.train(newer, [group], learning_rate=1e-2)
        await newer.log([group], metrics=result.metrics, step=result.step, split="train")
        await older.train([group], config=TrainConfig(learning_rate=1e-2))
    assert await older.get_step() == await newer.get_step() == result.step == 2
    assert Path(result.checkpoint_path) == newer.store.checkpoint_dir(2)
    for step in (0, 1, 2):
        assert saved_adapter(older, step) == saved_adapter(newer, step)
    assert len({saved_adapter(older, step) for step in (0, 1, 2)}) == 3
    excluded = ("time/", "profile/", "throughput/", "recorded")
    told = lambda row: {k: v for k, v in row.items() if not k.startswith(excluded)}
    rows = [[told(row) for row in model.store.history()] for model in (older, newer)]
    assert rows[0] == rows[1]
    assert [row["step"] for row in rows[0]] == [1, 2]
    assert rows[0][0]["train/reward"] == 1.0
    assert older.store.steps("train") == newer.store.steps("train") == [1, 2]


async def test_written_conversations_are_learnt(named, local):
    model = named()
    await model.register(local)
    talk = art.Trajectory(messages_and_choices=[*QUESTION, {"role": "assistant", "content": "the move is B2"}])
    first = await model.train_sft([talk] * 4, TrainSFTConfig(learning_rate=1e-2, batch_size=2))
    for _ in range(4):
        last = await model.train_sft([talk] * 4, TrainSFTConfig(learning_rate=[1e-2, 5e-3], batch_size=2))
    assert (first.step, last.step, await model.get_step()) == (1, 5, 5)
    assert last.metrics["sft/loss"] < first.metrics["sft/loss"] - 0.3
    assert [row["step"] for row in model.store.history()] == [1, 2, 3, 4, 5]
    assert model.store.steps_saved() == [0, 1, 2, 3, 4, 5]


async def test_the_bar_of_supervised_training_advances_before_a_batch_is_complete(named, local, monkeypatch, capsys):
    monkeypatch.setattr("art_nb.core.progress_bars.FILE_LINE_S", 0.0)
    monkeypatch.setattr("art_nb.backends.local.planned_options", lambda plan: {"tokens_per_batch": 64})
    model = named()
    await model.register(local)
    local.runtime(model).verbose = True
    replies = [f"move {i}: " + "B2 " * 20 for i in range(4)]
    talks = [
        art.Trajectory(messages_and_choices=[*QUESTION, {"role": "assistant", "content": reply}]) for reply in replies
    ]
    await model.train_sft(talks, TrainSFTConfig(learning_rate=1e-3, batch_size=2))
    counts = re.findall(r"\| (\S+)/2 \[", capsys.readouterr().err)
    assert list(dict.fromkeys(counts)) == ["0", "0.5", "1", "1.5", "2"]


@pytest.mark.parametrize(
    "rates", [[], [1e-3], [float("inf"), 1e-3]], ids=["no rates", "too few rates", "a rate that breaks"]
)
async def test_a_pass_that_fails_leaves_the_adapter_as_it_was(named, local, rates):
    model = named()
    await model.register(local)
    group = await a_group(model)
    await local.train(model, [group], learning_rate=1e-2)
    before = await greedy(model)
    talk = art.Trajectory(messages_and_choices=[*QUESTION, {"role": "assistant", "content": "the move is B2"}])
    with pytest.raises(TrainError):
        await model.train_sft([talk] * 4, TrainSFTConfig(learning_rate=rates, batch_size=2))
    after = await greedy(model)
    assert await model.get_step() == 1
    assert before[0] == after[0]
    np.testing.assert_allclose(before[1], after[1], atol=NEAR)
    await local.train(model, [group], learning_rate=1e-2)
    untouched = named("untouched")
    await untouched.register(local)
    for _ in range(2):
        await local.train(untouched, [group], learning_rate=1e-2)
    assert saved_adapter(model, 2) == saved_adapter(untouched, 2)


async def test_where_nothing_can_be_learnt_the_step_emits_the_reason(named, local, capsys):
    model, events = named(), heard(local, SignalReport, Warned)
    await model.register(local)
    result = await local.train(model, [await a_group(model, rewards=[1.0] * 6)], learning_rate=1e-2)
    assert result.step == 1
    assert result.metrics["data/step_num_gradient_steps"] == 0
    assert saved_adapter(model, 0) == saved_adapter(model, 1)
    assert capsys.readouterr().out == ""
    assert [type(event).__name__ for event in events] == ["SignalReport", "Warned"]
    assert events[0].reason in events[1].message
    assert {event.run for event in events} == {"ttt"}


async def test_the_warnings_of_a_step_are_printed(named, tmp_path, capsys):
    async with art.LocalBackend(path=tmp_path, sampler="transformers") as backend:
        model, events = named(), heard(backend, Warned)
        await model.register(backend)
        group = await a_group(model, temperature=0)
        capsys.readouterr()
        for _ in range(3):
            await backend.train(model, [group], learning_rate=1e-2)
        printed = capsys.readouterr().out
        await backend.train(model, [await a_group(model, rewards=[1.0] * 6)], learning_rate=1e-2)
        other_reason = capsys.readouterr().out
    counts = {"Nothing is learned in step": 1, "6 replies were sampled": 1}
    assert {words: printed.count(words) for words in counts} == counts
    assert printed.splitlines() == [event.message for event in events if event.message in printed]
    shown = [event.message for event in events if "Nothing is learned" in event.message]
    beginnings = ["step 1: ", "step 2 (2 steps so far): ", "step 3 (3 steps so far): ", "step 4: "]
    assert all(text.startswith(f"Nothing is learned in {b}") for text, b in zip(shown, beginnings, strict=True))
    assert other_reason.splitlines() == shown[-1:]


async def test_options_without_an_effect_are_announced_once(named, local):
    model, events = named(lora_config={"r": 4, "use_rslora": True}), heard(local, Warned)
    await model.register(local)
    assert local.runtime(model).policy.rank == 4
    group = await a_group(model)
    for _ in range(2):
        await local.train(model, [group], learning_rate=1e-3, plot_tensors=True)
    assert [event.message for event in events] == [
        "Unknown LoRA settings are ignored: use_rslora.",
        "train(): plot_tensors has no effect here: art.token_heatmaps(model, step=...) draws the tensors of any step.",
    ]


async def test_options_without_effect_are_reported_once(named, tmp_path, capsys):
    asked = {
        "trainer_args": {"optim": "sgd"},
        "init_args": {"device_map": "auto"},
        "engine_args": {"enforce_eager": True},
    }
    bus, said = Bus(), []
    bus.subscribe(lambda event: said.append(event.message), Warned)
    async with art.LocalBackend(path=tmp_path, in_process=False, sampler="transformers", bus=bus) as backend:
        model = named(_internal_config=asked)
        for _ in range(2):
            await model.register(backend)
    printed = capsys.readouterr().out
    for words in ("in_process=False", "trainer_args", "init_args.device_map", "engine_args are settings of vLLM"):
        assert printed.count(words) == len([message for message in said if words in message]) == 1


async def test_alpha_and_seed_of_the_adapter_are_the_models(named, local):
    plain, newer = named("plain"), named("newer", lora_config={"alpha": 32, "random_state": 7})
    older = named("older", _internal_config={"peft_args": {"lora_alpha": 32, "random_state": 7}})
    for model, alpha in ((plain, 16), (newer, 32), (older, 32)):
        await model.register(local)
        policy = local.runtime(model).policy
        assert policy.alpha == alpha
        assert {layer.scale for layer in policy.layers.values()} == {alpha / 8}
    assert saved_adapter(older, 0) == saved_adapter(newer, 0) != saved_adapter(plain, 0)
    assert adapter_files.read_matching_adapter(newer.store.checkpoint_dir(0), local.runtime(newer).policy)
    with pytest.raises(StoreError, match="lora_alpha=32"):
        adapter_files.read_matching_adapter(newer.store.checkpoint_dir(0), local.runtime(plain).policy)


@pytest.mark.parametrize("how", ["chat_template", "chat_template_path"])
async def test_the_models_own_template_prints_its_prompts(named, local, tmp_path, how):
    template = "{{ mood }}: {{ messages[-1]['content'] }}{% if add_generation_prompt %} ->{% endif %}"
    path = tmp_path / "mine.jinja"
    path.write_text(template)
    settings = {how: {"chat_template": template, "chat_template_path": str(path)}[how]}
    model = named(_internal_config=settings | {"chat_template_kwargs": {"mood": "calm"}})
    await model.register(local)
    choice = (await a_group(model, size=1)).trajectories[0].messages_and_choices[-1]
    prompt = local.runtime(model).chat.tokenizer.decode(choice.model_extra["prompt_token_ids"])
    assert prompt == f"calm: {QUESTION[0]['content']} ->"


async def test_a_template_without_tools_is_explained_without_a_warning(named, local, capsys):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    model, events = named(), heard(local, Informed, Warned)
    await model.register(local)
    with print_warnings(local.bus):
        for _ in range(2):
            await ask(model, tools=[tool])
    assert [type(event) for event in events] == [Informed]
    assert capsys.readouterr().out.count("This model's chat template does not support tools.") == 1


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), (b"\xff", "can't decode")], ids=["none", "bytes"])
async def test_a_template_that_cannot_be_read_is_named(named, local, tmp_path, content, why):
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StoreError, match=f"Could not read chat_template_path {path} .*{why}.*Give the path"):
        await named(_internal_config={"chat_template_path": str(path)}).register(local)


async def test_a_step_may_stay_in_memory(named, local):
    model = named()
    await model.register(local)
    group, before = await a_group(model), await greedy(model)
    result = await local.train(model, [group], learning_rate=5e-2, save_checkpoint=False)
    assert (result.step, result.checkpoint_path, await model.get_step()) == (1, None, 1)
    assert model.store.steps_saved() == [0]
    now, so_called = await greedy(model), await greedy(model, "ttt@1")
    assert abs(before[1][0] - now[1][0]) > 2 * NEAR
    assert now[0] == so_called[0]
    np.testing.assert_allclose(now[1], so_called[1], atol=NEAR)
    choice = (await a_group(model, size=1)).trajectories[0].messages_and_choices[-1]
    assert choice.model_extra["policy_version"] == 1
    assert (await local.train(model, [group], learning_rate=1e-2)).checkpoint_path is not None
    assert model.store.steps_saved() == [0, 2]


@pytest.mark.parametrize("options", [{"loss_fn": "cispoo"}, {"reduction": "tokens"}, {"scale": "groups"}], ids=str)
async def test_a_name_that_does_not_exist_is_told(named, local, options):
    model = named()
    await model.register(local)
    with pytest.raises(TrainError, match=next(iter(options.values()))):
        await local.train(model, [await a_group(model)], **options)
    assert await model.get_step() == 0
    await ask(model)


# serving


async def test_all_steps_and_the_base_model_reply_during_training(named, local, tiny_model_dir):
    model = named()
    await model.register(local)
    for step in range(2):
        await local.train(model, [await a_group(model, step)], learning_rate=2e-2)
    names = [str(tiny_model_dir), "ttt@0", "ttt@1", "ttt@2"]
    alone = {name: await greedy(model, name) for name in names}
    assert alone[names[0]][0] == alone["ttt@0"][0]
    np.testing.assert_allclose(alone[names[0]][1], alone["ttt@0"][1], atol=NEAR)
    assert abs(alone["ttt@0"][1][:1] - alone["ttt@1"][1][:1]) > 2 * NEAR
    group = await a_group(model)
    steps = [local.train(model, [group], learning_rate=2e-2) for _ in range(3)]
    asked = names * 6
    *said, _, _, _ = await asyncio.gather(*(greedy(model, name) for name in asked), *steps)
    for name, (ids, found) in zip(asked, said, strict=True):
        assert ids == alone[name][0]
        np.testing.assert_allclose(found, alone[name][1], atol=NEAR)
    assert await model.get_step() == 5
    with pytest.raises(openai.NotFoundError, match="Available steps: 0, 1, 2, 3, 4, 5."):
        await ask(model, "ttt@7")


async def test_what_is_served_is_what_the_checkpoint_holds(named, local, tiny_model_dir):
    model = named()
    await model.register(local)
    await local.train(model, [await a_group(model)], learning_rate=5e-2)
    policy = load_policy(tiny_model_dir)
    load_adapter(policy, adapter_files.read_adapter(model.store.checkpoint_dir(1)))
    choice = await ask(model, seed=3)
    prompt, ids = choice.model_extra["prompt_token_ids"], choice.model_extra["token_ids"]
    exact = sequence_logprobs(policy, prompt + ids)[len(prompt) - 1 :]
    np.testing.assert_allclose(logprobs(choice), exact.numpy(), atol=NEAR)


async def test_no_request_fails_because_a_step_ends(named, local):
    model, over, answers = named(), asyncio.Event(), 0
    await model.register(local)
    group = await a_group(model)

    async def keep_asking(name):
        nonlocal answers
        while not over.is_set():
            await ask(model, name, max_tokens=1)
            answers += 1

    asking = [asyncio.create_task(keep_asking(name)) for name in [None] * 6 + ["ttt@0"] * 2]
    while answers < 40 or await model.get_step() < 6:
        await local.train(model, [group], learning_rate=1e-3)
    over.set()
    await asyncio.gather(*asking)


# the disk


@pytest.fixture
def small_disk(tmp_path):
    """A directory on a disk of one megabyte, and how to fill it to the last few bytes and to make room again."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")

    def fill(leave):
        with open(place / "filler", "ab", buffering=0) as file:
            while (room := os.statvfs(place).f_bavail * os.statvfs(place).f_frsize - leave) > 0:
                file.write(b"x" * room)

    yield place, fill, (place / "filler").unlink
    subprocess.run(["umount", "-l", str(place)], check=True)


async def test_a_step_that_the_full_disk_does_not_take_stays_in_memory(named, small_disk, capsys):
    place, fill, clear = small_disk
    model = named()
    async with art.LocalBackend(path=place) as backend:
        events = heard(backend, Warned, CheckpointSaved)
        await model.register(backend)
        group = await a_group(model)
        capsys.readouterr()
        before = await greedy(model)
        fill(100_000)
        result = await backend.train(model, [group], learning_rate=1e-2)
        assert (result.step, result.checkpoint_path) == (1, None)
        told = capsys.readouterr().out
        assert str(model.store.checkpoint_dir(1)) in told
        numbers = [int(word.replace(",", "")) for word in told.split() if word.replace(",", "").isdigit()]
        assert min(numbers[-2:]) <= 100_000 < 150_000 < max(numbers), "the bytes that are needed and available"
        after = await greedy(model)
        assert (before[0], list(before[1])) != (after[0], list(after[1]))
        fill(0)
        with pytest.raises(
            StoreError, match=r"step 1 was not saved: Could not write .*: no space left: .* are needed, 0 are available"
        ):
            await backend.train(model, [group], learning_rate=1e-2)
        clear()
        result = await backend.train(model, [group], learning_rate=1e-2)
        assert Path(result.checkpoint_path).name == "0002"
        again = await greedy(model)
    assert model.store.steps_saved() == [0, 1, 2]
    assert [p.name for p in model.store.checkpoint_dir(0).parent.iterdir() if p.name.startswith(".")] == []
    assert [type(event) for event in events if "checkpoint" in str(event)] == [Warned, CheckpointSaved, CheckpointSaved]
    assert [event.step for event in model.store.events() if isinstance(event, CheckpointSaved)] == [1, 2]
    async with art.LocalBackend(path=place, verbose=False) as backend:
        await model.register(backend)
        resumed = await greedy(model)
    assert resumed[0] == again[0]
    np.testing.assert_allclose(resumed[1], again[1], atol=NEAR)


async def test_any_error_of_the_disk_is_borne(named, local, monkeypatch):
    model = named()
    await model.register(local)
    group, fsync = await a_group(model), os.fsync

    def broken(handle):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    result = await local.train(model, [group], learning_rate=1e-2)
    monkeypatch.setattr(os, "fsync", fsync)
    assert result.checkpoint_path is None
    result = await local.train(model, [group], learning_rate=1e-2)
    assert Path(result.checkpoint_path).name == "0002"
    assert model.store.steps_saved() == [0, 1, 2]

    monkeypatch.setattr(os, "fsync", broken)
    await local.train(model, [group], learning_rate=1e-2)
    monkeypatch.setattr(os, "fsync", fsync)
    async with art.LocalBackend(path=local.path, verbose=False) as other:  # it takes the run over
        await model.register(other)
        assert (await model.get_step(), model.store.steps_saved()) == (3, [0, 1, 2, 3])


# registering


async def test_a_second_registration_resumes_the_run(named, local):
    model = named()
    before = threads()
    await model.register(local)
    url, group = model.inference_base_url, await a_group(model)
    _, _ = await asyncio.gather(local.train(model, [group], learning_rate=1e-2), register_again(model, local))
    assert await model.get_step() == 1
    assert not listens(url)
    assert listens(model.inference_base_url)
    assert len(threads() - before) == 3, "one worker, one endpoint, one lock"
    await local.train(model, [group], learning_rate=1e-2)
    saved = [event.step for event in model.store.events() if isinstance(event, CheckpointSaved)]
    assert saved.count(2) == 1
    assert model.store.steps_saved() == [0, 1, 2]


async def register_again(model, backend):
    await asyncio.sleep(0)
    await model.register(backend)


def registered(model, backend):
    try:
        return backend.runtime(model)
    except ServeError:
        return None


@pytest.mark.parametrize("supervised", [False, True])
async def test_a_step_that_has_not_begun_is_taken_before_its_model_is_registered_again(named, local, supervised):
    model, go_on = named(), threading.Event()
    await model.register(local)
    group = await a_group(model)
    local.runtime(model).worker.submit(go_on.wait, 200)
    step = model.train_sft(group.trajectories) if supervised else local.train(model, [group])
    both = asyncio.gather(step, register_again(model, local))
    await until(lambda: not registered(model, local))
    go_on.set()
    result, _ = await both
    assert result.step == await model.get_step() == 1
    assert [event.step for event in model.store.events() if isinstance(event, CheckpointSaved)] == [1]


async def test_models_that_are_registered_at_once_leave_torch_and_transformers_as_they_were(named, local):
    before = torch.get_default_dtype(), PreTrainedModel.tie_weights
    models = [named(f"number {i}") for i in range(4)]
    await asyncio.gather(*[model.register(local) for model in models])
    assert (torch.get_default_dtype(), PreTrainedModel.tie_weights) == before
    (ids, said), *others = [await greedy(model) for model in models]
    for other in others:
        assert other[0] == ids
        np.testing.assert_allclose(other[1], said, atol=1e-6)


async def test_a_registration_that_is_given_up_leaves_nothing_behind(named, local):
    model, before = named(), threads()
    with LOADING:
        registering = asyncio.create_task(model.register(local))
        await until(lambda: threads() - before)
        registering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await registering
    assert threads() == before
    await model.register(local)
    await ask(model)


class Asked(art.LocalBackend):
    """Whose models are asked while they are registered, as by a rollout that goes on."""

    async def register(self, model):
        if registered(model, self):
            model.openai_client()
        await super().register(model)


async def test_a_client_made_while_a_model_is_registered_again_is_not_kept(named, tmp_path):
    model = named()
    async with Asked(path=tmp_path, verbose=False) as backend:
        for _ in range(2):
            await model.register(backend)
            await ask(model)


async def test_two_models_keep_apart(named, local):
    one, two = named("one"), named("two", lora_config={"rank": 2})
    for model in (one, two):
        await model.register(local)
    await asyncio.gather(*[local.train(m, [await a_group(m)], learning_rate=1e-2) for m in (one, one, two)])
    assert (await one.get_step(), await two.get_step()) == (2, 1)
    for model, steps in ((one, [1, 2]), (two, [1])):
        assert [event.step for event in model.store.events() if isinstance(event, CheckpointSaved)] == steps
        assert {event.run for event in model.store.events() if isinstance(event, CheckpointSaved)} == {model.name}


async def test_a_run_of_another_base_model_is_refused(named, local, tmp_path, tiny_model_dir):
    model = named()
    await model.register(local)
    await local.train(model, [await a_group(model)])
    other = tmp_path / "other"
    other.symlink_to(tiny_model_dir)
    with pytest.raises(StoreError, match="other"):
        await named(base_model=str(other)).register(local)
    (model.store.path / "model.json").unlink()
    with pytest.raises(StoreError, match="was trained from"):
        await named(base_model=str(other)).register(local)


async def test_an_adapter_of_another_shape_is_refused_and_nothing_is_left_behind(named, local):
    model, before = named(), threads()
    await model.register(local)
    await local.train(model, [await a_group(model)], learning_rate=1e-2)
    with pytest.raises(TrainError, match="rank"):
        await named(lora_config={"rank": 4}).register(local)
    assert threads() == before
    with pytest.raises(TrainError, match="has no linear layer named"):
        await named(lora_config={"target_modules": ["nothing"]}).register(local)
    assert threads() == before
    await model.register(local)
    assert await model.get_step() == 1
    await ask(model)


async def test_a_fork_trains_like_its_source(named, local):
    source, fork, early = named("source"), named("fork"), named("early")
    await source.register(local)
    group = await a_group(source)
    for _ in range(3):
        await local.train(source, [group], learning_rate=1e-2)
    await local._experimental_fork_checkpoint(fork, from_model="source", verbose=True)
    await local._experimental_fork_checkpoint(early, from_model="source", not_after_step=1)
    for model, step in ((fork, 3), (early, 1)):
        await model.register(local)
        assert await model.get_step() == step
        assert saved_adapter(model, step) == saved_adapter(source, step)
    for model in (source, fork, early, early, early):
        await local.train(model, [group], learning_rate=1e-2)
    assert saved_adapter(source, 4) == saved_adapter(fork, 4) == saved_adapter(early, 4)
    assert len(checkpoints.lineage(fork.store.checkpoint_dir(3))) == 5  # source 0003 … 0000
    with pytest.raises(StoreError, match="registered already"):
        await local._experimental_fork_checkpoint(fork, from_model="source", not_after_step=3)
    for options in ({"from_model": "nobody"}, {"from_model": "early", "not_after_step": 0}):
        with pytest.raises(StoreError, match="no checkpoint to fork"):
            await local._experimental_fork_checkpoint(named("late"), **options)


async def test_deleted_checkpoints_are_not_served(named, local):
    model = named()
    await model.register(local)
    group = await a_group(model)
    for value in (0.1, 0.9, 0.5, 0.2):
        result = await local.train(model, [group], learning_rate=1e-2)
        await model.log(metrics={"reward": value}, split="val", step=result.step)
    for step in range(4):
        await ask(model, f"ttt@{step}", max_tokens=1)
    await model.delete_checkpoints()
    assert model.store.steps_saved() == [2, 4]
    for step in (2, 4):
        await ask(model, f"ttt@{step}", max_tokens=1)
    for step in (0, 1, 3):
        with pytest.raises(openai.NotFoundError):
            await ask(model, f"ttt@{step}", max_tokens=1)
    await model.register(local)
    assert await model.get_step() == 4


async def test_what_a_killed_process_left_is_swept(named, local):
    model = named()
    await model.register(local)
    await local.train(model, [await a_group(model)], learning_rate=1e-2)
    await local.close()
    folder, dead = model.store.path / "checkpoints", 2**22 + 1
    (folder / f".0002.{dead}.tmp").mkdir()
    (folder / f".0002.{dead}.tmp" / "adapter_model.safetensors").write_bytes(b"half")
    os.replace(folder / "0001", folder / f".0001.{dead}.old")
    (model.store.path / f".state.json.{dead}.01234567.tmp").write_text("{")
    alive = folder / f".0003.{os.getppid()}.tmp"
    alive.mkdir()
    assert model.store.steps_saved() == [0]
    await model.register(local)
    assert await model.get_step() == 1
    assert [p.name for p in model.store.path.rglob(".*")] == [alive.name]


# the end


async def test_closing_leaves_nothing(named, tmp_path):
    model, before = named(), threads()
    backend = art.LocalBackend(path=tmp_path, verbose=False)
    await model.register(backend)
    await local_traffic(model)
    home = backend.runtime(model)
    parts = [home.policy, home.policy.model, home.learner]
    over_vllm = hasattr(home.sampler, "_engine")
    parts += [home.sampler._engine] if over_vllm else [home.sampler._slots.kv, home.sampler._prefixes]
    refs = [weakref.ref(part) for part in parts]
    url, events = model.inference_base_url, len(list(model.store.events()))
    assert listens(url)
    del home, parts
    await backend.close()
    await backend.close()
    assert threads() == before
    assert not listens(url)
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs), "the weights are let go of, though the model's client lives"
    backend.bus.emit(Warned(key="late", message="nobody writes this down"))
    assert len(list(model.store.events())) == events
    for call in (ask(model), backend.train(model, []), backend._get_step(model)):
        with pytest.raises((ServeError, openai.InternalServerError)):
            await call


async def local_traffic(model):
    """Requests in process and over the socket."""
    over_http = openai.AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key)
    await over_http.chat.completions.create(model=model.get_inference_name(), messages=QUESTION, max_tokens=4)
    await over_http.close()
    await ask(model)


async def test_closing_ends_replies_and_training_that_wait(named, tmp_path, monkeypatch):
    model, backend = named(), art.LocalBackend(path=tmp_path, verbose=False)
    await model.register(backend)
    group = await a_group(model)
    home, go_on = backend.runtime(model), threading.Event()
    advance = home.sampler._decode

    def advance_all_six():
        if len(home.sampler._running) == 6:  # no reply advances before all six run
            go_on.wait(200)
            advance()

    monkeypatch.setattr(home.sampler, "_decode", advance_all_six)
    asked = [asyncio.create_task(ask(model, max_tokens=400, extra_body={"ignore_eos": True})) for _ in range(6)]
    await until(lambda: home.sampler.stats()["running"] == 6)
    home.worker.submit(go_on.wait, 200)
    trained = [asyncio.create_task(backend.train(model, [group])) for _ in range(8)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(backend.close())
    await until(lambda: not registered(model, backend))
    go_on.set()
    await asyncio.wait_for(closing, 200)
    said = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 200)
    assert all(isinstance(x, openai.InternalServerError) and x.status_code == 503 for x in said)
    results = await asyncio.wait_for(asyncio.gather(*trained, return_exceptions=True), 200)
    assert all(isinstance(x, (art.LocalTrainResult, ServeError)) for x in results)
    assert any(isinstance(x, ServeError) for x in results)
    done = [x.step for x in results if isinstance(x, art.LocalTrainResult)]
    assert model.store.steps_saved() == [0, *done]


async def test_an_error_inside_async_with_closes_too(named, tmp_path):
    before, model = threads(), named()

    async def work():
        async with art.LocalBackend(path=tmp_path, verbose=False) as backend:
            await model.register(backend)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await work()
    assert threads() == before


async def test_a_prompted_model_can_be_registered_and_logged(local):
    asked = art.Model(name="gpt", project="p", inference_base_url="http://127.0.0.1:9/v1", inference_api_key="k")
    await asked.register(local)
    await asked.log([art.Trajectory(reward=1.0)], split="val")
    assert asked.store.history()[-1]["val/reward"] == 1.0


async def test_an_unregistered_model_is_an_error_that_names_register(named, local):
    for call in (local.train(named(), []), local._get_step(named())):
        with pytest.raises(ServeError, match="register"):
            await call
