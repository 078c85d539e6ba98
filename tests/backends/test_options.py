"""Train calls under ART's names, on a tiny model: what each does to the step."""

from dataclasses import fields

import numpy as np
import pytest
from support.registered import QUESTION, a_group

import art_nb as art
from art_nb.backends.options import RENAMED
from art_nb.core.events import Warned
from art_nb.core.types import StoreError, TrainConfig, TrainError
from art_nb.learners.base import Learner, StepConfig, optimizer_steps
from art_nb.learners.losses import LEVELS, LOSSES, MISMATCH
from art_nb.policy.adapters import copy_adapter
from art_nb.policy.loading import load_policy
from art_nb.policy.packing import WeightedRow
from art_nb.tokens.learner_records import read_record
from art_nb.tokens.rows import group_rows


@pytest.fixture
async def model(local, tiny_model_dir):
    made = art.TrainableModel(name="ttt", project="tests", base_model=str(tiny_model_dir))
    await made.register(local)
    return made


def config_of(model, step):
    return read_record(model.store, step).config


async def test_the_reference_is_where_art_looks_for_it(model, local):
    for step in range(2):
        await local.train(model, [await a_group(model, step)], learning_rate=2e-2)
    group, found = await a_group(model, 9), {}
    path = {"kl_ref_adapter_path": model.store.checkpoint_dir(1)}
    calls = {
        "base": {},
        "now": {"kl_penalty_step_lag": 0},
        "step": {"kl_penalty_reference_step": 1},
        "path": path,
        "all": path | {"kl_penalty_reference_step": 0},
    }
    for name, call in calls.items():
        told = await local.train(model, [group], learning_rate=0.0, kl_penalty_coef=0.1, **call)
        found[name] = told.metrics["loss/kl_policy_ref"]
    assert found["now"] == pytest.approx(0, abs=1e-6)
    assert found["step"] == found["path"] == found["all"]
    assert abs(found["base"]) > abs(found["step"]) > 1e-4
    last = await model.get_step()
    lagging = await local.train(model, [group], learning_rate=0.0, kl_penalty_coef=0.1, kl_penalty_step_lag=last - 1)
    assert lagging.metrics["loss/kl_policy_ref"] == found["step"]
    with pytest.raises(StoreError, match="no checkpoint of step 77"):
        await local.train(model, [group], kl_penalty_coef=0.1, kl_penalty_reference_step=77)
    assert await model.get_step() == last + 1


async def test_a_sequence_a_step(model, local):
    group = await a_group(model)
    told = await local.train(
        model,
        [group],
        learning_rate=1e-2,
        grad_accumulation_sequences=2,
        reduction="art",
        num_trajectories_learning_rate_multiplier_power=1.0,
    )
    assert told.metrics["data/step_num_gradient_steps"] == 2  # four of six rewards are not the mean
    assert told.metrics["loss/learning_rate"] == pytest.approx(2e-2)
    record = read_record(model.store, 1)
    assert len(record.size_R) == 4
    at_once = await local.train(model, [group], learning_rate=0.0)
    tokens = "data/step_trainable_assistant_tokens"
    assert told.metrics[tokens] == at_once.metrics[tokens]


