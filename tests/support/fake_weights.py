"""Models of real size without memory: fake tensors on the fake GPU, and the bytes that are alive at each moment."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from support import fake_gpu
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

from art_nb.policy.packing import WeightedRow

GB = 1e9
QWEN3 = dict(num_key_value_heads=8, head_dim=128, vocab_size=151936)
CONFIGS = {  # from each model's config.json
    "Qwen3-0.6B": lambda: Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
        **QWEN3,
    ),
    "Qwen2.5-3B": lambda: Qwen2Config(
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "Qwen3-4B": lambda: Qwen3Config(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=True,
        **QWEN3,
    ),
    "Gemma-3-4B": lambda: Gemma3TextConfig(
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=34,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        vocab_size=262208,
        sliding_window=1024,
    ),
    "Qwen2.5-7B": lambda: Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        tie_word_embeddings=False,
    ),
    "Llama-3.1-8B": lambda: LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
    ),
    "Qwen2.5-14B": lambda: Qwen2Config(
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=152064,
        tie_word_embeddings=False,
    ),
}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages on the device that are alive, and their largest sum."""

    def __init__(self):
        super().__init__()
        self.known, self.now, self.peak, self.largest = weakref.WeakKeyDictionary(), 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor):
                leaf.constant = None  # PyTorch would compute with it, which fails on a device that is written in Python
                if leaf.device.type == fake_gpu.NAME:
                    self.add(leaf.untyped_storage())
        return result

    def add(self, storage) -> None:
        """Count a storage until it is freed."""
        if storage in self.known:
            return
        size = storage.nbytes()
        self.known[storage] = size
        self.now, self.largest = self.now + size, max(self.largest, size)
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.freed, size)

    def freed(self, size: int) -> None:
        """Subtract a storage that was freed."""
        self.now -= size


def fake_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Call the kernel that CUDA would choose: flash without a mask, otherwise the memory-efficient one."""
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]
    bias = attn_mask.expand(*q.shape[:3], k.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, is_causal, scale=scale)[0]


@contextmanager
def fake_tensors(monkeypatch) -> Iterator[FakeTensorMode]:
    """Create tensors without memory inside the context."""
    with monkeypatch.context() as patched, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        patched.setattr(F, "scaled_dot_product_attention", fake_attention)
        for name in ("uniform_", "normal_"):  # they read the generator's state
            patched.setattr(torch.Tensor, name, lambda self, *args, **options: self)
        yield mode


def fake_model(name: str):
    """Return a causal language model in bf16 whose weights are fake tensors on the device."""
    config = CONFIGS[name]()
    config.max_position_embeddings = 131072
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    on_device = lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=fake_gpu.NAME)
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, key, torch.nn.Parameter(on_device(parameter), requires_grad=False))
        for key, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, key, on_device(buffer))
    model.tie_weights()
    return model


def rows_of(count: int, shared: int, own: int) -> list[WeightedRow]:
    """Return rows of one group with a common prefix. All tokens of their own are trained."""
    draw, rows = np.random.default_rng(0), []
    prefix = draw.integers(3, 1000, shared)
    for _ in range(count):
        tokens = np.concatenate([prefix, draw.integers(3, 1000, own)]).astype(np.int32)
        sampled = np.arange(len(tokens)) >= shared
        rows.append(WeightedRow(tokens, sampled, np.where(sampled, -8.0, np.nan).astype(np.float32), advantage=1.0))
    return rows
