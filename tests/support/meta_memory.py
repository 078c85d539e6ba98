"""Bytes that a forward and backward pass would allocate, counted on the `meta` device."""

import weakref
from dataclasses import dataclass

import torch
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from art_nb.policy.architectures import model_class
from art_nb.policy.lora import Policy

CONFIGS = {  # sizes from the config.json of each model
    "Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True, 32768),
    "Qwen2.5-3B": ("qwen2", 2048, 11008, 36, 16, 2, 128, 151936, True, 32768),
    "Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True, 40960),
    "Gemma 3 4B": ("gemma3_text", 2560, 10240, 34, 8, 4, 256, 262208, True, 131072),
    "Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False, 32768),
    "Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, False, 131072),
    "Qwen2.5-14B": ("qwen2", 5120, 13824, 48, 40, 8, 128, 152064, False, 32768),
}
NAMES = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size"
    " tie_word_embeddings max_position_embeddings"
).split()


def config(name, **changes):
    """The config of a model, without files."""
    kind, *values = CONFIGS[name]
    return AutoConfig.for_model(kind, **dict(zip(NAMES, values, strict=True)) | changes)


def meta_model(name, dtype=torch.bfloat16, **changes):
    """The whole model on the `meta` device."""
    text = config(name, **changes)
    with torch.device("meta"):
        model = model_class(text)(text).to(dtype)
        model.tie_weights()
    return model


def storage_bytes(tensors):
    """Bytes of the distinct storages of tensors."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of all live storages that operations create, and their peak."""

    def __init__(self, existing):
        super().__init__()
        self.existing = [tensor.untyped_storage() for tensor in existing]
        self.sizes = {storage._cdata: 0 for storage in self.existing}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage):
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.drop, key)

    def drop(self, key):
        self.now -= self.sizes.pop(key)


class VarlenAttention(Function):
    """What flash attention keeps: queries, keys, values, its output, and a number for each token and head."""

    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors[:3])


@dataclass
class PassBytes:
    """Bytes of a pass: kept after the last layer, and peaks of the scores and of the whole pass."""

    stored: int
    scores: int
    peak: int


def measure_pass(name, tokens, *, keys=None, checkpointing=False, dtype=torch.bfloat16, rank=8, **changes):
    """Run our forward and backward pass on the `meta` device and count its bytes."""
    model = meta_model(name, dtype, **changes)
    with torch.device("meta"):
        policy = Policy(model, rank=rank)
        head = policy._head()
        ids, selected = torch.empty(tokens, dtype=torch.long), torch.empty(keys or 0, dtype=torch.long)
        if checkpointing:
            for layer in model.model.layers:
                recompute(layer)

        def attend(layer, q, k, v, scale, window):
            return VarlenAttention.apply(q, *(t.index_select(0, selected) if keys else t for t in (k, v)))

        adapters = [master for layer in policy.layers.values() for master in (layer.A, layer.B)]
        weights = [*model.parameters(), *model.buffers()]
        with MemoryTracker([*weights, *adapters, getattr(head, "weight", head), ids, selected]) as memory:
            hidden = policy.hidden(ids, ids, attend)
            stored, memory.peak = memory.now, memory.now
            logprobs, entropies = policy.scores(hidden, ids, 1.0)
            scores, memory.peak = memory.peak - stored, max(memory.peak, memory.now)
            loss = logprobs.sum() + entropies.sum()
            del hidden, logprobs, entropies
            loss.backward()
            memory.now -= storage_bytes([m.grad for m in adapters])
    return PassBytes(stored, scores, memory.peak)


def recompute(layer):
    """Checkpoint a decoder layer."""
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: checkpoint(
        forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
    )