async def test_ratios_to_the_learner_of_before(model, local):
    group = await a_group(model)
    await local.train(model, [group], learning_rate=2e-2)
    stale = await local.train(model, [group], learning_rate=0.0)
    own = await local.train(
        model, [group], learning_rate=0.0, precalculate_logprobs=True, truncated_importance_sampling=0.5
    )  # cuts every ratio
    assert abs(stale.metrics["loss/importance_ratio_mean"] - 1) > 1e-3
    assert own.metrics["loss/importance_ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert own.metrics["loss/train"] != pytest.approx(stale.metrics["loss/train"])
    assert config_of(model, 3)["mismatch_options"] == {"is_max": 0.5}


async def test_what_art_may_refuse(model, local):
    heard = []
    local.bus.subscribe(lambda event: heard.append(event.message), Warned)
    for name in ("loss_fn_config", "adam_params"):
        with pytest.raises(TrainError, match=name):
            await local.train(model, [], **{name: {}})
    group = await a_group(model)
    for choice in (entry for t in group for entry in t.messages_and_choices[1:]):
        choice.logprobs, choice.token_logprobs = None, None
    told = await local.train(model, [group], allow_training_without_logprobs=False)
    assert (told.step, told.metrics["data/step_num_gradient_steps"]) == (1, 0)
    assert "no logprobs" in heard[-1]
    told = await local.train(model, [group], allow_training_without_logprobs=True)
    assert told.metrics["data/step_num_gradient_steps"] == 1
    assert told.metrics["offpolicy/unknown_logprobs"] == 1


async def test_rows_that_are_too_long_are_left_out_and_that_is_said(model, local):
    heard, group = [], await a_group(model)
    local.bus.subscribe(lambda event: heard.append(event.message), Warned)
    lengths = sorted(len(row.tokens) for row in group_rows(group))
    group.trajectories.append(
        art.Trajectory(
            messages_and_choices=[
                *QUESTION,
                (await a_group(model, 5, 1, max_tokens=40)).trajectories[0].messages_and_choices[1],
            ],
            reward=5.0,
        )
    )
    told = await local.train(model, [group], packed_sequence_length=lengths[-1])
    assert "1 rows of more than" in " ".join(heard)
    assert told.metrics["data/step_num_gradient_steps"] == 1
    told = await local.train(model, [group], packed_sequence_length=3)
    assert told.metrics["data/step_num_gradient_steps"] == 0
    assert "too long" in heard[-1]


async def test_the_older_spelling_reaches_the_loss(model):
    group = await a_group(model)
    await model.train(
        [group],
        config=TrainConfig(learning_rate=1e-3, beta=0.2),
        _config={
            "ppo": True,
            "epsilon": 0.3,
            "importance_sampling_level": "sequence",
            "logprob_calculation_chunk_size": 8,
        },
    )
    found = config_of(model, 1)
    assert (found["loss"], found["kl_coef"], found["kl_shaping"]) == ("ppo", 0.2, 0.0)
    assert found["loss_options"] == {"eps_low": 0.3, "eps_high": 0.3, "level": "sequence"}


async def test_our_names_count_as_arts_do(model, local):
    group, said = await a_group(model), []
    local.bus.subscribe(said.append, Warned)
    await local.train(model, [group], rescored=True, truncated_importance_sampling=2.0)
    found = config_of(model, 1)
    assert (found["rescored"], found["mismatch"], found["mismatch_options"]) == (True, "tis", {"is_max": 2.0})
    await local.train(model, [group], ppo=True, loss="cispo", epsilon=0.2)
    found = config_of(model, 2)
    assert (found["loss"], found["loss_options"]) == ("cispo", {"is_min": 0.8, "is_max": 5.0})
    with pytest.raises(TrainError, match="Invalid `loss_fn='gspo'`: ART has cispo and ppo"):
        await local.train(model, [group], ppo=True, loss="gspo", epsilon=0.2)
    assert said == []


EXPERIMENTAL = art.dev.TrainConfig(
    advantage_balance=0.25,
    allow_training_without_logprobs=False,
    epsilon=0.3,
    epsilon_high=0.4,
    importance_sampling_level="average",
    kimi_k2_tau=0.1,
    kl_penalty_coef=0.05,
    kl_penalty_reference_step=0,
    kl_penalty_source="sample",
    kl_penalty_step_lag=1,
    kl_ref_adapter_path=None,
    logprob_calculation_chunk_size=8,
    mask_prob_ratio=True,
    max_negative_advantage_importance_sampling_weight=2.0,
    moe_routing_replay_bundle=None,
    moe_routing_replay_path=None,
    moe_routing_replay_strict=False,
    num_trajectories_learning_rate_multiplier_power=0.5,
    packed_sequence_length=256,
    plot_tensors=False,
    ppo=True,
    precalculate_logprobs=True,
    scale_learning_rate_by_reward_std_dev=False,
    scale_rewards=False,
    truncated_importance_sampling=2.0,
)
ARRIVED = {
    "learning_rate": 5e-6,
    "balance": 0.25,
    "allow_missing_logprobs": False,
    "kl_shaping": 0.05,
    "kl_source": "sample",
    "row_power": 0.5,
    "max_length": 256,
    "loss": "ppo",
    "rescored": True,
    "mismatch": "tis",
    "mismatch_options": {"is_max": 2.0},
    "scale": "none",
    "loss_options": {
        "eps_low": 0.3,
        "eps_high": 0.4,
        "level": "average",
        "mask_prob_ratio": True,
        "kimi_k2_tau": 0.1,
        "max_negative_advantage_importance_sampling_weight": 2.0,
    },
}


async def test_every_field_of_arts_configurations_arrives(model, local):
    said, group = [], await a_group(model)
    local.bus.subscribe(said.append, Warned)
    config = TrainConfig(
        learning_rate=1e-3,
        kl_penalty_coef=0.1,
        kl_penalty_source="sample",
        grad_accumulation_sequences=2,
        optimizer_save_interval=2,
        final_training_step=9,
    )
    assert config.model_fields_set == TrainConfig.model_fields.keys() - {"beta"}
    assert EXPERIMENTAL.keys() == art.dev.TrainConfig.__annotations__.keys()
    await model.train([group], config=config)
    found = config_of(model, 1)
    assert [found[name] for name in ("learning_rate", "kl_shaping", "kl_source", "rows_per_step")] == [
        1e-3,
        0.1,
        "sample",
        2,
    ]
    await model.train([group], _config=EXPERIMENTAL)
    found = config_of(model, 2)
    wanted = ARRIVED | {"kl_reference": str(model.store.checkpoint_dir(0))}
    assert {name: found[name] for name in wanted} == wanted
    assert said == []


async def test_each_option_of_a_call_moves_the_loss(model, local):
    group, band, found = await a_group(model), {"epsilon": 0.01, "epsilon_high": 0.01}, {}
    await local.train(model, [group], learning_rate=2e-2)  # the ratios are no longer 1
    calls = {
        "plain": {},
        "centred": {"scale_rewards": False},
        "tau": {"kimi_k2_tau": 0.5},
        "capped": {"max_negative_advantage_importance_sampling_weight": 0.5},
        "band": band,
        "masked": band | {"mask_prob_ratio": True},
    }
    for name, call in calls.items():
        found[name] = (await local.train(model, [group], learning_rate=0.0, **call)).metrics["loss/train"]
    assert found["centred"] == pytest.approx(found["plain"] * np.std([t.reward for t in group]), rel=1e-3)
    assert len({round(loss, 4) for loss in found.values()}) == len(calls)
    again = await local.train(model, [group], learning_rate=0.0, normalize_advantages=False)
    assert again.metrics["loss/train"] == pytest.approx(found["centred"])


async def test_what_does_nothing_here_changes_nothing_and_says_so(model, local):
    said, group = [], await a_group(model)
    local.bus.subscribe(lambda event: said.append(event.message), Warned)
    needless = {"optimizer_save_interval": 1, "final_training_step": 3, "moe_routing_replay_strict": False}
    noted = {
        "moe_routing_replay_bundle": {"layers": 1},
        "moe_routing_replay_path": "routes",
        "scale_learning_rate_by_reward_std_dev": True,
    }
    plain = await local.train(model, [group], learning_rate=0.0)
    for _ in range(2):
        told = await local.train(model, [group], learning_rate=0.0, **needless, **noted)
        assert told.metrics["loss/train"] == plain.metrics["loss/train"]
    assert config_of(model, 3) == config_of(model, 2) == config_of(model, 1)
    assert [name in message for name, message in zip(noted, said, strict=True)] == [True] * 3


def some_rows(count=4):
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        tokens = rng.integers(3, 200, 12).astype(np.int32)
        made.append(
            WeightedRow(tokens, np.arange(12) >= 6, np.full(12, -5.0, np.float32), i, 1.0 - 2 * (i % 2), 1 / 24)
        )
    return made


def test_a_failure_in_the_third_step_takes_back_the_first_two(tiny_model_dir):
    policy = load_policy(tiny_model_dir, device="cpu")
    learner, done = Learner(policy), []

    class Enough(Exception):
        pass

    def on_progress(i, n, tokens):
        done.append(i)
        if len(done) == 3:
            raise Enough

    rows, config = some_rows(), StepConfig(learning_rate=1e-2, rows_per_step=1)
    optimizer_steps(learner, rows, config)
    before, state = copy_adapter(policy), {name: t.clone() for name, t in learner.state().items()}
    with pytest.raises(Enough):
        optimizer_steps(learner, rows, config, on_progress)
    assert all((before[name] == t).all() for name, t in copy_adapter(policy).items())
    assert all((state[name] == t).all() for name, t in learner.state().items() if name != "rng")
    assert learner.steps == 4
    optimizer_steps(learner, rows, config)
    assert learner.steps == 8


@pytest.mark.parametrize(
    ("beginning", "names"),
    [
        ("|", [field.name for field in fields(StepConfig)]),
        ("|", RENAMED),
        ("| `", LOSSES),
        ("| `mismatch`", MISMATCH),
        ("All losses except", LEVELS),
    ],
    ids=["options", "ART", "losses", "mismatch", "levels"],
)
def test_every_name_stands_in_the_tables_of_options(root, beginning, names):
    lines = (root / "docs" / "options.md").read_text(encoding="utf-8").splitlines()
    there = "".join(line for line in lines if line.startswith(beginning))
    assert [name for name in names if f"`{name}`" not in there and f'`"{name}"`' not in there] == []
