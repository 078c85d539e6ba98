"""Plain transformers and PEFT: forward and backward passes of padded batches."""

import time

import torch
from peft import LoraConfig, get_peft_model
from shapes import rows
from talk import serve
from transformers import AutoModelForCausalLM

HELD = {}


def setup(model: str) -> dict:
    """Load the model with a new adapter. LoRA stays in fp32, PEFT's default."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    HELD["model"] = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")).train()
    return {"threads": torch.get_num_threads()}


def train(shape: dict, batch: int, whole_head: bool = True) -> dict:
    """Run forward and backward passes over all rows, with or without logits before the first trained token."""
    token_rows, model = rows(**shape), HELD["model"]
    tokens = torch.tensor([row["tokens"] for row in token_rows])
    sampled = torch.tensor([row["sampled"] for row in token_rows])
    labels = tokens.masked_fill(~sampled, -100)
    first = int(sampled.any(0).int().argmax())
    keep = {} if whole_head else {"logits_to_keep": tokens.shape[1] - first + 1}
    start = time.perf_counter()
    for ids, targets in zip(tokens.split(batch), labels.split(batch)):
        targets = targets if whole_head else targets[:, first - 1 :]
        model(input_ids=ids, labels=targets, use_cache=False, **keep).loss.backward()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return {"seconds": seconds, "tokens": tokens.numel()}


if __name__ == "__main__":
    serve({"setup": setup, "train": train})
