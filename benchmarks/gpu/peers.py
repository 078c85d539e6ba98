"""Other trainers on the same rows, if they are installed in this environment."""

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from envs import CACHE
from talk import Child

from gpu.common import CUDA, Empty, need_package

LARGE, LITTLE = {"groups": 8, "size": 8, "prompt": 256, "new": 128}, {"groups": 2, "size": 4, "prompt": 16, "new": 4}
SHAPE = LARGE if CUDA else LITTLE


def tokens_per_second(child: Child, key: str, request: dict) -> float:
    """Return the median of three replies after one warm-up request."""
    replies = [child.ask(**request) for _ in range(4)][1:]
    return statistics.median(reply["tokens"] / reply[key] for reply in replies)


def trl(model: Path) -> Iterator[dict]:
    """Yield tokens per second of TRL's `GRPOTrainer` and of our learner on the same rows."""
    version = need_package("trl", "TRL")
    logs, size = CACHE / "logs", {name: SHAPE[name] for name in ("groups", "size", "new")}
    peer = Child(sys.executable, "peers/trl_peer.py", logs / "gpu-trl.log")
    try:
        peer.ask("setup", model=str(model), micro=8, checkpointing=False, **size)
        theirs = tokens_per_second(peer, "train_seconds", {"do": "step", "given": SHAPE})
    finally:
        peer.close()
    ours = Child(sys.executable, "ours/learner.py", logs / "gpu-ours.log")
    try:
        ours.ask("setup", model=str(model))
        request = {"do": "train", "shape": SHAPE}
        unshared, shared = (tokens_per_second(ours, "seconds", request | {"share": s}) for s in (False, True))
    finally:
        ours.close()
    yield {"TRL": version, "TRL tokens/s": theirs, "ours tokens/s": unshared, "ours, common prompts once": shared}


def prime_rl(model: Path) -> Iterator[dict]:
    """Yield nothing: benchmarks/peers has no script for prime-rl yet."""
    version = need_package("prime_rl", "prime-rl")
    raise Empty(f"prime-rl {version} is installed, but benchmarks/peers has no script for it")
    yield
