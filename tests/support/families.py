"""Tiny random models of six families, in fp32, beside transformers' own untouched copy of each."""

import copy
import functools

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from art_nb.models.tiny import tiny_model, tiny_tokenizer
from art_nb.policy.lora import Policy

VOCABULARY = 320
SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def llama():
    """The model of `tiny.py`."""
    return tiny_model(VOCABULARY)


def qwen3():
    """Norms on queries and keys, a head size of its own, biases off."""
    return Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=2, head_dim=32, tie_word_embeddings=True, **SHAPE))


def qwen3_window():
    """Qwen3 whose upper layer sees twelve tokens back; the head's weights are its own."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            num_hidden_layers=2,
            head_dim=16,
            use_sliding_window=True,
            sliding_window=12,
            max_window_layers=1,
            tie_word_embeddings=False,
            **SHAPE,
        )
    )


def gemma3():
    """Scaled embeddings and queries, windows of eight tokens in two layers of three, a soft cap on the logits."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            num_hidden_layers=3,
            head_dim=24,
            sliding_window=8,
            layer_types=kinds,
            query_pre_attn_scalar=48,
            final_logit_softcapping=20.0,
            **SHAPE,
        )
    )


def mistral():
    """Every layer sees nine tokens back; the window is in the config only."""
    return MistralForCausalLM(MistralConfig(num_hidden_layers=2, sliding_window=9, tie_word_embeddings=False, **SHAPE))


def ministral():
    """Mistral with a window in one layer of two."""
    kinds = ["sliding_attention", "full_attention"]
    return MinistralForCausalLM(
        MinistralConfig(
            num_hidden_layers=2, head_dim=16, sliding_window=9, layer_types=kinds, tie_word_embeddings=False, **SHAPE
        )
    )


def qwen2():
    """Biases on queries, keys and values; the upper layer sees ten tokens back."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            num_hidden_layers=2,
            use_sliding_window=True,
            sliding_window=10,
            max_window_layers=1,
            tie_word_embeddings=True,
            **SHAPE,
        )
    )


FAMILIES = {
    "llama": llama,
    "mistral": mistral,
    "ministral": ministral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_window": qwen3_window,
    "gemma3": gemma3,
}


@functools.cache
def plain(family: str):
    """transformers' own model; nobody may change it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = FAMILIES[family]().float().eval()
        for name, p in model.named_parameters():  # norms of one, biases of zero would hide mistakes
            p.data += torch.randn_like(p) * (0.3 if "norm" in name else 0.05)
    model.generation_config.eos_token_id = 2
    return model.requires_grad_(False)


@functools.cache
def tokenizer():
    """The byte-level tokenizer of `tiny.py`."""
    return tiny_tokenizer()


def policy(family: str, **options) -> Policy:
    """Our policy over a copy of the plain model."""
    return Policy(copy.deepcopy(plain(family)), tokenizer(), **options)


def random_adapter(policy: Policy, seed: int, size: float = 0.15):
    """An adapter whose every number is drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {f"{name}.lora_{k}.weight": getattr(layer, k).shape for name, layer in policy.layers.items() for k in "AB"}
    return {name: torch.randn(shape, generator=generator) * size for name, shape in shapes.items()}


def merged(family: str, policy: Policy, adapter) -> torch.nn.Module:
    """transformers' own model with the adapter added to its weights."""
    model = copy.deepcopy(plain(family))
    for name, layer in policy.layers.items():
        A, B = adapter[f"{name}.lora_A.weight"], adapter[f"{name}.lora_B.weight"]
        model.get_submodule(name).weight.data += layer.scale * B @ A
    return model


@torch.no_grad()
def logits(model, ids: list[int]) -> torch.Tensor:
    """fp32 logits [T, vocabulary] of one sequence, by transformers alone."""
    return model(input_ids=torch.tensor([ids])).logits[0].float()
