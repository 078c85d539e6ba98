"""Losses, reductions, denominators and ratios: what each option promises, and what TRL and verl compute."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from art_nb.core.types import TrainError
from art_nb.learners.base import (
    Learner,
    StepConfig,
    has_gradient,
    mean_metrics,
    optimizer_steps,
    split_optimizer_steps,
    step_rows,
    train_rows,
)
from art_nb.learners.losses import (
    LOSSES,
    TokenTensors,
    join,
    mismatch_metrics,
    ratio_metrics,
    shaped_advantages,
    total_loss,
)
from art_nb.policy.loading import load_policy
from art_nb.policy.packing import WeightedRow
from art_nb.tokens.advantages import REDUCTIONS, advantages, entry_weights
from art_nb.tokens.rows import TokenRow


def plain_row(trajectory, tokens, prompt=2):
    """A row of `tokens` trained tokens."""
    size = prompt + tokens
    logprobs = np.where(np.arange(size) >= prompt, -1.0, np.nan).astype(np.float32)
    return TokenRow(np.arange(size, dtype=np.int32), np.arange(size) >= prompt, logprobs, trajectory, False)


LENGTHS = [10, 120, 30, 55, 17, 80, 64, 41]
REWARDS = [[1.0, 0.0, 0.3, 0.6], [0.2, 0.9, 0.35, 0.1]]


def eight_rows(config):
    rows = [[plain_row(i, n) for i, n in enumerate(part)] for part in (LENGTHS[:4], LENGTHS[4:])]
    return step_rows(REWARDS, rows, config)


def weight(row):
    """The total weight of a row in its optimizer step."""
    return row.coef * int(row.sampled[1:].sum())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_optimizer_step_is_the_reduction_of_its_own_rows(reduction, size):
    config = StepConfig(reduction=reduction, max_tokens=128)
    rows = eight_rows(config)
    by_tokens = {id(row.tokens): row for row in rows}
    for portion in split_optimizer_steps(rows, size, lot=3):
        assert len(portion) == size
        lengths = [int(row.sampled[1:].sum()) for row in portion]
        if reduction in ("token", "sequence", "constant"):
            expected, *_ = entry_weights(lengths, range(size), np.ones(size), reduction, 128)
            np.testing.assert_allclose([row.coef for row in portion], expected, rtol=1e-12)
        shares = {by_tokens[id(row.tokens)].coef / row.coef for row in portion}
        assert max(shares) == pytest.approx(min(shares))  # within a portion, the rows weigh as in the whole step
        if reduction not in ("constant", "art"):
            assert sum(map(weight, portion)) == pytest.approx(1.0)


def test_rows_of_a_sequence_mean_weigh_alike_in_portions():
    config = StepConfig(reduction="sequence")
    assert [weight(row) for p in split_optimizer_steps(eight_rows(config), 2, lot=0) for row in p] == pytest.approx(
        [0.5] * 8
    )


def test_a_constant_stays_a_constant_in_portions():
    config = StepConfig(reduction="constant", max_tokens=128)
    coefs = {row.coef for portion in split_optimizer_steps(eight_rows(config), 2, lot=0) for row in portion}
    assert max(coefs) == pytest.approx(min(coefs)) == pytest.approx(1 / (2 * 128))


def test_art_divides_each_optimizer_step_by_its_tokens():
    config = StepConfig(reduction="art")
    rows = eight_rows(config)
    for portion in split_optimizer_steps(rows, 2, lot=1):
        tokens = sum(int(row.sampled[1:].sum()) for row in portion)
        whole = {id(row.tokens): row.coef * sum(LENGTHS) for row in rows}  # ART's weight of each row
        assert [row.coef * tokens for row in portion] == pytest.approx([whole[id(row.tokens)] for row in portion])


def test_half_a_trajectory_counts_half():
    """Rows of one trajectory keep their shares, wherever the lot puts them."""
    groups = [[plain_row(0, 30), plain_row(0, 10), plain_row(1, 20), plain_row(2, 5)]]
    rows = step_rows([[1.0, 0.0, 0.4]], groups, StepConfig(reduction="sequence"))
    assert [row.units for row in rows] == pytest.approx([0.75, 0.25, 1.0, 1.0])
    for portion in split_optimizer_steps(rows, 2, lot=0):
        weights = [weight(row) for row in portion]
        assert sum(weights) == pytest.approx(1.0)
        assert weights[0] / weights[1] == pytest.approx(portion[0].units / portion[1].units)


FLAT = [[1.0, 1.0, 1.0], [0.0, 0.5, 1.0]]  # a flat group, and a trajectory at the mean of its group
TERMS = ({"kl_coef": 1e-12}, {"entropy_coef": 1e-12}, {"kl_coef": 0.1, "entropy_coef": 0.1})


def flat_rows(config, only_trained=True):
    rows = [[plain_row(i, 3 + 4 * i + g) for i in range(3)] for g in range(2)]
    return (train_rows if only_trained else step_rows)(FLAT, rows, config)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("term", TERMS, ids=str)
def test_a_kl_or_entropy_term_leaves_the_policy_gradient_alone(reduction, term):
    options = {"reduction": reduction, "max_tokens": 32}
    plain, more = (flat_rows(StepConfig(**options, **extra)) for extra in ({}, term))
    assert (len(plain), len(more)) == (2, 6)
    assert [row.coef for row in more if row.advantage] == [row.coef for row in plain]
    assert [row.advantage for row in more if row.advantage] == [row.advantage for row in plain]
    assert min(row.coef for row in more) > 0


@pytest.mark.parametrize("reduction", [name for name in REDUCTIONS if name != "art"])
def test_rows_without_advantage_fill_portions_as_in_trl_and_verl(reduction):
    options = {"reduction": reduction, "max_tokens": 32, "rows_per_step": 2}
    plain, with_kl = (
        split_optimizer_steps(flat_rows(StepConfig(**options, **extra), False), 2, lot=0)
        for extra in ({}, {"kl_coef": 0.1})
    )
    assert len(plain) == 3
    assert [[row.coef for row in portion] for portion in plain] == [[row.coef for row in p] for p in with_kl]


def random_tensors(seed=0, rows=5):
    rng = torch.Generator().manual_seed(seed)
    row_E = torch.repeat_interleave(torch.arange(rows), torch.randint(1, 9, (rows,), generator=rng))
    draw = lambda scale: torch.randn(len(row_E), generator=rng, dtype=torch.float64) * scale
    new = -draw(1).abs() - 0.1
    advantages = torch.randn(rows, generator=rng, dtype=torch.float64)
    advantages[0] = 0.0
    return TokenTensors(
        new.requires_grad_(),
        new.detach() + draw(0.4),
        advantages[row_E],
        row_E,
        reference_E=new.detach() + draw(0.3),
        entropy_E=draw(1).abs(),
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_the_policy_term_needs_an_advantage_whatever_other_terms_are_on(loss):
    """Rows that are computed for a KL or entropy term add nothing else (DPPO's own KL, Kimi's tau)."""
    t = random_tensors()
    coef_E = torch.full_like(t.old_E, 0.1)
    options = {} if loss in ("dppo", "reinforce_plain") else {"kimi_k2_tau": 0.3}
    t.advantages_E = shaped_advantages(t, 0.2)
    assert not t.advantages_E[t.row_E == 0].any()
    (gradient,) = torch.autograd.grad(total_loss(t, coef_E, loss, **options), t.logprobs_E)
    assert not gradient[t.row_E == 0].any()
    assert gradient[t.row_E != 0].any()


def test_the_mean_drift_of_a_shaped_step_is_that_of_rows_with_an_advantage():
    t = random_tensors()
    live = t.row_E != 0
    part = TokenTensors(
        *(getattr(t, name)[live] for name in ("logprobs_E", "old_E", "advantages_E", "row_E")),
        reference_E=t.reference_E[live],
    )
    torch.testing.assert_close(shaped_advantages(t, 0.2)[live], shaped_advantages(part, 0.2))


@pytest.mark.parametrize(
    "mismatch", ["tis", "sequence_mask", lambda t: torch.ones_like(t.old_E)], ids=["tis", "sequence_mask", "function"]
)
def test_a_mismatch_correction_switches_rescored_on(mismatch):
    assert StepConfig(mismatch=mismatch).rescored is True
    assert StepConfig().rescored is False
    assert StepConfig(rescored=True).rescored is True
    with pytest.raises(TrainError, match="rescored=False"):
        StepConfig(mismatch=mismatch, rescored=False)


def test_only_rows_with_a_gradient_are_computed():
    silent = WeightedRow(np.arange(3), np.ones(3, bool), np.zeros(3, np.float32))
    for config, computed in (
        (StepConfig(), False),
        (StepConfig(kl_coef=0.1), True),
        (StepConfig(entropy_coef=0.1), True),
        (StepConfig(kl_shaping=0.1), False),
    ):
        assert has_gradient(silent, config) == computed


# What a step reports


def measured(t, loss, **options):
    found = ratio_metrics(t, loss, options)
    return [found[name] for name in ("clipped_low", "clipped_high", "clipped")]


def test_clipped_tokens_are_counted_with_the_band_and_the_level_of_the_loss():
    t = random_tensors(seed=2, rows=12)
    d, A = (t.logprobs_E - t.old_E).detach(), t.advantages_E
    share = lambda what: what.float().mean().item()
    means = torch.stack([d[t.row_E == row].mean() for row in t.row_E])
    for loss, options, log_E, low, high in (
        ("ppo", {}, d, 0.8, 1.2),
        ("dapo", {}, d, 0.8, 1.28),
        ("ppo", {"eps_low": 0.1, "eps_high": 0.5}, d, 0.9, 1.5),
        ("gspo", {}, means, 1 - 3e-4, 1 + 4e-4),
        ("grpo", {"level": "sequence"}, means, 0.8, 1.2),
    ):
        ratio = log_E.exp()
        expected = [share((ratio < low) & (A < 0)), share((ratio > high) & (A > 0))]
        assert measured(t, loss, **options) == pytest.approx([*expected, sum(expected)]), loss
        assert sum(expected) > 0
        found = ratio_metrics(t, loss, options)
        assert found["ratio_mean"] == pytest.approx(ratio.mean().item())
    weight = d.exp()  # CISPO cuts a weight, whatever the sign of A
    low, high, clipped = measured(t, "cispo", is_max=1.1)
    assert high == pytest.approx(share((weight > 1.1) & (A > 0)))
    assert clipped == pytest.approx(share((weight > 1.1) & (A != 0)))
    assert clipped > high > low == 0
    assert measured(t, "cispo") == [0, 0, 0]
    gained = t.logprobs_E.detach().exp() - t.old_E.exp()
    dropped = share(((gained > 0.05) & (A > 0)) | ((gained < -0.05) & (A < 0)))
    assert measured(t, "dppo", threshold=0.05)[2] == pytest.approx(dropped)
    assert dropped > 0
    for loss in ("reinforce", "reinforce_plain", lambda t, level=3: -t.logprobs_E):
        assert "clipped" not in ratio_metrics(t, loss, {"level": 3} if callable(loss) else {})


def test_a_rescored_step_reports_the_gap_to_the_sampler_not_to_itself():
    t = random_tensors()
    sampler_E = t.old_E.clone()
    t.old_E, t.sampler_E = t.logprobs_E.detach().clone(), sampler_E
    found, gap = ratio_metrics(t, "ppo"), (t.old_E - sampler_E).abs()
    assert found["dlogp_max"] == pytest.approx(gap.max().item())
    assert found["ratio_mean"] == pytest.approx(1.0)
    weights = mismatch_metrics(t, "mask", {"low": 0.8, "high": 1.2})
    kappa = (t.old_E - sampler_E).exp()
    dropped = ((kappa < 0.8) | (kappa > 1.2)).float().mean().item()
    assert weights["mismatch_dropped"] == pytest.approx(dropped)
    assert dropped > 0
    assert mismatch_metrics(t, lambda t: 1.0) == {"mismatch_mean": 1.0, "mismatch_dropped": 0.0}


@pytest.mark.parametrize("term", [{"kl_coef": 0.1}, {"kl_shaping": 0.1}, {"kl_coef": 0.1, "kl_shaping": 0.1}], ids=str)
def test_a_step_with_a_kl_term_reports_the_divergence(term, tiny_model_dir):
    policy = load_policy(tiny_model_dir, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for layer in policy.layers.values():
            layer.B.add_(0.05)
    policy.cast_masters()
    learner = Learner(policy)
    config = StepConfig(learning_rate=0.0, mismatch="tis", **term)
    told = optimizer_steps(learner, eight_rows(config), config)
    seen = join([t for _, t in learner.seen])
    d = seen.reference_E - seen.logprobs_E
    expected = (d.exp() - d - 1).mean() if "kl_coef" in term else -d.mean()
    assert told["loss/kl_policy_ref"] == pytest.approx(expected.item(), rel=1e-4)
    assert told["loss/kl_policy_ref"] != 0
    assert told["offpolicy/mismatch_weight_mean"] > 0
    assert {"loss/clipped_low_fraction", "loss/clipped_high_fraction", "loss/clipped_token_fraction"} <= told.keys()
    assert mean_metrics([{"offpolicy/logprob_diff_max": x} for x in (0.1, 0.7, 0.2)]) == {
        "offpolicy/logprob_diff_max": 0.7
    }


# TRL 1.16 and verl 0.9.1: values that their own code computed (tools/peer_losses.py)

SPEC = importlib.util.spec_from_file_location("peer_losses", Path(__file__).parents[2] / "tools" / "peer_losses.py")
peer_losses = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(peer_losses)
PEERS = json.loads((Path(__file__).parent / "peer_losses.json").read_text())
GIVEN, DIRECTIONS = peer_losses.from_json(PEERS["step"]), peer_losses.from_json(PEERS["directions"])
CASES = peer_losses.all_cases()


def our_result(step, peer, ours):
    """Our loss of a step [B, T], its gradient by logprobs and entropies [2, B, T], and its metrics."""
    mask, A = step["mask"].bool(), step["advantages"][peer]
    rows, sizes = torch.nonzero(mask)[:, 0], mask.sum(1).tolist()
    groups = np.arange(len(sizes)) // peer_losses.BATCH
    around = {name: ours[name] for name in ("kl_coef", "entropy_coef", "mismatch", "mismatch_options") if name in ours}
    coef_R, *_ = entry_weights(
        sizes,
        range(len(sizes)),
        A,
        ours["reduction"],
        ours["max_tokens"],
        groups,
        silent=bool(ours["kl_coef"] or ours["entropy_coef"]),
    )
    moving = [step[name][mask].clone().requires_grad_() for name in ("new", "entropy")]
    t = TokenTensors(
        moving[0],
        step["old"][mask],
        A[rows],
        rows,
        step["reference"][mask],
        moving[1],
        step["sampling"][mask] if "mismatch" in ours else None,
    )
    loss = total_loss(t, torch.from_numpy(coef_R)[rows], ours["loss"], **around, loss_options=ours["loss_options"])
    gradient = torch.zeros(2, *mask.shape, dtype=torch.float64)
    for place, part in enumerate(torch.autograd.grad(loss, moving, materialize_grads=True)):
        gradient[place][mask] = part
    return {"loss": loss.item(), "gradient": gradient, "metrics": ratio_metrics(t, ours["loss"], ours["loss_options"])}


def label(i):
    return f"{CASES[i][0]} " + " ".join(str(value) for value in CASES[i][1].values())


def test_the_file_holds_every_case():
    assert len(PEERS["results"]) == len(CASES) > 350


KINDS = sorted({(peer, theirs.get("loss_type") or theirs["loss"]) for peer, theirs, _ in CASES})


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_losses_and_gradients_are_those_of_trl_and_verl(kind):
    """Every option: loss, reduction, level, clip, KL, entropy, mismatch. verl adds 1e-8 to a denominator."""
    near = 1e-11 if kind[0] == "trl" else 1e-7
    for i, (peer, theirs, ours) in enumerate(CASES):
        if (peer, theirs.get("loss_type") or theirs["loss"]) != kind:
            continue
        found, expected = our_result(GIVEN, peer, ours), PEERS["results"][i]
        gradient = (DIRECTIONS * found["gradient"]).sum((1, 2, 3)).tolist()
        assert gradient == pytest.approx(expected["gradient"], rel=near, abs=near), label(i)
        if kind != ("verl", "dppo_tv"):  # verl's DPPO writes sg(ratio) * logp where ours writes ratio
            assert found["loss"] == pytest.approx(expected["loss"], rel=near, abs=near), label(i)


def test_metrics_are_those_of_trl_and_verl():
    """TRL counts sequences where the level is the sequence; ours are always shares of the trained tokens."""
    names = {
        "clip_ratio/low_mean": "clipped_low",
        "clip_ratio/high_mean": "clipped_high",
        "clip_ratio/region_mean": "clipped",
        "cispo_clip_ratio": "clipped_high",
        "kl": "kl_ref",
        "entropy": "entropy",
        "actor/pg_clipfrac": "clipped",
    }
    compared, clipped = set(), 0
    for i, (peer, theirs, ours) in enumerate(CASES):
        if theirs.get("level") == "sequence" or theirs.get("loss") in ("cispo", "dppo_tv"):
            continue  # verl counts tokens without advantage in these two
        found, expected = our_result(GIVEN, peer, ours)["metrics"], PEERS["results"][i]["metrics"]
        for name, value in expected.items():
            assert found[names[name]] == pytest.approx(value, rel=1e-5, abs=1e-7), (label(i), name)
            compared.add(name)
        clipped += found["clipped"] > 0
    assert compared == set(names)
    assert clipped > 100


@pytest.mark.parametrize("peer", ["trl", "verl"])
def test_advantages_are_those_of_trl_and_verl_up_to_the_deviation(peer):
    """We divide by the population deviation, they by the sample deviation: the factor of docs/coming-from/trl.md."""
    groups = GIVEN["rewards"].view(-1, peer_losses.BATCH).numpy()
    ours = {scale: np.concatenate(advantages(groups, scale)) for scale in ("group", "none")}
    np.testing.assert_allclose(ours["none"], GIVEN["unscaled"][peer].numpy(), atol=1e-6)
    factor = (peer_losses.BATCH / (peer_losses.BATCH - 1)) ** 0.5
    np.testing.assert_allclose(ours["group"], factor * GIVEN["advantages"][peer].numpy(), rtol=2e-3, atol=1e-6)


def test_dppos_own_kl_coef_can_be_given():
    t = random_tensors()
    coef_E = torch.full_like(t.old_E, 0.1)
    without = total_loss(t, coef_E, "dppo", loss_options={"kl_coef": 0.0}, kl_coef=0.1)
    assert without.item() != pytest.approx(total_loss(t, coef_E, "dppo", kl_coef=0.1).item())
