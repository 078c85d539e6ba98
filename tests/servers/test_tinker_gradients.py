"""The gradients of each loss equal those of plain transformers with the formula of Tinker's documentation, to 1e-5."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from art_nb.servers import shared_model
from art_nb.servers.shared_model import ALPHA, SharedModel, TrainedAdapter
from art_nb.servers.tinker_data import loss_batches, loss_row
from art_nb.servers.tinker_losses import TINKER_LOSSES, loss_settings
from art_nb.servers.tinker_messages import Datum

PPO = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


def formula(name, logp, values, options):
    """The loss of one item, as Tinker's documentation writes it."""
    if name == "cross_entropy":
        return -(logp * values["weights"]).sum()
    old, advantages = values["logprobs"], values["advantages"]
    ratio = torch.exp(logp - old)
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "ppo":
        clipped = torch.clamp(ratio, options["clip_low_threshold"], options["clip_high_threshold"])
        return -torch.min(ratio * advantages, clipped * advantages).sum()
    if name == "cispo":
        clipped = torch.clamp(ratio, options["clip_low_threshold"], options["clip_high_threshold"])
        return -(clipped.detach() * logp * advantages).sum()
    if name == "dro":
        return -(logp * advantages - 0.5 * options["beta"] * (logp - old) ** 2).sum()
    inside = values["sequence_ratio_mask"] != 0
    log_ratio = (logp.detach() - old)[inside].mean()
    ratio = torch.exp(log_ratio + logp - logp.detach())
    clipped = torch.clamp(ratio, options["clip_low_threshold"], options["clip_high_threshold"])
    return -torch.min(ratio * advantages, clipped * advantages).sum()


class PlainLora(torch.nn.Module):
    """A linear layer of transformers with an adapter, in plain PyTorch."""

    def __init__(self, linear, A, B):
        super().__init__()
        self.linear, self.A, self.B = linear, torch.nn.Parameter(A.clone()), torch.nn.Parameter(B.clone())

    def forward(self, x):
        return self.linear(x) + ALPHA / len(self.A) * (x @ self.A.T @ self.B.T)


