"Bare transformers and PEFT: the forward and the backward of a padded batch, nothing else."

import time

import torch
from peft import LoraConfig, get_peft_model
from shapes import rows
from talk import serve
from transformers import AutoModelForCausalLM

HELD = {}


def setup(model: str) -> dict:
    "Load the model with a fresh adapter; LoRA stays in fp32, as PEFT leaves it."
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    HELD["model"] = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")).train()
    return {"threads": torch.get_num_threads()}


def train(shape: dict, batch: int, whole_head: bool = True) -> dict:
    "Forward and backward over all rows; with or without logits for the tokens before the first trained one."
    made, model = rows(**shape), HELD["model"]
    tokens = torch.tensor([row["tokens"] for row in made])
    sampled = torch.tensor([row["sampled"] for row in made])
    labels = tokens.masked_fill(~sampled, -100)
    first = int(sampled.any(0).int().argmax())
    keep = {} if whole_head else {"logits_to_keep": tokens.shape[1] - first + 1}
    start = time.perf_counter()
    for ids, wanted in zip(tokens.split(batch), labels.split(batch)):
        wanted = wanted if whole_head else wanted[:, first - 1 :]
        model(input_ids=ids, labels=wanted, use_cache=False, **keep).loss.backward()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return {"seconds": seconds, "tokens": tokens.numel()}


if __name__ == "__main__":
    serve({"setup": setup, "train": train})
