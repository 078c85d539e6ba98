"""The replay of a step is what the trainer computed: its terms, losses and gradients against the learner's own path."""

import math

import numpy as np
import pytest
import torch

import art_nb as art
from art_nb.learners.base import (
    Learner,
    StepConfig,
    by_row,
    config_to_json,
    mean_logprob_drift,
    optimizer_steps,
    rescore_rows,
    step_rows,
    train_rows,
)
from art_nb.learners.losses import LOSSES, MISMATCH, join, ppo, shaped_advantages, total_loss
from art_nb.policy.loading import load_policy
from art_nb.policy.packing import micro_batches
from art_nb.rollouts.trajectories import choices
from art_nb.runs.store import RunStore
from art_nb.tokens.advantages import weigh_rows
from art_nb.tokens.chat import CHAT_FORMATS
from art_nb.tokens.learner_records import make_record, read_record, record_path, row_spans, turn_spans, write_record
from art_nb.tokens.rows import TokenRow, group_rows
from art_nb.views.index import load_all
from art_nb.views.token_objective import objective_reply, objective_tokens_reply, replay_as_trained, terms_of
from art_nb.views.token_values import tokens_reply

NEAR = {"rtol": 0, "atol": 1e-6}


@pytest.fixture(scope="module")
def policy(tiny_model_dir):
    """A policy whose adapter is no longer that of the start."""
    policy = load_policy(tiny_model_dir, device="cpu", dtype=torch.float32)
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in policy.layers.values():
            layer.B.add_(0.05 * torch.randn(layer.B.shape, generator=rng))
    policy.cast_masters()
    return policy


def random_rows(rng, trajectory, prompt, count=2):
    """Rows of one trajectory, sampled by somebody a little different."""
    for _ in range(count):
        tokens = np.concatenate([prompt, rng.integers(3, 250, rng.integers(4, 12))]).astype(np.int32)
        sampled = np.arange(len(tokens)) >= len(prompt)
        logprobs = np.where(sampled, -rng.uniform(3, 8, len(tokens)), np.nan).astype(np.float32)
        logprobs[sampled] = np.where(rng.random(sampled.sum()) < 0.1, np.nan, logprobs[sampled])
        yield TokenRow(tokens, sampled, logprobs, trajectory, False)


def a_step(seed=0, groups=3, size=4):
    """Rewards and rows of a step; one group has no variance."""
    rng = np.random.default_rng(seed)
    rewards = [rng.normal(size=size) if g else np.ones(size) for g in range(groups)]
    prompts = [rng.integers(3, 250, 6) for _ in range(groups)]
    rows = [[row for i in range(size) for row in random_rows(rng, i, prompts[g], 1 + i % 2)] for g in range(groups)]
    return rewards, rows


def by_the_learner(learner, training, config):
    """Loss, and for each row the gradient by its tokens' logprobs, as `Learner.step` goes about it."""
    batches = micro_batches(training, config.tokens_per_batch, config.share_prefixes)
    wants = config.kl_coef or config.kl_shaping
    references = learner.reference(batches, config.temperature) if wants else [None] * len(batches)
    own = learner.scored(batches, config.temperature)
    mean = mean_logprob_drift(batches, references, own, config.kl_source) if config.kl_shaping else 0.0
    loss, gradients = 0.0, {}
    for batch, reference in zip(batches, references, strict=True):
        t = learner.tensors(batch, config.temperature, reference)
        if config.kl_shaping:
            t.advantages_E = shaped_advantages(t, config.kl_shaping, config.kl_source, mean)
        total = total_loss(
            t,
            batch.coef_E,
            config.loss,
            mismatch=config.mismatch,
            kl_coef=config.kl_coef,
            mismatch_options=config.mismatch_options,
            entropy_coef=config.entropy_coef,
            **config.loss_options,
        )
        (gradient,) = torch.autograd.grad(total, t.logprobs_E)
        loss += total.item()
        for i, row in enumerate(batch.rows):
            gradients[id(row.tokens)] = gradient[t.row_E == i].numpy()
    return loss, gradients


