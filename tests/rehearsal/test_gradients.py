"""The branches for devices other than the CPU compute the CPU's gradients, in each family and dtype."""

from functools import cache

import pytest
import torch
from support import fake_gpu
from support.gpu_parts import grouped_rows, learner_on
from torch.nn.attention import varlen

from art_nb.learners.base import StepConfig

FAMILIES = ("llama", "qwen3", "qwen3_window", "gemma3", "mistral", "qwen2")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # relative to the gradient's norm
CONFIG = StepConfig(learning_rate=1e-4, max_grad_norm=1e9, tokens_per_batch=128, entropy_coef=0.01)


def gradient(device, family, dtype):
    """Return the loss and the gradient of a step with several micro-batches, on the CPU in fp32."""
    learner, found = learner_on(device, family, dtype), []

    def keep(done, of, tokens):
        if done == of > 1:
            found.extend(p.grad.cpu().flatten() / learner.loss_factor for p in learner.parameters())

    metrics = learner.step(grouped_rows(), CONFIG, keep)
    return metrics["loss/train"], torch.cat(found)


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


def test_the_branch_of_a_gpu_is_taken(monkeypatch):
    devices = set()
    for module, name in ((torch.nn.functional, "scaled_dot_product_attention"), (varlen, "varlen_attn")):
        function = getattr(module, name)
        recorded = lambda q, *args, function=function, **kw: devices.add(q.device.type) or function(q, *args, **kw)
        monkeypatch.setattr(module, name, recorded)
    gradient(fake_gpu.NAME, "llama", torch.bfloat16)
    assert devices == {fake_gpu.NAME}
