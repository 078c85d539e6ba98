"""Our rows, weights and losses beside those of openpipe-art itself (`make test-art`)."""

import json
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("art") is None:  # not imported here: it patches transformers
    pytest.skip("openpipe-art is not in this environment: make test-art", allow_module_level=True)

import torch
from support.art_parts import as_ours, ask_art, some_groups, told_groups

from art_nb.backends.options import step_config
from art_nb.core.events import Bus
from art_nb.learners.base import StepConfig, train_rows
from art_nb.learners.losses import TokenTensors, shaped_advantages, total_loss
from art_nb.models.tiny import tiny_tokenizer
from art_nb.runs.store import RunStore
from art_nb.tokens.rows import group_rows

LEVELS = ("token", "sequence", "average", "geometric_average")
BAND = {"epsilon": 0.3, "epsilon_high": 0.5}
CAP = {"max_negative_advantage_importance_sampling_weight": 1.2}
OWN = {"precalculate_logprobs": True}
CALLS = [
    {},
    {"epsilon": 0.3},
    BAND,
    *({"importance_sampling_level": level, **BAND} for level in LEVELS),
    CAP,
    {"mask_prob_ratio": True, **BAND},
    {"kimi_k2_tau": 0.2},
    {"kl_penalty_coef": 0.3},
    {"kl_penalty_coef": 0.3, "kl_penalty_source": "sample"},
    OWN,
    OWN | {"truncated_importance_sampling": 1.1},
    {
        "importance_sampling_level": "average",
        "mask_prob_ratio": True,
        "kimi_k2_tau": 0.1,
        "kl_penalty_coef": 0.1,
        **CAP,
        **BAND,
        **OWN,
        "truncated_importance_sampling": 1.5,
    },
]
CALLS = [{"loss_fn": loss} | call for loss in ("cispo", "ppo") for call in CALLS]
SETTINGS = [(True, 0.0), (False, 0.0), (True, 0.4), (True, -0.4)]
RENAMED = {"precalculate_logprobs": "precalculated"}


def for_art(call):
    """A train call as `art.loss.loss_fn` takes it."""
    case = {RENAMED.get(name, name): value for name, value in call.items()}
    ppo, source = case.pop("loss_fn") == "ppo", case.pop("kl_penalty_source", "")
    return case | {"ppo": ppo} | ({"kl_of_sample": True} if source == "sample" else {})


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """ART's numbers for every setting and call, and the groups they were computed from."""
    folder, tokenizer = tmp_path_factory.mktemp("parity"), tiny_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    groups = some_groups(tokenizer)
    told_groups(folder, groups)
    cases = [(scale, balance, [for_art(call) for call in CALLS]) for scale, balance in SETTINGS]
    (folder / "cases.json").write_text(json.dumps(cases))
    ask_art("parity", folder)
    found = [dict(np.load(folder / f"case{i}.npz")) for i in range(len(SETTINGS))]
    return as_ours(groups), found, RunStore(folder / "run")


def our_config(store, call, setting=0):
    scale, balance = SETTINGS[setting]
    asked = {"reduction": "art", "scale_rewards": scale, "advantage_balance": balance}
    return step_config(call | asked, Bus(), store, 0)


def our_rows(groups, config):
    """Training rows of ours by their tokens."""
    rows = train_rows([[t.reward for t in group] for group in groups], [group_rows(group) for group in groups], config)
    return {tuple(row.tokens.tolist()): row for row in rows}


def matched(theirs, rows):
    """For each of ART's rows our row, and where its trained tokens stand."""
    for i, mask in enumerate(theirs["assistant_mask"]):
        end = int(np.flatnonzero(mask)[-1]) + 1
        yield i, rows[tuple(theirs["tokens"][i][:end].tolist())], np.flatnonzero(mask)


@pytest.mark.parametrize("setting", range(len(SETTINGS)), ids=str)
def test_rows_advantages_and_weights_are_arts(asked, setting):
    groups, found, store = asked
    theirs, rows = found[setting], our_rows(groups, our_config(store, {}, setting))
    total, pairs = theirs["assistant_mask"].sum(), [*matched(theirs, rows)]
    assert len(pairs) == len(rows) > 10
    for i, row, at in pairs:
        assert np.flatnonzero(row.sampled).tolist() == at.tolist()
        np.testing.assert_allclose(row.logprobs[at], theirs["logprobs"][i][at], rtol=1e-6)
        np.testing.assert_allclose(theirs["advantages"][i][at], row.advantage, rtol=1e-5)
        np.testing.assert_allclose(theirs["weights"][i][at], row.coef * total, rtol=1e-5)
    assert any(np.isnan(row.logprobs[at]).any() for _, row, at in pairs)


def tensors(theirs, rows, rescored):
    """What our loss sees where ART's saw `theirs`, with a place in ART's tensors for each token."""
    parts = [(i, row, at - 1) for i, row, at in matched(theirs, rows)]
    pick = lambda name: np.concatenate([theirs[name][i][at] for i, _, at in parts])
    new = torch.tensor(pick("new"), requires_grad=True)
    sampler = torch.tensor(np.concatenate([row.logprobs[at + 1] for _, row, at in parts]), dtype=torch.float64)
    own = torch.where(sampler.isnan(), new.detach(), torch.tensor(pick("learner")))
    sizes = [len(at) for _, _, at in parts]
    each = lambda value: torch.tensor(np.repeat([value(row) for _, row, _ in parts], sizes), dtype=torch.float64)
    t = TokenTensors(
        logprobs_E=new,
        old_E=own if rescored else sampler,
        advantages_E=each(lambda row: row.advantage),
        row_E=torch.tensor(np.repeat(np.arange(len(parts)), sizes)),
        reference_E=torch.tensor(pick("reference")),
        sampler_E=sampler if rescored else None,
    )
    return t, each(lambda row: row.coef), [(i, at) for i, _, at in parts]


@pytest.mark.parametrize("call", range(len(CALLS)), ids=lambda i: " ".join(f"{k}={v}" for k, v in CALLS[i].items()))
@pytest.mark.parametrize("setting", [0, 2], ids=str)
def test_losses_are_arts(asked, call, setting):
    groups, found, store = asked
    theirs, config = found[setting], our_config(store, CALLS[call], setting)
    t, coef_E, places = tensors(theirs, our_rows(groups, config), config.rescored)
    if config.kl_shaping:
        t.advantages_E = shaped_advantages(t, config.kl_shaping, config.kl_source)
    ours = total_loss(
        t,
        coef_E,
        config.loss,
        mismatch=config.mismatch,
        mismatch_options=config.mismatch_options,
        kl_coef=config.kl_coef,
        **config.loss_options,
    )
    assert ours.item() == pytest.approx(theirs["losses"][call], rel=1e-5, abs=1e-5)
    (gradient,) = torch.autograd.grad(ours, t.logprobs_E)
    expected = np.concatenate([theirs["gradients"][call][i][at] for i, at in places])
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-4, atol=1e-6)
    assert np.abs(expected).max() > 1e-3


def test_the_defaults_of_a_call_are_ours(asked):
    assert step_config({}, Bus(), asked[2], 0) == StepConfig()