CONFIGS = {
    "cispo": {},
    "cut": {"loss_options": {"is_max": 1.0}},
    "ppo": {"loss": "ppo", "reduction": "sequence"},
    "dapo": {"loss": "dapo"},
    "dr_grpo": {"loss": "dr_grpo", "reduction": "constant", "max_tokens": 32, "scale": "none"},
    "gspo": {"loss": "gspo", "reduction": "sequence"},
    "art": {"reduction": "art"},
    "dppo": {"loss": "dppo"},
    "mismatch": {"mismatch": "tis", "mismatch_options": {"is_max": 1.1}},
    "kl": {"kl_coef": 0.1},
    "shaping": {"kl_shaping": 0.1},
    "source": {"kl_shaping": 0.1, "kl_source": "sample"},
    "bonus": {"entropy_coef": 0.01},
    "level": {"loss": "ppo", "loss_options": {"level": "sequence", "eps_low": 0.1}},
    "balance": {"balance": 0.5},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_replay_is_what_the_learner_did(policy, name):
    config = StepConfig(learning_rate=0.0, tokens_per_batch=64, **CONFIGS[name])
    rewards, rows = a_step()
    training, learner = train_rows(rewards, rows, config), Learner(policy)
    training = rescore_rows(learner, training, config) if config.rescored else training
    loss, gradients = by_the_learner(learner, training, config)
    metrics = learner.step(training, config)
    assert metrics["loss/train"] == pytest.approx(loss, abs=1e-6)
    record = make_record(learner.seen, rows, config_to_json(config), step_rows(rewards, rows, config))
    replay = replay_as_trained(record)
    assert float(replay.loss_E.sum()) == pytest.approx(metrics["loss/train"], abs=1e-6)
    assert len(record.size_R) == len(training) == len(gradients)
    for g, own in enumerate(rows):
        for row, span in zip(own, row_spans(record, g, own), strict=True):
            assert (span is None) == (id(row.tokens) not in gradients)
            if span is not None:
                np.testing.assert_allclose(replay.gradient_E[span].numpy(), gradients[id(row.tokens)], **NEAR)
                sampler_E = record.sampler_E if config.rescored else record.old_E
                np.testing.assert_array_equal(sampler_E[span], row.logprobs[row.sampled])


def test_what_a_row_saw_is_split_rightly(policy):
    rewards, rows = a_step(seed=3)
    config, learner = StepConfig(), Learner(policy)
    batches = micro_batches(train_rows(rewards, rows, config), 64)
    for batch in batches:
        with torch.no_grad():
            t = join([learner.tensors(batch, 1.0)])
        for i, (row, mine) in enumerate(by_row(batch, t)):
            assert row is batch.rows[i]
            assert torch.equal(mine.logprobs_E, t.logprobs_E[t.row_E == i])
            assert mine.reference_E is None


def test_a_loss_of_ones_own_is_named_and_not_replayed(policy):
    def mine(t):
        return -t.advantages_E * t.logprobs_E

    rewards, rows = a_step()
    for own in (
        {"loss": mine},
        {"mismatch": lambda t: torch.ones_like(t.old_E)},
        {"loss": "ppo", "loss_options": {"level": lambda log_E, row_E: log_E.exp()}},
    ):
        config, learner = StepConfig(learning_rate=0.0, **own), Learner(policy)
        learner.step(train_rows(rewards, rows, config), config)
        record = make_record(learner.seen, rows, config_to_json(config))
        with pytest.raises(art.TrainError, match="its name, not its code"):
            replay_as_trained(record)
    assert config_to_json(StepConfig(loss=ppo))["loss"] == "ppo"


def test_a_rescored_step_is_replayed_with_its_mismatch_options(policy):
    rewards, rows = a_step()
    for options in ({"mismatch": "none"}, {"mismatch": "tis", "mismatch_options": {"is_max": 1.1}}):
        config, learner = StepConfig(learning_rate=0.0, rescored=True, **options), Learner(policy)
        told = optimizer_steps(learner, train_rows(rewards, rows, config), config)
        record = make_record(learner.seen, rows, config_to_json(config))
        replay = replay_as_trained(record)
        assert float(replay.loss_E.sum()) == pytest.approx(told["loss/train"], abs=1e-6)
        np.testing.assert_allclose(record.old_E, record.new_E, atol=1e-6)
        highest = max(
            term["value"]
            for e in range(len(record.old_E))
            for term in terms_of(replay, e)
            if term["name"] == "mismatch correction"
        )
        assert highest == pytest.approx(1.1 if "mismatch_options" in options else 1.0)


def test_an_old_record_without_the_samplers_logprobs_is_not_replayed(policy):
    rewards, rows = a_step()
    config, learner = StepConfig(learning_rate=0.0, mismatch="tis"), Learner(policy)
    optimizer_steps(learner, train_rows(rewards, rows, config), config)
    record = make_record(learner.seen, rows, config_to_json(config))
    record.sampler_E = np.zeros(0, "f4")
    with pytest.raises(art.TrainError, match="the learner's logprobs, not the sampler's"):
        replay_as_trained(record)


async def trained(directory, path, steps=2, **options):
    """A model trained for some steps by a backend, and the groups of the last one."""
    model = art.TrainableModel(name="tiny", project="tests", base_model=str(directory))
    async with art.LocalBackend(path=path, verbose=False) as backend:
        await model.register(backend)
        for step in range(steps):
            groups = [await a_group(model, 10 * step + g) for g in range(2)]
            result = await backend.train(model, groups, learning_rate=3e-2, **options)
            await model.log(groups, metrics=result.metrics, step=result.step, split="train")
    return model, groups, result


async def a_group(model, seed, **asked):
    """Replies to one question; the rewards hang on their length."""
    asked = {"logprobs": True} | asked
    ask = [{"role": "user", "content": f"free: A{seed}"}]
    client, made = model.openai_client(), []
    for i in range(4):
        reply = await client.chat.completions.create(
            model=model.get_inference_name(), messages=ask, max_tokens=4 + i, seed=seed * 100 + i, **asked
        )
        made.append(art.Trajectory(messages_and_choices=[*ask, reply.choices[0]], reward=float(i % 3)))
    return art.TrajectoryGroup(made, metadata={"scenario_id": f"s{seed}"})


async def test_the_record_of_a_real_step(tiny_model_dir, tmp_path):
    model, groups, result = await trained(tiny_model_dir, tmp_path, loss_fn="ppo", reduction="sequence")
    index = load_all(model)
    assert record_path(model.store, result.step).exists()
    total = 0.0
    for row in range(len(index.table[index.table["step"] == result.step])):
        told, buffers = objective_tokens_reply(index, row, 0)
        assert told["recorded"]
        assert told["losses"][0] == "ppo"
        assert np.frombuffer(buffers[0], "<f4").any() == (index.table["advantage"][row] != 0)
    told, _ = objective_reply(index, 0, 0, 0)
    first = told["losses"][0]
    assert first["trainer"]
    assert first["step_loss"] == pytest.approx(result.metrics["loss/train"], abs=1e-6)
    total = sum(objective_reply(index, row, 0, 0)[0]["losses"][0]["group_loss"] for row in (0, 4))
    assert total == pytest.approx(result.metrics["loss/train"], abs=1e-6)


async def test_the_channels_of_a_real_step(tiny_model_dir, tmp_path):
    model, groups, result = await trained(tiny_model_dir, tmp_path)
    index = load_all(model)
    seen = 0
    for row in range(8):
        told, (offsets, *halves) = tokens_reply(index, row, 0)
        values = dict(zip(told["channels"], (np.frombuffer(half, "<f2") for half in halves), strict=True))
        choice = choices(groups[row // 4].trajectories[row % 4])[0]
        sampled = [entry.logprob for entry in choice.logprobs.content]
        np.testing.assert_allclose(values["logprob"], sampled, rtol=2e-3, atol=1e-3)
        assert len(np.frombuffer(offsets, "<u4")) == told["n"] + 1
        if index.table["advantage"][row]:
            seen += 1
            assert told["mask_why"] is None
            assert values["mask"].all()
            assert abs(values["ratio"] - 1).max() < 0.2  # the sampler and the learner are the same model here
            assert (values["entropy"] > 0).all()
        else:
            assert not values["mask"].any()
            assert "ratio" in told["why"]
            assert "entropy" in told["why"]
            assert "advantage is 0" in told["mask_why"]
    assert seen > 2


async def test_the_ratio_is_the_learners_over_the_samplers(tiny_model_dir, tmp_path):
    model, _, result = await trained(tiny_model_dir, tmp_path, steps=1)
    record = read_record(model.store, result.step)
    record.new_E = record.old_E - np.float32(0.5)
    write_record(model.store, result.step, record)
    index = load_all(model)
    row = int(np.flatnonzero(index.table["advantage"])[0])
    told, (_, *halves) = tokens_reply(index, row, 0)
    ratios = halves[told["channels"].index("ratio")]
    np.testing.assert_allclose(np.frombuffer(ratios, "<f2"), np.exp(-0.5), rtol=1e-3)
    terms = {term["name"]: term["value"] for term in objective_reply(index, row, 0, 0)[0]["losses"][0]["terms"]}
    assert terms["ratio"] == pytest.approx(np.exp(-0.5), rel=1e-5)
    clipped = objective_reply(index, row, 0, 0, ["ppo"])[0]["losses"]
    cut = {term["name"]: term["value"] for term in clipped[1]["terms"]}["clipped"]
    assert cut == float(index.table["advantage"][row] < 0)  # 0.61 is below 0.8
    assert (clipped[1]["gradient"] == 0) == bool(cut)


async def test_terms_multiply_to_the_loss(tiny_model_dir, tmp_path):
    model, _, _ = await trained(tiny_model_dir, tmp_path, steps=1)
    index = load_all(model)
    row = int(np.flatnonzero(index.table["advantage"])[0])
    told, _ = objective_reply(index, row, 0, 1, list(LOSSES))
    assert [one["name"] for one in told["losses"]] == list(LOSSES)
    for one in told["losses"]:
        value = {term["name"]: term["value"] for term in one["terms"]}
        product = value["policy term"] * value["mismatch correction"] * value["coefficient"]
        assert product == pytest.approx(one["loss"], abs=1e-6), one["name"]
        assert value["ratio"] == pytest.approx(math.exp(value["log ratio"]), rel=1e-4) or one["name"] == "gspo"


def test_other_losses_take_their_own_weights(policy):
    rewards, rows = a_step(seed=5)
    config, learner = StepConfig(learning_rate=0.0), Learner(policy)
    learner.step(train_rows(rewards, rows, config), config)
    record = make_record(learner.seen, rows, config_to_json(config), step_rows(rewards, rows, config))
    from art_nb.views.token_objective import StepContext, replay_with

    stage = StepContext(record, 1, [np.asarray(r) for r in rewards], True, None)
    sizes = [sum(int(row.sampled.sum()) for row in own if row.trajectory == i) for own in rows[1:] for i in range(4)]
    cases = ("ppo", "sequence", "group"), ("dr_grpo", "constant", "none"), ("dapo", "token", "group")
    for name, reduction, scale in cases:
        replay, longest = replay_with(stage, name), max(sizes)
        weighed = weigh_rows(rewards, rows, scale=scale, reduction=reduction, max_tokens=longest)
        mine = {
            id(row.tokens): (coef, a)
            for row, coef, a in zip(weighed.rows, weighed.coef_R, weighed.advantages_R, strict=True)
        }
        for g, own in enumerate(rows):
            for row, span in zip(own, row_spans(record, g, own), strict=True):
                if span is not None:
                    coef, advantage = mine[id(row.tokens)]
                    np.testing.assert_allclose(replay.coef_E[span], coef, rtol=1e-6)
                    np.testing.assert_allclose(replay.t.advantages_E[span], advantage, rtol=1e-5)


async def test_a_record_of_other_rollouts_is_not_laid_over(tiny_model_dir, tmp_path):
    model, groups, result = await trained(tiny_model_dir, tmp_path, steps=1)
    store = RunStore(model.store.path)
    store.write_groups("train", result.step, groups[::-1])
    index = load_all(store)
    told, _ = objective_reply(index, 0, 0, 0)
    assert told["recorded"] is False
    assert "ratio is 1" in told["assumed"]
    told, _ = tokens_reply(index, 0, 0)
    assert "ratio" in told["why"]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"x" * 100])
def test_a_torn_record_is_none(tmp_path, content):
    store = RunStore(tmp_path)
    path = record_path(store, 1)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert read_record(store, 1) is None


async def test_training_continues_if_no_record_can_be_written(tiny_model_dir, tmp_path):
    from art_nb.core.events import Warned

    model = art.TrainableModel(name="tiny", project="tests", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path=tmp_path, verbose=False) as backend:
        warned = []
        backend.bus.subscribe(warned.append, Warned)
        await model.register(backend)
        group = await a_group(model, 1)
        record_path(model.store, 1).mkdir(parents=True)
        result = await backend.train(model, [group])
        assert result.step == 1
        assert any("record 1" in event.key for event in warned)


def test_twins_have_no_tokens_of_their_own():
    def say(prompt, ids):
        data = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "x"}}
        return art.trajectories.Choice.model_validate(data | {"prompt_token_ids": prompt, "token_ids": ids})

    twin = say([1], [2, 3])
    one = art.Trajectory(
        messages_and_choices=[twin, say([1, 2, 3, 4], [5])],
        additional_histories=[art.History(messages_and_choices=[twin, say([9], [8, 7])])],
    )
    spans = turn_spans(one)
    assert [len(range(10)[span]) for span in spans.values()] == [2, 1, 0, 2]
    rows = group_rows(art.TrajectoryGroup([one]))
    tokens = np.concatenate([row.tokens[row.sampled] for row in rows])
    assert [tokens[span].tolist() for span in spans.values()] == [[2, 3], [5], [], [8, 7]]


