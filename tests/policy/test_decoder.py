"""The decoder without gradients computes what the modules compute, for each family, number of tokens and adapter."""

import copy

import pytest
import torch
from support.families import FAMILIES, SHAPE, VOCABULARY, plain
from transformers import LlamaConfig, LlamaForCausalLM

from art_nb.policy.adapters import copy_adapter, load_adapter
from art_nb.policy.kernels import packed_dtypes, packs
from art_nb.policy.kv_cache import KVSlots
from art_nb.policy.lora import TARGETS, Policy, modules_only
from art_nb.policy.packing import Segment, tree_attention

COMPUTED = [family for family in FAMILIES if family != "ministral"]


def policy_of(family, dtype=torch.float32):
    """A new policy whose adapter is not zero."""
    policy = Policy(copy.deepcopy(plain(family)).to(dtype))
    generator = torch.Generator().manual_seed(0)
    load_adapter(policy, {n: 0.1 * torch.randn(t.shape, generator=generator) for n, t in copy_adapter(policy).items()})
    return policy


def with_and_without(policy, compute):
    """The result of the decoder and that of the modules."""
    assert policy.has_decoder
    with torch.inference_mode():
        ours = compute()
        with modules_only(policy):
            return ours, compute()


def parts_of(policy, n):
    """The trained adapter, the base model, another adapter, and all of them in one pass."""
    other = policy.cast({name: 0.5 * t for name, t in copy_adapter(policy).items()})
    several = [(weights, torch.arange(n)[i::3]) for i, weights in enumerate((None, other, policy.working))]
    return None, [(None, None)], [(other, None)], [part for part in several if len(part[1])]


def decoded(policy, counts, parts):
    """Hidden states, keys and values after `counts` new tokens in running conversations, both ways."""
    slots = KVSlots(policy.model.config, policy.dtype, policy.device, 1 << 24)
    assert slots.room(len(counts), 64)
    stored, tokens = slots.kv.normal_().clone(), torch.randint(0, VOCABULARY, (sum(counts),))
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    positions = torch.cat([torch.arange(17, 17 + k) for k in counts])

    def compute():
        slots.kv.copy_(stored)
        hidden = policy.hidden(tokens, positions, slots.attention(owner, positions, counts), parts)
        return hidden, slots.kv.clone()

    return zip(*with_and_without(policy, compute), strict=True)


@pytest.mark.parametrize("family", COMPUTED)
def test_new_tokens_of_running_conversations(family):
    policy = policy_of(family)
    for counts in ([1], [1] * 3, [1] * 20, [5, 1, 7, 1], [1, 1, 30]):
        for parts in parts_of(policy, sum(counts)):
            for ours, theirs in decoded(policy, counts, parts):
                assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_processor_without_bf16_packs_float32(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    packed_dtypes.cache_clear()
    try:
        assert packs(torch.zeros(1)) and not packs(torch.zeros(1, dtype=torch.bfloat16))
    finally:
        packed_dtypes.cache_clear()


@pytest.mark.skipif(torch.bfloat16 not in packed_dtypes(), reason="this processor does not pack bf16")
@pytest.mark.parametrize("family", COMPUTED)
def test_packed_rows_in_bf16(family):
    policy, n = policy_of(family, torch.bfloat16), 40
    tokens, before = torch.randint(0, VOCABULARY, (n,)), torch.arange(0)
    segments = [Segment(0, 24, before), Segment(24, 40, torch.arange(10))]
    positions = torch.cat([torch.arange(24), torch.arange(10, 26)])

    def compute():
        return policy.logits(policy.hidden(tokens, positions, tree_attention(segments))).log_softmax(-1)

    ours, theirs = with_and_without(policy, compute)
    assert (ours - theirs).abs().max() < 0.1 and (ours - theirs).abs().mean() < 0.01


def test_biases_of_every_projection():
    config = LlamaConfig(num_hidden_layers=2, attention_bias=True, mlp_bias=True, **SHAPE)
    model = LlamaForCausalLM(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    policy, tokens = Policy(model), torch.randint(0, VOCABULARY, (9,))
    attend = tree_attention([Segment(0, 9, tokens[:0])])
    ours, theirs = with_and_without(policy, lambda: policy.hidden(tokens, torch.arange(9), attend))
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_the_modules_compute_what_the_decoder_does_not_know(monkeypatch):
    assert not Policy(copy.deepcopy(plain("ministral"))).has_decoder  # another family
    for targets in (TARGETS[:4], TARGETS[4:], TARGETS[1:]):  # projections without an adapter
        assert not Policy(copy.deepcopy(plain("llama")), targets=targets).has_decoder
    monkeypatch.setattr("art_nb.policy.lora.packs", lambda weight: False)  # a GPU
    assert not Policy(copy.deepcopy(plain("llama"))).has_decoder


def test_gradients_are_those_of_the_modules():
    policy, tokens = policy_of("llama"), torch.arange(8)
    hidden = policy.hidden(tokens, tokens, tree_attention([Segment(0, 8, tokens[:0])]))
    hidden.sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in policy.parameters())
