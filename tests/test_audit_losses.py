"""Losses, reductions, denominators and ratios: what each option promises, and what TRL and verl compute."""
import numpy as np
import pytest
import torch

from art_nb.advantages import REDUCTIONS, entry_weights
from art_nb.batches import TrainRow
from art_nb.learners import StepConfig, has_gradient, portioned, step_rows, train_rows
from art_nb.losses import LOSSES, TokenTensors, shaped_advantages, total_loss
from art_nb.tokens import Row
from art_nb.types import TrainError


def plain_row(trajectory, tokens, prompt=2):
    """A row of `tokens` trained tokens."""
    size = prompt + tokens
    logprobs = np.where(np.arange(size) >= prompt, -1.0, np.nan).astype(np.float32)
    return Row(np.arange(size, dtype=np.int32), np.arange(size) >= prompt, logprobs, trajectory, False)


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
    for portion in portioned(rows, size, lot=3):
        assert len(portion) == size
        lengths = [int(row.sampled[1:].sum()) for row in portion]
        if reduction in ("token", "sequence", "constant"):
            expected, _ = entry_weights(lengths, range(size), np.ones(size), reduction, 128)
            np.testing.assert_allclose([row.coef for row in portion], expected, rtol=1e-12)
        shares = {by_tokens[id(row.tokens)].coef / row.coef for row in portion}
        assert max(shares) == pytest.approx(min(shares))     # within a portion, the rows weigh as in the whole step
        if reduction not in ("constant", "art"):
            assert sum(map(weight, portion)) == pytest.approx(1.0)


def test_rows_of_a_sequence_mean_weigh_alike_in_portions():
    config = StepConfig(reduction="sequence")
    assert [weight(row) for p in portioned(eight_rows(config), 2, lot=0) for row in p] == pytest.approx([0.5] * 8)


def test_a_constant_stays_a_constant_in_portions():
    config = StepConfig(reduction="constant", max_tokens=128)
    coefs = {row.coef for portion in portioned(eight_rows(config), 2, lot=0) for row in portion}
    assert max(coefs) == pytest.approx(min(coefs)) == pytest.approx(1 / (2 * 128))


def test_art_divides_each_optimizer_step_by_its_tokens():
    config = StepConfig(reduction="art")
    rows = eight_rows(config)
    for portion in portioned(rows, 2, lot=1):
        tokens = sum(int(row.sampled[1:].sum()) for row in portion)
        whole = {id(row.tokens): row.coef * sum(LENGTHS) for row in rows}      # ART's weight of each row
        assert [row.coef * tokens for row in portion] == pytest.approx([whole[id(row.tokens)] for row in portion])


def test_half_a_trajectory_counts_half():
    """Rows of one trajectory keep their shares, wherever the lot puts them."""
    groups = [[plain_row(0, 30), plain_row(0, 10), plain_row(1, 20), plain_row(2, 5)]]
    rows = step_rows([[1.0, 0.0, 0.4]], groups, StepConfig(reduction="sequence"))
    assert [row.units for row in rows] == pytest.approx([0.75, 0.25, 1.0, 1.0])
    for portion in portioned(rows, 2, lot=0):
        weights = [weight(row) for row in portion]
        assert sum(weights) == pytest.approx(1.0)
        assert weights[0] / weights[1] == pytest.approx(portion[0].units / portion[1].units)


FLAT = [[1.0, 1.0, 1.0], [0.0, 0.5, 1.0]]        # a flat group, and a trajectory at the mean of its group
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
    plain, with_kl = (portioned(flat_rows(StepConfig(**options, **extra), False), 2, lot=0)
                      for extra in ({}, {"kl_coef": 0.1}))
    assert len(plain) == 3
    assert [[row.coef for row in portion] for portion in plain] == [[row.coef for row in p] for p in with_kl]


def random_tensors(seed=0, rows=5):
    rng = torch.Generator().manual_seed(seed)
    row_E = torch.repeat_interleave(torch.arange(rows), torch.randint(1, 9, (rows,), generator=rng))
    draw = lambda scale: torch.randn(len(row_E), generator=rng, dtype=torch.float64) * scale
    new = -draw(1).abs() - 0.1
    advantages = torch.randn(rows, generator=rng, dtype=torch.float64)
    advantages[0] = 0.0
    return TokenTensors(new.requires_grad_(), new.detach() + draw(0.4), advantages[row_E], row_E,
                        reference_E=new.detach() + draw(0.3), entropy_E=draw(1).abs())


@pytest.mark.parametrize("loss", LOSSES)
def test_the_policy_term_needs_an_advantage_whatever_other_terms_are_on(loss):
    """Rows that are computed for a KL or entropy term add nothing else (DPPO's own KL, Kimi's tau)."""
    t = random_tensors()
    coef_E = torch.full_like(t.old_E, 0.1)
    options = {} if loss in ("dppo", "reinforce_plain") else {"kimi_k2_tau": 0.3}
    t.advantages_E = shaped_advantages(t, 0.2)
    assert not t.advantages_E[t.row_E == 0].any()
    gradient, = torch.autograd.grad(total_loss(t, coef_E, loss, **options), t.logprobs_E)
    assert not gradient[t.row_E == 0].any()
    assert gradient[t.row_E != 0].any()


def test_the_mean_drift_of_a_shaped_step_is_that_of_rows_with_an_advantage():
    t = random_tensors()
    live = t.row_E != 0
    part = TokenTensors(*(getattr(t, name)[live] for name in ("logprobs_E", "old_E", "advantages_E", "row_E")),
                        reference_E=t.reference_E[live])
    torch.testing.assert_close(shaped_advantages(t, 0.2)[live], shaped_advantages(part, 0.2))


@pytest.mark.parametrize("mismatch", ["tis", "sequence_mask", lambda t: torch.ones_like(t.old_E)], ids=str)
def test_a_mismatch_correction_switches_rescored_on(mismatch):
    assert StepConfig(mismatch=mismatch).rescored is True
    assert StepConfig().rescored is False
    assert StepConfig(rescored=True).rescored is True
    with pytest.raises(TrainError, match="rescored=False"):
        StepConfig(mismatch=mismatch, rescored=False)


def test_only_rows_with_a_gradient_are_computed():
    silent = TrainRow(np.arange(3), np.ones(3, bool), np.zeros(3, np.float32))
    for config, computed in ((StepConfig(), False), (StepConfig(kl_coef=0.1), True),
                             (StepConfig(entropy_coef=0.1), True), (StepConfig(kl_shaping=0.1), False)):
        assert has_gradient(silent, config) == computed
