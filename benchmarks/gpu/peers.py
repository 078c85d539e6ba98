"""Other trainers on the same rows, if they are installed in this environment."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from envs import CACHE
from talk import HERE, Child

from gpu.common import CUDA, REPEATS, Empty, need_package

LARGE, LITTLE = {"groups": 8, "size": 8, "prompt": 256, "new": 128}, {"groups": 2, "size": 4, "prompt": 16, "new": 4}
SHAPE = LARGE if CUDA else LITTLE


def child(script: str, log: str) -> Child:
    """Return a process of a script with this Python and its search path."""
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    return Child(sys.executable, script, CACHE / "logs" / log, PYTHONPATH=path)


def tokens_per_second(process: Child, key: str, request: dict) -> float:
    """Return the median of the replies after one warm-up request."""
    replies = [process.ask(**request) for _ in range(1 + REPEATS)][1:]
    return statistics.median(reply["tokens"] / reply[key] for reply in replies)


def trl(model: Path) -> Iterator[dict]:
    """Yield tokens per second of TRL's `GRPOTrainer` and of our learner on the same rows."""
    version = need_package("trl", "TRL")
    size = {name: SHAPE[name] for name in ("groups", "size", "new")}
    peer = child("peers/trl_peer.py", "gpu-trl.log")
    try:
        peer.ask("setup", model=str(model), micro=8, checkpointing=False, **size)
        theirs = tokens_per_second(peer, "train_seconds", {"do": "step", "given": SHAPE})
    finally:
        peer.close()
    ours = child("ours/learner.py", "gpu-ours.log")
    try:
        ours.ask("setup", model=str(model))
        request = {"do": "train", "shape": SHAPE}
        unshared, shared = (tokens_per_second(ours, "seconds", request | {"share": s}) for s in (False, True))
    finally:
        ours.close()
    yield {"TRL": version, "TRL tokens/s": theirs, "ours tokens/s": unshared, "ours, common prompts once": shared}


PRIME_SCRIPT = "benchmarks/scripts/run_single_benchmark.py"
PRIME_MODELS = {"Qwen3-0.6B": "Qwen/Qwen3-0.6B", "Qwen3-4B": "Qwen/Qwen3-4B-Instruct-2507"}  # as in its baselines
PRIME_OPTIONS = "--type rl --num-gpus 1 --lora-rank 16 --seq-len 16384 --ac Recompute --attention flash_attention_2"


def prime_shape(checkout: Path, name: str) -> dict:
    """Run prime-rl's own benchmark of its RL trainer on random tokens: LoRA rank 16, rows of 16,384 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = ["uv", "run", "python", PRIME_SCRIPT, *PRIME_OPTIONS.split(), "--timeout", "240"]
        command += ["--model-name", name, "--output", str(output)]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
        if not output.exists():
            raise RuntimeError(f"prime-rl's benchmark ended with exit code {done.returncode}: {done.stderr[-500:]}")
        result = json.loads(output.read_text(encoding="utf-8"))
    config, metrics = result["config"], result["metrics"]
    if not config["success"]:
        return {"error": config["error_reason"]}
    return {
        "tokens/s": metrics["throughput"]["mean"],
        "MFU": metrics["mfu"]["mean"] / 100,
        "peak GB": metrics["peak_memory"]["gib"] * 2**30 / 1e9,
    }


def prime_rl(model: Path) -> Iterator[dict]:
    """Yield tokens per second, MFU and memory of prime-rl's trainer at the shapes of the row `trainer`."""
    checkout = Path(os.environ.get("PRIME_RL", ""))
    if not (checkout / PRIME_SCRIPT).is_file():
        raise Empty("prime-rl is not on PyPI. Set PRIME_RL to a checkout of its repository in which `uv sync` has run")
    yield {name: prime_shape(checkout, full_name) for name, full_name in PRIME_MODELS.items()}
