"""Losses against plain python written from the formulas, gradients against finite differences."""

import math
import random
from collections import defaultdict
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from art_nb.core.types import TrainError
from art_nb.learners.losses import (
    LEVELS,
    LOSSES,
    MISMATCH,
    TokenTensors,
    entropy_bonus,
    from_art,
    from_trl,
    join,
    k3,
    mismatch_metrics,
    ratio_metrics,
    shaped_advantages,
    total_loss,
)
from art_nb.tokens.advantages import entry_weights

NAN = math.nan
LP = [-1.0, -0.5, -2.0, -0.1, -3.0, -0.7, -0.2, -1.5]
OLD = [-1.3, -0.5, -4.0, NAN, -2.1, -0.1, -0.25, -1.45]
ADV = [1.0, 1.0, 1.0, 1.0, -0.7, -0.7, -0.7, -0.7]
ROW = [4, 4, 4, 4, 1, 1, 1, 1]
REF = [-1.1, -0.4, -1.5, -0.3, -2.5, NAN, -0.2, -2.0]


def tensors(lp=LP, old=OLD, adv=ADV, row=ROW, **more):
    as64 = {name: torch.tensor(values, dtype=torch.float64) for name, values in more.items()}
    lp = torch.tensor(lp, dtype=torch.float64, requires_grad=True)
    return TokenTensors(
        lp,
        torch.tensor(old, dtype=torch.float64),
        torch.tensor(adv, dtype=torch.float64),
        torch.tensor(row, dtype=torch.int64),
        **as64,
    )


# Plain python. `lp` are the values that move; `sg` the same values held still (stop-gradient).


def clip(x, low, high):
    return min(max(x, low), high)


def mean_of_row(values, row):
    rows = defaultdict(list)
    for value, r in zip(values, row, strict=True):
        rows[r].append(value)
    return [sum(rows[r]) / len(rows[r]) for r in row]


def log_ratios(lp, sg, old):
    return [x - (s if math.isnan(o) else o) for x, s, o in zip(lp, sg, old, strict=True)]


def plain_ratios(lp, sg, old, row, level):
    d = log_ratios(lp, sg, old)
    token = [math.exp(clip(x, -20, 20)) for x in d]
    whole = [math.exp(clip(x, -20, 20)) for x in mean_of_row(d, row)]
    still = mean_of_row(log_ratios(sg, sg, old), row)
    own = [math.exp(clip(m + x - s, -20, 20)) for m, x, s in zip(still, lp, sg, strict=True)]
    return {
        "token": token,
        "sequence": whole,
        "sequence_token": own,
        "average": [(a + b) / 2 for a, b in zip(token, whole, strict=True)],
        "geometric_average": [math.sqrt(a) * math.sqrt(b) for a, b in zip(token, whole, strict=True)],
    }[level]


def art_extras(lp, sg, old, adv, row, low, high, level="token", cap=None, mask=False, tau=0.0):
    ratio = plain_ratios(lp, sg, old, row, level)
    if cap is not None:
        ratio = [min(r, cap) for r in ratio]
    if mask:
        ratio = [r if low < r < high else 0.0 for r in ratio]
    return ratio, [a - tau * d for a, d in zip(adv, log_ratios(sg, sg, old), strict=True)]


def plain_cispo(lp, sg, old, adv, row, is_min=0.0, is_max=5.0, **extras):
    weight, adv = art_extras(sg, sg, old, adv, row, is_min, is_max, **extras)
    return [-clip(w, is_min, is_max) * a * x for w, a, x in zip(weight, adv, lp, strict=True)]


def plain_ppo(lp, sg, old, adv, row, eps_low=0.2, eps_high=None, dual_clip=None, delta=None, **extras):
    low, high = 1 - eps_low, 1 + (eps_low if eps_high is None else eps_high)
    out = []
    for r, a in zip(*art_extras(lp, sg, old, adv, row, low, high, **extras), strict=True):
        loss = -min((r if delta is None else min(r, delta)) * a, clip(r, low, high) * a)
        out.append(min(loss, -dual_clip * a) if dual_clip is not None and a < 0 else loss)
    return out


