"""The branches for devices other than the CPU compute the CPU's gradients, in each family and dtype."""

import math
from functools import cache, update_wrapper

import pytest
import torch
from support import fake_gpu
from support.gpu_parts import FAMILIES, SEGMENTS, attended, gradient, scored
from torch.nn.attention import varlen

from art_nb.policy.kernels import FrozenWeight, has_fp32_output, token_logprobs
from art_nb.policy.packing import Segment, joined_attention, joined_segments, padded_attention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # relative to the gradient's norm
on_cpu = cache(lambda family: gradient("cpu", family, torch.float32))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_cpu(family, dtype, report):
    loss, exact = on_cpu(family)
    device_loss, device_gradient = gradient(fake_gpu.NAME, family, dtype)
    error = float((device_gradient - exact).norm() / exact.norm())
    report(
        "relative error of the gradient", f"{family:13} {str(dtype)[6:]:9} {error:.1e}  limit {TOLERANCE[dtype]:.0e}"
    )
    assert error <= TOLERANCE[dtype]
    assert device_loss == pytest.approx(loss, rel=TOLERANCE[dtype], abs=TOLERANCE[dtype])


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_changes_no_gradient(family):
    (loss, stored), (same_loss, computed_again) = (
        gradient(fake_gpu.NAME, family, torch.bfloat16, checkpointing) for checkpointing in (False, True)
    )
    assert loss == same_loss
    assert torch.equal(stored, computed_again)


@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("made", SEGMENTS)
def test_attention_without_masks_is_that_with_masks(made, window):
    exact = attended(padded_attention, "cpu", torch.float32, SEGMENTS[made], window)
    results = attended(joined_attention, fake_gpu.NAME, torch.bfloat16, SEGMENTS[made], window)
    for ours, theirs in zip(results, exact):
        assert float((ours - theirs).norm()) <= 0.01 * float(exact[0].norm())


def test_attention_without_masks_needs_one_transfer(monkeypatch):
    moved, move = [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *args, **kw: moved.append(args) or move(t, *args, **kw))
    segments = [Segment(0, 8, torch.arange(0)), *(Segment(8 + i, 9 + i, torch.arange(5)) for i in range(40))]
    with fake_gpu.counted_waits() as waits:
        joined_segments(segments, torch.device(fake_gpu.NAME, 0))
    assert sum(isinstance(args[0], torch.device) for args in moved) == 1
    assert not waits


@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0], ids=["even", "usual", "certain"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_logprobs_of_a_head_in_half_precision_are_those_in_fp32(dtype, scale):
    assert has_fp32_output(torch.zeros(1, dtype=dtype, device=fake_gpu.NAME))
    exact = scored("cpu", torch.float32, torch.float32, scale)
    logprobs, entropies, *grads = scored(fake_gpu.NAME, dtype, dtype, scale)
    torch.testing.assert_close(logprobs, exact[0], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(entropies, exact[1], atol=1e-4, rtol=1e-5)
    for ours, theirs in zip(grads, exact[2:]):
        assert float((ours - theirs).norm() / theirs.norm()) < (2e-3 if dtype == torch.float16 else 1e-2)


def test_probabilities_that_float16_does_not_have_keep_their_gradient():
    head = torch.zeros(400_000, 8, dtype=torch.float16)
    head[0, 0], head[1:, 1] = 17.5, 1.0  # a token with 99% of the probability, and 2.5e-8 for each other one
    hidden = torch.eye(8, dtype=torch.float16)[:1].to(fake_gpu.NAME).requires_grad_()
    targets = torch.zeros(1, dtype=torch.long).to(fake_gpu.NAME)
    logprobs, _ = token_logprobs(hidden, FrozenWeight(head.to(fake_gpu.NAME)), targets)
    logprobs.sum().backward()
    rest = 1 - 1 / (1 + 399_999 * math.exp(-17.5))
    # torch sums in as many lanes as the CPU has. The lane of the large value loses its share: an eighth with AVX2.
    assert -float(logprobs.detach().cpu().expm1()) == pytest.approx(rest, rel=0.15)
    expected = [17.5 * rest, -rest, *[0.0] * 6]
    assert hidden.grad.cpu().flatten().tolist() == pytest.approx(expected, rel=0.15, abs=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
def test_the_branch_of_a_gpu_is_taken(monkeypatch, dtype):
    taken = set()
    for module, name in ((torch.nn.functional, "scaled_dot_product_attention"), (varlen, "varlen_attn")):
        function = getattr(module, name)
        recorded = lambda q, *args, function=function, name=name, **kw: (
            taken.add((q.device.type, name)) or function(q, *args, **kw)
        )
        monkeypatch.setattr(module, name, update_wrapper(recorded, function))  # keeps the signature
    gradient(fake_gpu.NAME, "llama", dtype)
    assert taken == {(fake_gpu.NAME, "scaled_dot_product_attention" if dtype == torch.float32 else "varlen_attn")}
