"""Greedy replies of exported models in vLLM, token by token with ours (`make test-export`).

In fp32, vLLM must give the same tokens. In bf16, its tokens may differ where two tokens are about equally likely: the
test prints these places with the probabilities of both tokens. Without `dtype`, vLLM computes in bf16 in both cases.
"""

import gc
import os

import pytest

pytest.importorskip("vllm", reason="make test-export installs it")

from support.exported_replies import NEAR, NEW

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_vllm_gives_our_tokens(replies, tmp_path, dtype):
    from vllm import LLM, SamplingParams

    merged = await replies.model.export("merged", tmp_path / "merged", dtype=dtype, progress=False)
    llm = LLM(str(merged), dtype=dtype, max_model_len=256, enforce_eager=True, max_num_seqs=50)
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in replies.tokens.values()]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW), use_tqdm=False)
    theirs = [[*output.outputs[0].token_ids] for output in outputs]
    del llm
    gc.collect()
    different = replies.differences(f"vLLM, {dtype}", theirs)
    assert all(d.nats < NEAR for d in different)
    if dtype == "float32":
        assert not different