def plain_model(directory, weights):
    """Return the model of transformers with the adapter's weights, and its layers with an adapter."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().requires_grad_(False)
    layers = {}
    for name in {key.rpartition(".lora_")[0] for key in weights}:
        owner, _, leaf = name.rpartition(".")
        parts = [weights[f"{name}.lora_{k}.weight"].detach() for k in "AB"]
        layers[name] = PlainLora(model.get_submodule(name), *parts)
        setattr(model.get_submodule(owner), leaf, layers[name])
    return model, layers


def items(generator, name, vocabulary):
    """Items of different lengths. Two of them share a prompt. Ratios are far from 1, and some advantages are 0."""
    prompt = generator.integers(3, vocabulary, 6)
    data = []
    for length in (9, 12, 5):
        rest = generator.integers(3, vocabulary, length)
        tokens = np.concatenate([prompt, rest]) if length != 5 else rest
        n, sampled = len(tokens) - 1, np.arange(len(tokens) - 1) >= len(tokens) - length
        inputs = {"target_tokens": tokens[1:].astype(np.int64)}
        if name == "cross_entropy":
            inputs["weights"] = (generator.normal(size=n) * sampled).astype(np.float32)
        else:
            inputs["logprobs"] = (-6 + generator.normal(size=n)).astype(np.float32)
            inputs["advantages"] = (generator.normal(size=n) * sampled).astype(np.float32)
        if name == "gspo":
            inputs["sequence_ratio_mask"] = sampled.astype(np.float32)
        data.append(Datum(tokens[:-1].astype(np.int32), inputs))
    return data


@pytest.fixture(scope="module")
def shared(tiny_model_dir):
    model = SharedModel(str(tiny_model_dir), device="cpu", dtype="float32")
    yield model
    model.close()


def trained_adapter(shared, rank=8, **options):
    """Return an adapter whose B is not zero, so that both matrices have gradients."""
    adapter = TrainedAdapter(shared.policy, rank, seed=1, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in adapter.weights.items():
            if "lora_B" in name:
                weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))
    shared.mounted = None
    return adapter


OPTIONS = {"dro": {"beta": 0.05}, "ppo": PPO, "gspo": {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}}


@pytest.mark.parametrize("max_tokens", [1024, 8], ids=["one micro-batch", "several"])
@pytest.mark.parametrize("name", TINKER_LOSSES)
async def test_gradients_equal_the_formula(shared, tiny_model_dir, name, max_tokens):
    loss, settings = TINKER_LOSSES[name], loss_settings(name, OPTIONS.get(name, {}))
    data = items(np.random.default_rng(5), name, 250)
    rows = [loss_row(datum, i, loss.inputs, 290, 512) for i, datum in enumerate(data)]
    adapter = trained_adapter(shared)
    batches = loss_batches(rows, max_tokens)
    results = await shared.forward_backward(adapter, batches, loss, settings)

    model, layers = plain_model(tiny_model_dir, adapter.weights)
    expected = 0.0
    for datum in data:
        logits = model(torch.from_numpy(datum.tokens.astype(np.int64))[None]).logits[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"])
        logp = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        values = {key: torch.from_numpy(array) for key, array in datum.inputs.items()}
        expected = expected + formula(name, logp, values, settings)
    expected.backward()

    total = sum(losses.sum(dtype=np.float64) for _, losses in results)
    assert abs(total - float(expected.detach())) < 1e-4 * max(1.0, abs(total))
    largest = max(float(layer.A.grad.abs().max()) for layer in layers.values())
    assert largest > 1e-3  # the comparison is not one of zeros
    for key, layer in layers.items():
        for matrix in "AB":
            ours, plain = adapter.weights[f"{key}.lora_{matrix}.weight"].grad, getattr(layer, matrix).grad
            assert torch.allclose(ours, plain, rtol=1e-4, atol=1e-5 * max(1.0, largest)), key


async def test_several_targets_for_each_position(shared, tiny_model_dir):
    """Distillation: weights [N, K] of the teacher's most likely tokens."""
    generator = np.random.default_rng(1)
    tokens = generator.integers(3, 250, 7).astype(np.int32)
    targets, weights = generator.integers(3, 250, (7, 4)), generator.random((7, 4)).astype(np.float32)
    loss = TINKER_LOSSES["cross_entropy"]
    row = loss_row(Datum(tokens, {"target_tokens": targets, "weights": weights}), 0, loss.inputs, 290, 512)
    adapter = trained_adapter(shared, rank=3)
    ((logprobs, _),) = await shared.forward_backward(adapter, loss_batches([row]), loss, {})

    model, layers = plain_model(tiny_model_dir, adapter.weights)
    logp = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].log_softmax(-1)
    chosen = logp.gather(-1, torch.from_numpy(targets))
    assert np.allclose(logprobs.reshape(7, 4), chosen.detach().numpy(), atol=1e-5)
    (-(chosen * torch.from_numpy(weights)).sum()).backward()
    for key, layer in layers.items():
        assert torch.allclose(adapter.weights[f"{key}.lora_A.weight"].grad, layer.A.grad, rtol=1e-4, atol=1e-5), key


ADAM = {"learning_rate": 3e-3, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.1, "grad_clip_norm": 0.5}