def test_every_loss_and_correction_can_be_looked_at():
    from art_nb.views.token_objective import LOSS_SETUPS

    assert set(LOSS_SETUPS) == set(LOSSES)
    assert set(MISMATCH) > {"none", "tis"}


def read_tokens(rows, row):
    """The texts and the channels of the first answer of a row."""
    told, (offsets, *halves) = tokens_reply(rows, row, 0)
    ends, units = np.frombuffer(offsets, "<u4").tolist(), told["text"].encode("utf-16-le")
    texts = [units[2 * a : 2 * b].decode("utf-16-le") for a, b in zip(ends, ends[1:], strict=False)]
    return texts, {name: np.frombuffer(half, "<f2") for name, half in zip(told["channels"], halves, strict=True)}


async def test_tokens_have_texts_and_logprobs_that_no_request_asked_for(tiny_model_dir, tmp_path):
    model = art.TrainableModel(name="tiny", project="tests", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path=tmp_path, verbose=False) as backend:
        await model.register(backend)
        groups = [await a_group(model, g, logprobs=None) for g in range(2)]
        in_memory = read_tokens(load_all(groups[0]), 3)  # a list of groups: no run directory says the base model
        await backend.train(model, groups, learning_rate=3e-2)
        await model.log(groups, step=1, split="train")
    del model, backend
    CHAT_FORMATS.clear()  # as in another process
    index = load_all(str(next(tmp_path.rglob("model.json")).parent))
    from_disk, choice = read_tokens(index, 3), groups[0].trajectories[3].messages_and_choices[1]
    for texts, values in (in_memory, from_disk):
        assert len(texts) == len(choice.token_ids)
        assert choice.message.content in "".join(texts)
        np.testing.assert_allclose(values["logprob"], choice.token_logprobs, atol=2e-3)
    assert from_disk[1]["ratio"].shape == from_disk[1]["logprob"].shape
    told, _ = objective_reply(index, 3, 0, 1)
    assert told["text"] == from_disk[0][1]
