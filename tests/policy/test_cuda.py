"""On a CUDA device, kernels, gradients and the whole loop compute what they compute on the CPU.

`python -m pytest --noconftest -m gpu tests/policy/test_cuda.py` needs no other fixtures of the suite."""

import asyncio
from functools import cache

import pytest
import torch
from support.gpu_parts import FAMILIES, SEGMENTS, attended, gradient, groups_of, reply, scored

import art_nb as art
from art_nb.models.tiny import save_tiny_model
from art_nb.policy.kernels import has_flash
from art_nb.policy.loading import cuda_dtype
from art_nb.policy.packing import joined_attention, padded_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # relative to the gradient's norm

on_cpu = cache(lambda family: gradient("cpu", family, torch.float32))


def test_a_new_gpu_has_attention_without_masks():
    dtype, recent = cuda_dtype(), torch.cuda.get_device_capability() >= (8, 0)
    assert has_flash(torch.device("cuda"), dtype) == (recent and torch.version.hip is None)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_cpu(family, dtype):
    loss, exact = on_cpu(family)
    cuda_loss, cuda_gradient = gradient("cuda", family, dtype)
    assert float((cuda_gradient - exact).norm() / exact.norm()) <= TOLERANCE[dtype]
    assert cuda_loss == pytest.approx(loss, rel=TOLERANCE[dtype], abs=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("made", SEGMENTS)
def test_both_kinds_of_attention_are_those_of_the_cpu(made, window):
    exact = attended(padded_attention, "cpu", torch.float32, SEGMENTS[made], window)
    functions = [padded_attention] + [joined_attention] * has_flash(torch.device("cuda"), cuda_dtype())
    for function in functions:
        results = attended(function, "cuda", cuda_dtype(), SEGMENTS[made], window)
        for ours, theirs in zip(results, exact):
            assert float((ours - theirs).norm()) <= 0.02 * float(exact[0].norm()), function.__name__


@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0], ids=["even", "usual", "certain"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_logprobs_of_a_head_in_half_precision_are_those_in_fp32(dtype, scale):
    exact = scored("cpu", torch.float32, torch.float32, scale)
    logprobs, entropies, *grads = scored("cuda", dtype, dtype, scale)
    torch.testing.assert_close(logprobs, exact[0], atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(entropies, exact[1], atol=1e-3, rtol=1e-4)
    for ours, theirs in zip(grads, exact[2:]):
        assert float((ours - theirs).norm() / theirs.norm()) < (2e-3 if dtype == torch.float16 else 1e-2)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
async def test_the_whole_loop_runs(tmp_path, dtype):
    weights, dtypes = save_tiny_model(tmp_path / "tiny"), {} if dtype == "auto" else {"dtype": dtype}
    named = lambda: art.TrainableModel(name="ttt", project="tests", base_model=str(weights))
    model, limit = named(), 0.02 if dtype == "float32" else 0.3  # nats
    options = dict(path=tmp_path / "runs", verbose=False, sampler="transformers", **dtypes)
    async with art.LocalBackend(device="cuda", **options) as backend:
        await model.register(backend)
        assert backend.runtime(model).policy.device.type == "cuda"
        choices = await asyncio.gather(*(reply(model, seed) for seed in range(12)))
        restricted = [{"top_k": 5}, {"min_p": 0.1}, {"guided_choice": ["B1", "C2"]}]
        await asyncio.gather(*(reply(model, i, extra_body=extra) for i, extra in enumerate(restricted)))
        for call in ({}, {"loss_fn": "ppo", "kl_coef": 0.1}, {"rescored": True}, {"entropy_coef": 0.01}):
            result = await backend.train(model, groups_of(choices), learning_rate=1e-3, **call)
            assert 0 < result.metrics["loss/grad_norm"] < 100, call
            if not call:
                assert result.metrics["offpolicy/logprob_diff_max"] < limit
        trained = await reply(model, 7)
    again = named()
    async with art.LocalBackend(device="cpu", **options) as on_the_cpu:
        await again.register(on_the_cpu)
        same = await reply(again, 7)
    if dtype == "float32":
        ours, theirs = ([t.logprob for t in choice.logprobs.content] for choice in (same, trained))
        assert ours[0] == pytest.approx(theirs[0], abs=1e-3)