def plain_dppo(lp, sg, old, adv, row, threshold=0.2, kl_coef=1e-3):
    out = []
    for x, s, o, a in zip(lp, sg, old, adv, strict=True):
        o = s if math.isnan(o) else o
        moved = math.exp(s) - math.exp(o)
        dropped = moved > threshold if a > 0 else moved < -threshold
        out.append((0 if dropped else -math.exp(x - o) * a) + kl_coef * (x - o) ** 2)
    return out


def plain_reinforce(lp, sg, old, adv, row, **extras):
    ratio, adv = art_extras(lp, sg, old, adv, row, 0.0, math.inf, **extras)
    return [-r * a for r, a in zip(ratio, adv, strict=True)]


def plain_policy_gradient(lp, sg, old, adv, row):
    return [-a * x for a, x in zip(adv, lp, strict=True)]


CAP = "max_negative_advantage_importance_sampling_weight"
NAMES = {CAP: "cap", "mask_prob_ratio": "mask", "kimi_k2_tau": "tau"}
EXTRAS = [{"level": level} for level in LEVELS] + [
    {CAP: 1.1},
    {"mask_prob_ratio": True},
    {"kimi_k2_tau": 0.3},
    {"level": "average", CAP: 2.0, "mask_prob_ratio": True, "kimi_k2_tau": 0.1},
]
CASES = (
    [("cispo", plain_cispo, o) for o in [{}, {"is_max": 1.2}, {"is_min": 0.5, "is_max": 2.0}, *EXTRAS]]
    + [
        ("ppo", plain_ppo, o)
        for o in [
            {},
            {"eps_high": 0.5},
            {"dual_clip": 3.0},
            {"dual_clip": 1.05, "delta": 4.0},
            {"eps_low": 0.6, "eps_high": 9.0, "delta": 2.0},
            *EXTRAS,
        ]
    ]
    + [("grpo", plain_ppo, {}), ("dr_grpo", plain_ppo, {"eps_low": 0.3})]
    + [("dapo", lambda *a: plain_ppo(*a, eps_low=0.2, eps_high=0.28), {})]
    + [("gspo", lambda *a: plain_ppo(*a, eps_low=3e-4, eps_high=4e-4, level="sequence_token"), {})]
    + [("gspo", lambda *a, **o: plain_ppo(*a, level="sequence_token", **o), {"eps_low": 0.5, "eps_high": 2.0})]
    + [("dppo", plain_dppo, o) for o in [{}, {"threshold": 0.01}, {"threshold": 5.0, "kl_coef": 0.5}]]
    + [("reinforce", plain_reinforce, {}), ("reinforce", plain_reinforce, {"level": "sequence"})]
    + [("reinforce_plain", plain_policy_gradient, {})]
)


def plain(fn, options, lp, sg, old=OLD, adv=ADV, row=ROW):
    return fn(lp, sg, old, adv, row, **{NAMES.get(key, key): value for key, value in options.items()})


