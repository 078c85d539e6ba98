"""Our learner alone: optimizer steps, their number of operations, the peak of the processor, tokenizing and packing."""

import json
import random
import statistics
import time
from functools import cache
from pathlib import Path

import numpy as np
import torch
from shapes import between, ids, opening, packed, rows
from talk import serve
from transformers import AutoTokenizer

import art_nb as art
from art_nb.learners.base import Learner, StepConfig, train_rows
from art_nb.policy.kernels import multiplies_bf16
from art_nb.policy.loading import load_policy
from art_nb.policy.packing import WeightedRow, micro_batches
from art_nb.tokens.rows import group_rows

HELD = {}


def setup(model: str) -> dict:
    """Load the model with a new adapter."""
    HELD["learner"] = Learner(load_policy(model))
    return {"threads": torch.get_num_threads()}


@cache
def _rows(shape: str) -> tuple[list[WeightedRow], dict]:
    token_rows, random_ = rows(**json.loads(shape)), random.Random(0)
    trained = sum(sum(row["sampled"]) for row in token_rows)
    weighted_rows = []
    for row in token_rows:
        sampled = np.array(row["sampled"])
        logprobs = np.where(sampled, -5, np.nan).astype(np.float32)
        weighted_rows.append(
            WeightedRow(
                np.array(row["tokens"], np.int32), sampled, logprobs, row["group"], random_.gauss(0, 1), 1 / trained
            )
        )
    return weighted_rows, {"tokens": sum(len(row["tokens"]) for row in token_rows), "trained": trained}


def train(shape: dict, share: bool = True) -> dict:
    """Run a whole optimizer step."""
    weighted_rows, counts = _rows(json.dumps(shape))
    start = time.perf_counter()
    metrics = HELD["learner"].step(weighted_rows, StepConfig(learning_rate=0.0, share_prefixes=share))
    return {"seconds": time.perf_counter() - start, "computed": metrics["data/step_trainer_tokens"], **counts}


def arithmetic(shape: dict, share: bool = True) -> dict:
    """Return the floating-point operations that a step on these rows requires."""
    policy, counts = HELD["learner"].policy, packed(rows(**shape), share)
    config = policy.model.config
    sizes = {name: (layer.A.shape[1], layer.B.shape[0]) for name, layer in policy.layers.items()}
    linear, lora = sum(a * b for a, b in sizes.values()), policy.rank * sum(a + b for a, b in sizes.values())
    first = [a * b for name, (a, b) in sizes.items() if ".layers.0." in name and name[-6:-5] in "qkv"]
    inputs = linear - sum(first)  # the gradient of the embedding is not needed
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    head = policy.model.get_output_embeddings().weight.numel()
    return {
        "flops": 2 * counts["tokens"] * (linear + inputs + 2 * lora)
        + 12 * counts["pairs"] * width
        + 4 * counts["trained"] * head
    }


def gemm() -> dict:
    """Return the GFLOP/s of products: the best of five shapes, each the median of nine runs.

    They are in the learner's dtype, or in fp32 on processors that cannot multiply bf16 numbers.
    """
    gflops, policy = {}, HELD["learner"].policy
    dtype = policy.dtype if multiplies_bf16(policy.device) else torch.float32
    for m, k, n in ((2048, 2048, 2048), (1024, 1024, 1024), (4096, 2048, 2048), (1024, 576, 1536), (4096, 576, 1536)):
        a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        times = []
        for _ in range(10):
            start = time.perf_counter()
            a @ b
            times.append(time.perf_counter() - start)
        gflops[f"{m}x{k}x{n}"] = 2 * m * k * n / statistics.median(times[1:]) / 1e9
    return {"gflops": max(gflops.values()), "shapes": gflops}


