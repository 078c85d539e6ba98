"""Greedy replies of exported models, token by token with ours (`make test-export`).

The model is SmolLM2-135M with an adapter that was trained on a few conversations. In fp32, transformers must give the
same tokens. A file with 16-bit weights has rounded updates, so its tokens may differ where two tokens are about equally
likely: the test prints these places with the probabilities of both tokens.
"""

import pytest
import torch
from peft import PeftModel
from support.exported_replies import NEAR, NEW, QUESTIONS
from transformers import AutoModelForCausalLM

from art_nb.models.weights import fetch

pytest.importorskip("xllamacpp", reason="make test-export installs the packages")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def greedy(model, prompts):
    """The greedy replies of a model of transformers, in batches with padding on the left."""
    end, replies = model.config.eos_token_id, []
    for start in range(0, len(prompts), 25):
        batch = prompts[start : start + 25]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=end)
        replies += [cut(row[width:].tolist(), end) for row in out]
    return replies


def cut(tokens, end):
    """The tokens up to the end token."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


async def test_transformers_and_peft_give_our_tokens(replies, tmp_path):
    adapter = await replies.model.export("peft", tmp_path / "peft", progress=False)
    prompts = [prompt for prompt, _ in replies.tokens.values()]
    base = AutoModelForCausalLM.from_pretrained(fetch("smollm2-135m"), dtype=torch.float32)
    plain = replies.differences("base model", greedy(base, prompts))
    assert len(plain) > 40  # the adapter changes the replies
    tuned = PeftModel.from_pretrained(base, adapter)
    assert replies.differences("peft, fp32", greedy(tuned, prompts)) == []
    assert replies.differences("merged, fp32", greedy(replies.exact, prompts)) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_16_bit_weights_differ_only_where_two_tokens_are_equally_likely(replies, tmp_path, dtype):
    merged = await replies.model.export("merged", tmp_path / "merged", dtype=dtype, progress=False)
    loaded = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    prompts = [prompt for prompt, _ in replies.tokens.values()]
    assert all(d.nats < NEAR for d in replies.differences(f"merged, {dtype}", greedy(loaded, prompts)))


def served(file):
    """llama.cpp with a GGUF file, on one core."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.cpuparams.n_threads = str(file), 1024, 1, 1
    return xllamacpp.Server(params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_llama_cpp_gives_our_tokens(replies, tmp_path, dtype):
    server = served(await replies.model.export("gguf", tmp_path / "model.gguf", dtype=dtype, progress=False))

    def reply(prompt):
        request = {"prompt": prompt, "n_predict": NEW, "temperature": 0, "top_k": 1, "repeat_penalty": 1.0}
        done = server.handle_completions(request | {"logprobs": 1})
        return [entry["id"] for entry in done["choices"][0]["logprobs"]["content"]]

    theirs = [reply(prompt) for prompt, _ in replies.tokens.values()]
    assert all(d.nats < NEAR for d in replies.differences(f"gguf, {dtype}", theirs))
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    chat = server.handle_chat_completions({"messages": messages, "temperature": 0, "max_tokens": NEW})
    text = replies.tokenizer.decode(theirs[0], skip_special_tokens=True)
    assert chat["choices"][0]["message"]["content"].strip() == text.strip()