@pytest.mark.parametrize(("name", "fn", "options"), CASES)
def test_values(name, fn, options):
    ours = LOSSES[name](tensors(), **options)
    assert ours.tolist() == pytest.approx(plain(fn, options, LP, LP), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize(("name", "fn", "options"), CASES)
def test_gradients(name, fn, options):
    coef = [0.1 * (i + 1) for i in range(len(LP))]
    t = tensors()
    (torch.tensor(coef, dtype=torch.float64) * LOSSES[name](t, **options)).sum().backward()
    for i in range(len(LP)):
        h, sides = 1e-6, []
        for sign in (1, -1):
            moved = [x + sign * h * (i == j) for j, x in enumerate(LP)]
            sides.append(sum(c * x for c, x in zip(coef, plain(fn, options, moved, LP), strict=True)))
        assert t.logprobs_E.grad[i].item() == pytest.approx((sides[0] - sides[1]) / (2 * h), rel=1e-5, abs=1e-7)


def test_every_loss_has_a_golden_case():
    assert {name for name, _, _ in CASES} == set(LOSSES)


@given(
    st.lists(
        st.tuples(
            st.floats(-30, 0), st.floats(-30, 0) | st.just(NAN), st.sampled_from([1.0, -1.0, 0.3]), st.integers(0, 2)
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([case for case in CASES if case[0] != "dppo"]),
)
@settings(max_examples=120)
def test_values_on_any_tokens(tokens, case):
    name, fn, options = case
    lp, old, adv, row = map(list, zip(*tokens, strict=True))
    ours = LOSSES[name](tensors(lp, old, adv, row), **options)
    assert ours.tolist() == pytest.approx(plain(fn, options, lp, lp, old, adv, row), rel=1e-8, abs=1e-9)


# ART's own loss function, written as art/loss.py computes it: padded tensors, mask, weights


def art_loss(lp, old, adv, weights, mask, ppo=False, eps=None, eps_high=None):
    eps = (0.2 if ppo else 1.0) if eps is None else eps
    eps_high = (eps if ppo else 4.0) if eps_high is None else eps_high
    total, trained = 0.0, 0.0
    for x, o, a, w, m in zip(lp, old, adv, weights, mask, strict=True):
        r = math.exp(clip(x - (x if math.isnan(o) else o), -20, 20))
        c = clip(r, 1 - eps, 1 + eps_high)
        total += (-min(r * a, c * a) if ppo else -c * a * x) * w * m
        trained += m
    return total / (trained + 1e-18)


@pytest.mark.parametrize(
    ("loss", "eps", "eps_high"),
    [
        ("cispo", None, None),
        ("cispo", 0.3, 0.6),
        ("cispo", 0.5, None),
        ("ppo", None, None),
        ("ppo", 0.1, 0.4),
        ("ppo", 0.3, None),
    ],
)
def test_arts_total_loss(loss, eps, eps_high):
    mask = [1, 1, 0, 1, 1, 1, 1, 0]
    lengths, row_adv = [3, 3], [1.3, -0.4]
    weight = [1 / (n + 1e-6) for n in lengths]
    mean = sum(n * w for n, w in zip(lengths, weight, strict=True)) / sum(lengths)
    weight = [w / mean for w in weight]
    size = sum(n * w * abs(a) for n, w, a in zip(lengths, weight, row_adv, strict=True)) / sum(lengths)
    index = [0, 0, 0, 0, 1, 1, 1, 1]
    theirs = art_loss(
        LP, OLD, [row_adv[i] / size for i in index], [weight[i] for i in index], mask, loss == "ppo", eps, eps_high
    )
    coef, A, _ = entry_weights(lengths, [0, 1], row_adv, "art")
    kept = [i for i, m in enumerate(mask) if m]
    t = tensors([LP[i] for i in kept], [OLD[i] for i in kept], [A[index[i]] for i in kept], [index[i] for i in kept])
    coef_E = torch.tensor([coef[index[i]] for i in kept], dtype=torch.float64)
    ours = total_loss(t, coef_E, loss, **from_art(loss, eps, eps_high))
    assert ours.item() == pytest.approx(theirs, rel=1e-12)


# mismatch weights


KAPPA = {"sampler_E": OLD}  # the sampler's logprobs, next to the learner's own in `old`


def plain_kappa(lp, old):
    return [0.0 if math.isnan(o) or math.isnan(x) else x - o for x, o in zip(lp, old, strict=True)]


def plain_weights(name, lp, old, row, low, high):
    d = plain_kappa(lp, old)
    token = [math.exp(x) for x in d]
    mean = mean_of_row(d, row)
    count = [row.count(r) for r in row]
    product = [math.exp(m * n) for m, n in zip(mean, count, strict=True)]
    return {
        "none": [1.0] * len(lp),
        "tis": [clip(k, low, high) for k in token],
        "mask": [k if low <= k <= high else 0.0 for k in token],
        "sequence_mask": [k if low <= k <= high else 0.0 for k in product],
        "sequence_truncate": [clip(k, low, high) for k in product],
        "geometric_mask": [1.0 if low <= math.exp(m) <= high else 0.0 for m in mean],
    }[name]


BANDS = {
    "none": (0, 0),
    "tis": (0.0, 2.0),
    "mask": (0.5, 5.0),
    "sequence_mask": (0.0, 3.0),
    "sequence_truncate": (0.0, 3.0),
    "geometric_mask": (0.9, 1.1),
}


@pytest.mark.parametrize("name", MISMATCH)
def test_mismatch_weights(name):
    assert set(BANDS) == set(MISMATCH)
    weights = MISMATCH[name](tensors(old=LP, **KAPPA))  # the learner's old over the sampler's
    assert weights.tolist() == pytest.approx(plain_weights(name, LP, OLD, ROW, *BANDS[name]))
    assert not weights.requires_grad
    recomputed = MISMATCH[name](tensors(sampler_E=REF))
    assert recomputed.tolist() == pytest.approx(plain_weights(name, OLD, REF, ROW, *BANDS[name]))


@pytest.mark.parametrize("name", MISMATCH)
def test_a_mismatch_weight_never_repeats_the_ratio_of_the_loss(name):
    if name == "none":
        assert MISMATCH[name](tensors()).tolist() == [1.0] * len(LP)
    else:
        with pytest.raises(TrainError, match="rescored=True"):
            MISMATCH[name](tensors())


def test_mismatch_multiplies_the_loss():
    coef = torch.full((len(LP),), 0.125, dtype=torch.float64)
    t = tensors(sampler_E=REF)
    expected = (LOSSES["ppo"](t) * MISMATCH["tis"](t, is_max=1.5)).sum() / 8
    weight = lambda t: MISMATCH["tis"](t, is_max=1.5)
    assert total_loss(t, coef, "ppo", mismatch=weight).item() == pytest.approx(expected.item())


# KL and entropy


def test_k3_is_schulmans_estimator():
    ours = k3(torch.tensor(LP), torch.tensor(REF)).tolist()
    d = [-x for x in plain_kappa(LP, REF)]
    assert ours == pytest.approx([math.exp(x) - x - 1 for x in d], rel=1e-5, abs=1e-6)
    assert min(ours) >= 0


def test_k3_gradient():
    lp = torch.tensor(LP, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(k3, (lp, torch.tensor([-1.0] * 8, dtype=torch.float64)))


@pytest.mark.parametrize("source", ["current_learner", "sample"])
def test_shaped_advantages_are_arts(source):
    ref = [-1.1, -0.4, -1.5, -0.3, -2.5, -0.6, -0.2, -2.0]
    origin = LP if source == "current_learner" else [x if math.isnan(o) else o for x, o in zip(LP, OLD, strict=True)]
    k = [s - r for s, r in zip(origin, ref, strict=True)]
    expected = [a + 0.2 * (sum(k) / len(k) - x) for a, x in zip(ADV, k, strict=True)]
    ours = shaped_advantages(tensors(reference_E=ref), 0.2, source)
    assert ours.tolist() == pytest.approx(expected)
    assert not ours.requires_grad
    given = shaped_advantages(tensors(reference_E=ref), 0.2, source, mean=0.0)
    assert (ours - given).tolist() == pytest.approx([0.2 * sum(k) / len(k)] * 8)


def test_total_loss_adds_kl_and_entropy():
    ref = [-1.0] * 8
    t = tensors(reference_E=ref, entropy_E=[0.5] * 8)
    coef = torch.full((8,), 0.125, dtype=torch.float64)
    expected = (LOSSES["cispo"](t) + 0.3 * k3(t.logprobs_E, t.reference_E) - 0.01 * 0.5).mean()
    assert total_loss(t, coef, kl_coef=0.3, entropy_coef=0.01).item() == pytest.approx(expected.item())


def test_missing_columns_say_what_to_do():
    with pytest.raises(TrainError, match="adapter disabled"):
        total_loss(tensors(), torch.ones(8), kl_coef=0.1)
    with pytest.raises(TrainError, match="entropy_E"):
        entropy_bonus(tensors(), 0.1)
    with pytest.raises(TrainError, match="cispo, ppo"):
        total_loss(tensors(), torch.ones(8), "sarsa")


# invariances


def pick(t, index):
    sampler_E = None if t.sampler_E is None else t.sampler_E[index]
    columns = (getattr(t, name)[index] for name in ("logprobs_E", "old_E", "advantages_E", "row_E"))
    return TokenTensors(*columns, sampler_E=sampler_E)


def random_tokens(rows=6, seed=0):
    rng = random.Random(seed)
    row = [r for r in range(rows) for _ in range(rng.randint(1, 7))]
    lp = [-rng.expovariate(1) for _ in row]
    old = [x + rng.gauss(0, 0.5) if rng.random() < 0.9 else NAN for x in lp]
    signs = [rng.choice([1.0, -0.5]) for _ in range(rows)]
    lengths, reduction = [row.count(r) for r in range(rows)], rng.choice(["token", "sequence"])
    coef, A, _ = entry_weights(lengths, range(rows), signs, reduction)
    coef_E = torch.tensor([coef[r] for r in row], dtype=torch.float64)
    sampler = [x + rng.gauss(0, 0.3) for x in lp]
    return tensors(lp, old, [A[r] for r in row], row, sampler_E=sampler), coef_E


def loss_and_gradient(t, parts, **options):
    t.logprobs_E.grad = None
    loss = sum(total_loss(part, coef_E, **options) for part, coef_E in parts)
    loss.backward()
    return loss.detach(), t.logprobs_E.grad.clone()


@pytest.mark.parametrize("mismatch", ["none", "sequence_truncate"])
@pytest.mark.parametrize("loss", LOSSES)
def test_order_and_micro_batches_do_not_matter(loss, mismatch):
    for seed in range(3):
        t, coef_E = random_tokens(seed=seed)
        whole = loss_and_gradient(t, [(pick(t, slice(None)), coef_E)], loss=loss, mismatch=mismatch)
        order = torch.randperm(len(coef_E), generator=torch.Generator().manual_seed(seed))
        cuts = [t.row_E < 2, (t.row_E >= 2) & (t.row_E < 3), t.row_E >= 3]
        for parts in ([(pick(t, order), coef_E[order])], [(pick(t, cut), coef_E[cut]) for cut in cuts]):
            changed = loss_and_gradient(t, parts, loss=loss, mismatch=mismatch)
            for a, b in zip(whole, changed, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss", LOSSES)
def test_padding_of_any_value_does_not_matter(loss):
    t, coef_E = random_tokens()
    expected, grad = loss_and_gradient(t, [(pick(t, slice(None)), coef_E)], loss=loss)
    extra = [-400.0, 0.0, -1e30]
    pad = tensors(
        t.logprobs_E.tolist() + extra,
        t.old_E.tolist() + [NAN, 300.0, -2.0],
        t.advantages_E.tolist() + [1e6, -1e6, 0.0],
        t.row_E.tolist() + [-1, -1, -1],
    )
    coef_P = torch.cat([coef_E, torch.zeros(3, dtype=torch.float64)])
    ours, padded = loss_and_gradient(pad, [(pad, coef_P)], loss=loss)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(padded, torch.cat([grad, torch.zeros(3, dtype=torch.float64)]))


@pytest.mark.parametrize("mismatch", MISMATCH)
@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_to_train_gives_zero_and_no_gradient(loss, mismatch):
    masked, empty = tensors(**KAPPA), tensors([], [], [], [], sampler_E=[])
    for t in (masked, empty):
        value = total_loss(t, torch.zeros(len(t.logprobs_E)), loss, mismatch=mismatch)
        value.backward()
        assert value.item() == 0.0
        assert t.logprobs_E.grad.tolist() == [0.0] * len(t.logprobs_E)


@pytest.mark.parametrize("unknown", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("loss", LOSSES)
def test_an_unknown_sampler_logprob_is_ratio_one(loss, unknown):
    blank, fresh = tensors(old=[unknown] * 8), tensors(old=LP)
    for t in (blank, fresh):
        LOSSES[loss](t).sum().backward()
    torch.testing.assert_close(LOSSES[loss](blank), LOSSES[loss](fresh))
    torch.testing.assert_close(blank.logprobs_E.grad, fresh.logprobs_E.grad)


@pytest.mark.parametrize("loss", LOSSES)
def test_absurd_ratios_stay_finite(loss):
    t = tensors([-1e4, 0.0] * 4, [0.0, -1e4] * 4)
    value = total_loss(t, torch.full((8,), 0.125), loss)
    value.backward()
    assert math.isfinite(value.item())
    assert torch.isfinite(t.logprobs_E.grad).all()


# other people's spelling


def test_from_art():
    assert from_art() == {"is_min": 0.0, "is_max": 5.0}
    assert from_art(epsilon=0.2, epsilon_high=0.28) == {"is_min": 0.8, "is_max": 1.28}
    assert from_art("ppo") == {"eps_low": 0.2, "eps_high": 0.2}
    assert from_art("ppo", 0.3) == {"eps_low": 0.3, "eps_high": 0.3}
    assert from_art("ppo", epsilon_high=0.28) == {"eps_low": 0.2, "eps_high": 0.28}
    with pytest.raises(TrainError, match="cispo and ppo"):
        from_art("dapo")


def test_from_trl():
    assert from_trl("cispo", epsilon_high=5.0) == {"is_min": 0.0, "is_max": 5.0}  # absolute, not 1 + 5
    assert from_trl() == {"eps_low": 0.2, "eps_high": 0.2}
    assert from_trl("dapo", epsilon_high=0.28, delta=4.0) == {"eps_low": 0.2, "eps_high": 0.28, "delta": 4.0}
    with pytest.raises(TrainError, match="usually 5.0"):
        from_trl("cispo")
    with pytest.raises(TrainError, match="no counterpart"):
        from_trl("sapo")


# metrics


def test_ratio_metrics():
    d = [x - o for x, o in zip(LP, OLD, strict=True) if not math.isnan(o)]
    ratio = sorted(math.exp(x) for x in d)

    def quantile(q):
        place = q * (len(ratio) - 1)
        low = int(place)
        return ratio[low] + (place - low) * (ratio[min(low + 1, len(ratio) - 1)] - ratio[low])

    signs = [(x - o, a) for x, o, a in zip(LP, OLD, ADV, strict=True) if not math.isnan(o)]
    high = sum(a > 0 and math.exp(x) > 1.3 for x, a in signs)
    low = sum(a < 0 and math.exp(x) < 0.8 for x, a in signs)
    expected = {
        "ratio_mean": sum(ratio) / 7,
        "ratio_p95": quantile(0.95),
        "ratio_p99": quantile(0.99),
        "clipped": (high + low) / 8,
        "clipped_low": low / 8,
        "clipped_high": high / 8,
        "kl_sampler": sum(math.exp(x) - x - 1 for x in d) / 7,
        "dlogp_mean": sum(map(abs, d)) / 7,
        "dlogp_max": max(map(abs, d)),
        "entropy": 0.7,
        "unknown_logprobs": 1 / 8,
        "kl_ref": fmean(math.exp(-x) + x - 1 for x in plain_kappa(LP, REF)),
    }
    halves = [tensors(entropy_E=[0.7] * 8, reference_E=REF) for _ in range(2)]
    for t in (halves[0], join(halves)):
        ours = ratio_metrics(t, "ppo", {"eps_low": 0.2, "eps_high": 0.3})
        assert all(type(value) is float for value in ours.values())
        if t is halves[0]:
            assert ours == pytest.approx(expected, rel=1e-5)
        else:
            assert ours["ratio_mean"] == pytest.approx(expected["ratio_mean"], rel=1e-5)


def test_the_metrics_of_sequences_do_not_depend_on_the_micro_batches():
    halves = [slice(0, 4), slice(4, 8)]  # one row each
    parts = join([tensors(LP[half], OLD[half], ADV[half], [0] * 4, sampler_E=REF[half]) for half in halves])
    whole = tensors(sampler_E=REF)
    assert ratio_metrics(parts, "gspo") == pytest.approx(ratio_metrics(whole, "gspo"), nan_ok=True)
    weights = mismatch_metrics(parts, "sequence_mask", {"is_min": 0.5})
    assert weights == mismatch_metrics(whole, "sequence_mask", {"is_min": 0.5})
    assert weights["mismatch_dropped"] == 0.5  # the first row


def test_metrics_of_nothing():
    assert ratio_metrics(tensors([], [], [], [])) == {}
    assert ratio_metrics(tensors(old=[NAN] * 8)) == {
        "unknown_logprobs": 1.0,
        "clipped": 0.0,
        "clipped_low": 0.0,
        "clipped_high": 0.0,
    }