async def test_steps_equal_adamw_and_adapters_do_not_disturb_each_other(shared, tiny_model_dir):
    """Three steps with clipping and weight decay, while another adapter of another rank is trained in between."""
    loss, data = TINKER_LOSSES["cross_entropy"], items(np.random.default_rng(2), "cross_entropy", 250)
    rows = [loss_row(datum, i, loss.inputs, 290, 512) for i, datum in enumerate(data)]
    adapter, other = trained_adapter(shared), trained_adapter(shared, rank=2)
    model, layers = plain_model(tiny_model_dir, adapter.weights)
    parameters = [p for layer in layers.values() for p in (layer.A, layer.B)]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for _ in range(3):
        await shared.forward_backward(adapter, loss_batches(rows[:2]), loss, {})
        await shared.forward_backward(other, loss_batches(rows), loss, {})
        await shared.run(other.optimizer_step, other, ADAM)
        await shared.forward_backward(adapter, loss_batches(rows[2:]), loss, {})  # gradients add up
        await shared.run(adapter.optimizer_step, adapter, ADAM)
        for datum in data:
            logits = model(torch.from_numpy(datum.tokens.astype(np.int64))[None]).logits[0]
            targets = torch.from_numpy(datum.inputs["target_tokens"])[:, None]
            logp = logits.log_softmax(-1).gather(-1, targets)[:, 0]
            (-(logp * torch.from_numpy(datum.inputs["weights"])).sum()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for key, layer in layers.items():
        for matrix in "AB":
            ours = adapter.weights[f"{key}.lora_{matrix}.weight"]
            assert torch.allclose(ours, getattr(layer, matrix), atol=2e-5), key


@pytest.mark.parametrize("layers", [{"train_attn": False}, {"train_mlp": False}], ids=["mlp", "attention"])
async def test_untrained_layers_stay_at_zero(shared, layers):
    loss, data = TINKER_LOSSES["cross_entropy"], items(np.random.default_rng(2), "cross_entropy", 250)
    rows = [loss_row(datum, i, loss.inputs, 290, 512) for i, datum in enumerate(data)]
    adapter = TrainedAdapter(shared.policy, 4, seed=1, **layers)
    await shared.forward_backward(adapter, loss_batches(rows), loss, {})
    await shared.run(adapter.optimizer_step, adapter, ADAM)
    changed = {name for name, weight in adapter.weights.items() if "lora_B" in name and weight.any()}
    assert changed
    assert all(("self_attn" in name) == layers.get("train_attn", True) for name in changed)


async def test_a_failed_request_leaves_the_gradients(shared, monkeypatch):
    loss, data = TINKER_LOSSES["cross_entropy"], items(np.random.default_rng(2), "cross_entropy", 250)
    rows = [loss_row(datum, i, loss.inputs, 290, 512) for i, datum in enumerate(data)]
    adapter, batches = trained_adapter(shared), loss_batches(rows, 8)
    await shared.forward_backward(adapter, batches[:1], loss, {})
    before = adapter.copy_gradients()
    broken = loss_batches(rows, 8)
    broken[-1].target_N = broken[-1].target_N + 10_000  # an index outside the vocabulary
    with pytest.raises((IndexError, RuntimeError)):
        await shared.forward_backward(adapter, broken, loss, {})
    assert all(torch.equal(a, b) for a, b in zip(before, adapter.copy_gradients()))


@pytest.mark.parametrize("failing", [2, 1], ids=["second micro-batch", "first micro-batch"])
async def test_a_slice_that_is_repeated_counts_once(shared, monkeypatch, failing):
    """Memory is full in the middle of a backward pass: the gradients equal those without the error."""
    loss, data = TINKER_LOSSES["cross_entropy"], items(np.random.default_rng(2), "cross_entropy", 250)
    rows = [loss_row(datum, i, loss.inputs, 290, 512) for i, datum in enumerate(data)]
    adapter, batches = trained_adapter(shared), loss_batches(rows, 8)
    assert len(batches) > 1
    first = await shared.forward_backward(adapter, batches, loss, {})
    once = adapter.copy_gradients()
    expected = await shared.forward_backward(adapter, batches, loss, {}), adapter.copy_gradients()
    adapter.restore_gradients(once)  # the request starts with the gradients of an earlier one
    monkeypatch.setattr(shared_model, "SLICE_S", 60.0)  # one slice
    backwards, parameters = [], adapter.parameters()

    def fill_memory(gradient):
        backwards.append(any(not torch.equal(p.grad, g) for p, g in zip(parameters, once)))
        if len(backwards) == failing:
            raise torch.OutOfMemoryError("simulated")

    hook = parameters[len(parameters) // 2].register_hook(fill_memory)
    try:
        results = await shared.forward_backward(adapter, batches, loss, {})
    finally:
        hook.remove()
    assert backwards[failing - 1]  # layers behind this one had their gradients already
    assert len(backwards) == failing + len(batches)
    assert len(results) == len(first)
    assert all(np.array_equal(a, b) for pair in zip(results, expected[0]) for a, b in zip(*pair))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(adapter.copy_gradients(), expected[1]))
