"""The fake GPU refuses what a GPU refuses, counts what makes the host wait, and computes what a GPU computes."""

import threading

import pytest
import torch
from support import fake_gpu
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from art_nb.policy import kernels
from art_nb.policy.kernels import FLASH_DEVICES, has_flash


def on_device(*shape, dtype=torch.float32, device=fake_gpu.NAME):
    """Return random numbers on a device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype).to(device)


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, c: x + c,
        lambda x, c: c @ x.T,
        lambda x, c: torch.cat([x, c]),
        lambda x, c: torch.where(c > 0, x, x),
        lambda x, c: x.index_select(0, torch.tensor([0])),
        lambda x, c: c[torch.tensor([0], device=fake_gpu.NAME)],
        lambda x, c: x.index_put_((torch.tensor([0]),), c[:1]),
        lambda x, c: torch.nn.functional.embedding(torch.tensor([0]), x),
    ],
)
def test_mixed_devices_are_refused(mix):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        mix(on_device(3, 4), torch.randn(3, 4))


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, other: x + other,
        lambda x, other: x + other.sum(),  # a GPU can read a single number of the CPU, but not of another GPU
        lambda x, other: x @ other.T,
        lambda x, other: torch.cat([x, other]),
        lambda x, other: x[other[0].long()],
        lambda x, other: x.index_put_((torch.tensor([0]),), other[:1]),
        lambda x, other: x.add_(other),
    ],
)
def test_two_gpus_are_two_devices(mix):
    x, other = on_device(3, 4), on_device(3, 4, device=f"{fake_gpu.NAME}:1")
    with pytest.raises(RuntimeError, match="found at least two devices, fakegpu:0 and fakegpu:1!"):
        mix(x, other)


def test_a_tensor_is_copied_to_another_gpu_and_stays_there():
    with fake_gpu.counted_waits() as waits:
        x = on_device(3, 4)
        copy = x.to("fakegpu:1")
        copy += copy @ copy.T @ copy
        same = x.clone().copy_(copy)
    assert [t.device.index for t in (x, copy, same)] == [0, 1, 0]
    assert not torch.equal(x, same)
    assert torch.equal(same, copy.to(x.device))
    assert copy.new_tensor([1.0]).device == torch.zeros_like(copy).device == copy.device
    assert not waits  # copies between GPUs do not wait


def test_a_name_without_an_index_is_the_current_device_of_the_thread():
    devices = []

    def allocate():
        devices.append(torch.zeros(1, device=fake_gpu.NAME).device.index)
        torch.get_device_module(fake_gpu.NAME).set_device(torch.device(fake_gpu.NAME, 1))
        devices.append(torch.zeros(1, device=fake_gpu.NAME).device.index)

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    assert [*devices, torch.zeros(1, device=fake_gpu.NAME).device.index] == [0, 1, 0]
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(1, device="fakegpu:2")


@pytest.mark.parametrize(
    ("use", "waits"),
    [
        (lambda x: x * torch.tensor(2.0), 0),  # a single number of the CPU
        (lambda x: x[torch.tensor([2, 0])], 0),  # indices of the CPU
        (lambda x: x[[2, 0]].sum(0), 0),
        (lambda x: x.to(fake_gpu.NAME), 0),
        (lambda x: x.new_tensor([1.0]), 0),
        (lambda x: x.cpu(), 1),
        (lambda x: x.sum().item(), 1),
        (lambda x: bool((x > 0).any()), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: torch.zeros(3, 4).copy_(x), 1),
    ],
)
def test_waits_are_counted(use, waits):
    with fake_gpu.counted_waits() as found:
        use(on_device(3, 4))
    assert found.total() == waits


def test_other_devices_are_as_before():
    with torch.device("meta"):
        assert torch.tensor([]).device.type == "meta"
    assert torch.as_tensor([1]).device.type == torch.tensor([1]).device.type == "cpu"


def test_a_wait_is_counted_where_art_nb_causes_it():
    from art_nb.samplers.transformers import top_logprobs

    with fake_gpu.counted_waits() as found:
        top_logprobs(on_device(8), 2)
    assert [place.partition(":")[0] for place in found] == ["samplers/transformers.py"]
    assert found.total() == 2


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0)])
def test_variable_length_attention_is_that_of_a_gpu(window):
    shapes = (9, 4, 16), (14, 2, 16), (14, 2, 16)
    q, k, v = (on_device(*shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes)
    ends = [torch.tensor(ends, dtype=torch.int32, device=fake_gpu.NAME) for ends in ([0, 4, 9], [0, 6, 14])]
    out = varlen_attn(q, k, v, *ends, 5, 8, window_size=window, enable_gqa=True)
    out.float().square().sum().backward()
    copies = [t.detach().cpu().float().requires_grad_() for t in (q, k, v)]
    parts = []
    for queries, keys in ((slice(0, 4), slice(0, 6)), (slice(4, 9), slice(6, 14))):
        q_part, k_part, v_part = (t[s].transpose(0, 1) for t, s in zip(copies, (queries, keys, keys)))
        n, m = q_part.shape[1], k_part.shape[1]
        distance = torch.arange(m - n, m)[:, None] - torch.arange(m)
        seen = (distance >= 0) | (window[1] < 0)
        seen &= (distance <= window[0]) | (window[0] < 0)
        attended = scaled_dot_product_attention(q_part, k_part, v_part, attn_mask=seen, enable_gqa=True)
        parts.append(attended.transpose(0, 1))
    expected = torch.cat(parts)
    expected.square().sum().backward()
    pairs = [(out, expected), *((ours.grad, theirs.grad) for ours, theirs in zip((q, k, v), copies))]
    for ours, theirs in pairs:
        assert float((ours.detach().cpu().float() - theirs).detach().norm() / theirs.detach().norm()) < 0.01


def test_groups_of_query_heads_need_no_option_in_an_older_torch(monkeypatch):
    calls, ends = [], (torch.tensor([0, 3], dtype=torch.int32),) * 2

    def attend(q, k, v, *ends, scale=None, window_size=(-1, -1)):  # as in PyTorch 2.11
        calls.append((q.shape[1], k.shape[1], scale, window_size))

    for function in (kernels._knows_windows, kernels._group_options):
        monkeypatch.setattr(kernels, function.__name__, function.__wrapped__)
    monkeypatch.setattr(kernels, "_varlen_attn", lambda: attend)
    assert has_flash(torch.device(fake_gpu.NAME), torch.bfloat16)
    kernels.varlen_attention(*(torch.zeros(3, heads, 8) for heads in (4, 2, 2)), ends, (3, 3), 0.5, 2)
    assert calls == [(4, 2, 0.5, (1, 0))]


def test_variable_length_attention_has_the_limits_of_the_kernel():
    ends = torch.tensor([0, 4], dtype=torch.int32, device=fake_gpu.NAME)
    q, half = on_device(4, 2, 16), on_device(4, 2, 16, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="only supports fp16 and bf16"):
        varlen_attn(q, q, q, ends, ends, 4, 4)
    with pytest.raises(RuntimeError, match="int32"):
        varlen_attn(half, half, half, ends.long(), ends.long(), 4, 4)


def test_unknown_devices_have_no_flash_attention():
    names = {"cuda": True, fake_gpu.NAME: True, "cpu": False, "mps": False, "xla": False, "hpu": False}
    assert {name: name in FLASH_DEVICES for name in names} == names
    assert has_flash(torch.device(fake_gpu.NAME), torch.bfloat16)
    assert not has_flash(torch.device("hpu"), torch.bfloat16)
