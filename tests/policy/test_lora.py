"""Every update of the adapter counts in full, and several adapters share one copy of the base weights."""

import numpy as np
import pytest
import torch

from art_nb.learners.base import Learner, StepConfig
from art_nb.policy.adapters import copy_adapter, load_adapter, merged_weights
from art_nb.policy.kernels import LowRankProduct
from art_nb.policy.loading import load_policy
from art_nb.policy.lora import FusedLinear, modules_only, sequence_logprobs
from art_nb.policy.packing import WeightedRow

TEXT = "A notebook workbench for training language model agents. The reward of a rollout counts the games it wins."


@pytest.fixture(scope="module")
def policy(smollm2_dir):
    return load_policy(smollm2_dir, device="cpu", dtype=torch.bfloat16)


def some_rows(policy, seed):
    rng, ids = np.random.default_rng(seed), policy.tokenizer(TEXT)["input_ids"]
    rows = []
    for advantage in (-1.0, 1.0):
        tokens = np.array(ids + rng.integers(0, 49152, 16).tolist(), np.int32)
        rows.append(WeightedRow(tokens, np.arange(len(tokens)) >= len(ids), np.full(len(tokens), np.nan, np.float32)))
        rows[-1].advantage = advantage
    return rows


def trained(policy, learning_rate, steps):
    """Train a new adapter for some steps."""
    fresh = {name: t if "lora_A" in name else torch.zeros_like(t) for name, t in copy_adapter(policy).items()}
    load_adapter(policy, fresh)
    learner = Learner(policy)
    for step in range(steps):
        learner.step(some_rows(policy, step), StepConfig(learning_rate=learning_rate))


def layer_inputs(policy):
    """The inputs of all linear layers, for 2,000 random tokens, whose rounding errors cancel."""
    inputs, hooks = {}, []
    for module in policy.model.modules():
        if isinstance(module, FusedLinear):
            hooks.append(module.register_forward_hook(lambda m, args, _: inputs.update({m: args[0].flatten(0, -2)})))
    with modules_only(policy):
        sequence_logprobs(policy, np.random.default_rng(0).integers(0, len(policy.tokenizer), 2000).tolist())
    for hook in hooks:
        hook.remove()
    return inputs


def gains(policy, every):
    """The share of the exact change of some layers' outputs: next to the weights, and merged into them."""
    sums = np.zeros(3)
    with torch.no_grad():
        for fused, x in [*layer_inputs(policy).items()][::every]:
            pairs, scale = [(layer.A, layer.B) for layer in fused.layers], fused.layers[0].scale
            exact = LowRankProduct(pairs, scale, torch.float32)(x.float())
            before, after = fused.product(x).float(), fused.product.with_adapter(x, policy.working[fused])[0].float()
            matrices = [torch.addmm(l.weight.float(), l.B, l.A, alpha=scale).bfloat16() for l in fused.layers]
            merged = (x.float() @ torch.cat(matrices).float().T).bfloat16().float()  # bf16 products add in fp32 too
            norm = exact.square().sum(0).clamp(min=1e-30).sqrt()  # every output counts
            terms = [(exact * y / norm**2).sum() for y in (exact, after - before, merged - before)]
            sums += [float(term) for term in terms]
    return sums[1] / sums[0], sums[2] / sums[0]


LONG = [pytest.param(rate, 8, marks=pytest.mark.full) for rate in (5e-6, 1e-4)]


@pytest.mark.parametrize(("learning_rate", "steps"), [(5e-6, 1), (1e-4, 1), *LONG])
def test_an_update_counts_in_full(policy, learning_rate, steps):
    trained(policy, learning_rate, steps)
    whole, merged = gains(policy, every=7 if steps == 1 else 1)  # 4 layers in a block, so 7 meets each kind
    print(f"learning rate {learning_rate:g}, {steps} steps: {whole:.3f}, merged in bf16 {merged:.3f}")
    assert whole > (0.95 if steps == 1 else 0.98)  # fewer layers, so more noise
    assert merged < 0.5  # what this test would find if the adapter were merged


def test_the_change_of_the_whole_model_is_that_in_fp32(policy, smollm2_dir):
    trained(policy, 1e-3, 8)  # after smaller steps, the rounding errors of the logprobs are as large as their change
    exact = load_policy(smollm2_dir, device="cpu", dtype=torch.float32)
    load_adapter(exact, copy_adapter(policy))
    ids = policy.tokenizer(TEXT * 4)["input_ids"]
    changes = [sequence_logprobs(p, ids) - sequence_logprobs(p, ids, [(None, None)]) for p in (policy, exact)]
    share = float((changes[0] * changes[1]).sum() / changes[1].square().sum())
    print(f"share of the change of the logprobs: {share:.3f}")
    assert share > 0.9


def test_the_base_weights_never_change(policy):
    before = {name: layer.weight.clone() for name, layer in policy.layers.items()}
    trained(policy, 1e-3, 2)
    list(merged_weights(policy, copy_adapter(policy)))
    assert all(torch.equal(layer.weight, before[name]) for name, layer in policy.layers.items())


def test_there_is_one_copy_of_the_weights(policy):
    """The memory of the model's matrices is that of its own parameters, besides the packed copy of a CPU."""
    tensors = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in policy.model.parameters()}
    counted = sum(tensors.values())
    config = policy.model.config
    attention = config.hidden_size * (2 * config.hidden_size + 2 * config.num_key_value_heads * 64)
    layers = config.num_hidden_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    base = 2 * (layers + config.vocab_size * config.hidden_size)
    masters = sum(4 * p.numel() for p in policy.parameters())
    assert counted < 1.01 * (base + masters)