def write(model: str, path: str, groups: int, size: int, prompt: int, turns: int, new: int, gap: int) -> dict:
    """Write trajectories with IDs and logprobs to a file that both sides read."""
    tokenizer, groups_json = AutoTokenizer.from_pretrained(model), []
    for group in range(groups):
        conversations = [
            _conversation(tokenizer, group, 1000 * group + i, prompt, turns, new, gap) for i in range(size)
        ]
        groups_json.append([{"messages_and_choices": t, "reward": float(i % 2)} for i, t in enumerate(conversations)])
    Path(path).write_text(json.dumps(groups_json))
    HELD["groups"] = [art.TrajectoryGroup([art.Trajectory(**t) for t in group]) for group in groups_json]
    return {}


def _conversation(tokenizer, group: int, seed: int, prompt: int, turns: int, new: int, gap: int) -> list[dict]:
    entries, encode = opening(group, prompt), lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt_ids = tokenizer.apply_chat_template(entries, add_generation_prompt=True, return_dict=False)
    for turn in range(turns):
        if turn:
            entries.append(between(seed + turn, gap))
            prompt_ids += encode(f"\n<|im_start|>user\n{entries[-1]['content']}<|im_end|>\n<|im_start|>assistant\n")
        sampled_ids = [*ids(seed * 31 + turn, new - 1), tokenizer.eos_token_id]
        content = [
            {
                "token": f"token_id:{t}",
                "logprob": -1.5,
                "bytes": list(tokenizer.decode([t]).encode()),
                "top_logprobs": [],
            }
            for t in sampled_ids
        ]
        entries.append(
            {
                "index": 0,
                "finish_reason": "stop",
                "logprobs": {"content": content, "refusal": None},
                "message": {"role": "assistant", "content": tokenizer.decode(sampled_ids[:-1])},
                "prompt_token_ids": prompt_ids,
                "token_ids": sampled_ids,
            }
        )
        prompt_ids = prompt_ids + sampled_ids
    return entries


def history(tokens: int, turns: int = 8, new: int = 32) -> dict:
    """Prepare two trajectories of `tokens` tokens in total for `pack`. They share half of the first prompt."""
    share, trajectories = tokens // (2 * turns), []
    for seed in (1, 2):
        prompt_ids, entries = ids(0, share // 2) + ids(seed, share - share // 2 - new), []
        for turn in range(turns):
            prompt_ids = prompt_ids + (ids(seed + 10 * turn, share - new) if turn else [])
            sampled_ids = ids(seed + 10 * turn + 5, new)
            entries += [
                {"role": "user", "content": "Go on."},
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": "Well."},
                    "prompt_token_ids": prompt_ids,
                    "token_ids": sampled_ids,
                    "token_logprobs": [-1.5] * new,
                },
            ]
            prompt_ids = prompt_ids + sampled_ids
        trajectories.append(art.Trajectory(messages_and_choices=entries, reward=float(seed)))
    HELD["groups"] = [art.TrajectoryGroup(trajectories)]
    return {}


def pack() -> dict:
    """Convert trajectories into the micro-batches of the learner."""
    config, groups = StepConfig(), HELD["groups"]
    start = time.perf_counter()
    rows_of_groups = [group_rows(group) for group in groups]
    middle = time.perf_counter()
    weighted_rows = train_rows([[t.reward for t in group] for group in groups], rows_of_groups, config)
    batches = micro_batches(weighted_rows, config.tokens_per_batch, config.share_prefixes)
    end = time.perf_counter()
    return {
        "seconds": end - start,
        "tokenize_seconds": middle - start,
        "tokens": sum(len(r.tokens) for r in weighted_rows),
        "trained": sum(int(r.sampled.sum()) for r in weighted_rows),
        "computed": sum(len(b.tokens_S) for b in batches),
    }


if __name__ == "__main__":
    serve(
        {
            "setup": setup,
            "train": train,
            "arithmetic": arithmetic,
            "gemm": gemm,
            "write": write,
            "history": history,
            "pack": pack,
        }
    )
