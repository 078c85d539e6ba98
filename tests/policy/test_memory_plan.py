"""The memory plan: what fits on which card, and byte counts beside those of torch on the `meta` device."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.meta_memory import CONFIGS, config, measure_pass, meta_model, storage_bytes
from transformers import AutoConfig

from art_nb.core.types import TrainError
from art_nb.policy.architectures import model_class
from art_nb.policy.lora import Policy
from art_nb.policy.memory_plan import (
    MemorySettings,
    activation_bytes,
    adapter_bytes,
    free_memory,
    kv_token_bytes,
    logit_bytes,
    model_shape,
    plan_for_length,
    plan_memory,
    plan_summary,
    prefill_token_bytes,
    weight_bytes,
)

ROOT = Path(__file__).parents[2]
SHAPES = {name: model_shape(config(name), name) for name in CONFIGS}
CARDS = {"T4": 14.7, "L4": 24, "A100 40": 40, "A100 80": 80, "H100": 80, "H200": 141}  # GiB
ENGINES = {
    "embedded": {},
    "vllm": {"sampler": "vllm"},
    "vllm, a copy": {"sampler": "vllm", "own_weights": frozenset({"vllm"})},
    "vllm and unsloth": {"sampler": "vllm", "learner": "unsloth"},
    "vllm and unsloth, 4 bits": {"sampler": "vllm", "learner": "unsloth", "load_in_4bit": True},
}
# Rows of 4,096 tokens, 16 conversations at once, rank 16. F: fits. c: fits with checkpointing. -: refused.
# One letter for each card, and one row for each model in the order of CONFIGS.
TWO_BYTES = {
    "embedded": "FFFFFF ccFFFF ccFFFF ccFFFF -ccFFF -ccFFF --cFFF",
    "vllm": "FFFFFF ccFFFF ccFFFF ccFFFF -ccFFF -ccFFF --cFFF",
    "vllm, a copy": "FFFFFF -cFFFF -ccFFF -ccFFF --cFFF --cFFF ---ccF",
    "vllm and unsloth": "cccccc cccccc cccccc cccccc -ccccc -ccccc --cccc",
    "vllm and unsloth, 4 bits": "cccccc cccccc cccccc cccccc cccccc cccccc -ccccc",
}
FOUR_BYTES = {
    "embedded": "FFFFFF -ccFFF -ccFFF -ccFFF --cccF --cccF ---ccc",
    "vllm": "FFFFFF -ccFFF -ccFFF -ccFFF --cccF --cccF ---ccc",
    "vllm, a copy": "cFFFFF --cFFF --cccF --cFFF ---ccF ---ccF -----c",
    "vllm and unsloth": "cccccc -ccccc -ccccc -ccccc --cccc --cccc ---ccc",
    "vllm and unsloth, 4 bits": "cccccc cccccc cccccc cccccc -ccccc -ccccc --cccc",
}
TABLES = {torch.bfloat16: TWO_BYTES, torch.float16: TWO_BYTES, torch.float32: FOUR_BYTES}


def letter(shape, gib, settings):
    try:
        plan = plan_memory(shape, int(gib * 2**30), settings)
    except TrainError:
        return "-"
    assert plan.fits
    assert plan.needed == sum(plan.parts.values())
    return "c" if plan.checkpointing else "F"


@pytest.mark.parametrize("engines", ENGINES)
@pytest.mark.parametrize("dtype", TABLES, ids=str)
def test_what_fits_on_which_card(dtype, engines):
    settings = MemorySettings(dtype=dtype, rank=16, max_running=16, max_model_len=4096, **ENGINES[engines])
    rows = ("".join(letter(shape, gib, settings) for gib in CARDS.values()) for shape in SHAPES.values())
    assert dict(zip(SHAPES, rows)) == dict(zip(SHAPES, TABLES[dtype][engines].split(), strict=True))


def documented_table():
    """The table of docs/gpu.md: embedded, vLLM, and vLLM with Unsloth in 4 bits."""
    shown = [TWO_BYTES[name].split() for name in ("embedded", "vllm", "vllm and unsloth, 4 bits")]
    lines = [["", *CARDS], ["---"] * (len(CARDS) + 1)]
    lines += [[name, *map(" ".join, zip(*rows, strict=True))] for name, *rows in zip(CONFIGS, *shown, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_documented_table_is_this_one():
    assert documented_table() in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")


# bytes, beside those of torch


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_are_those_of_transformers(name, dtype):
    model = meta_model(name, dtype)
    assert SHAPES[name].parameters == sum(p.numel() for p in model.parameters())
    assert weight_bytes(SHAPES[name], MemorySettings(dtype=dtype)) == storage_bytes(model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_is_that_of_the_policy(name):
    with torch.device("meta"):
        policy = Policy(meta_model(name, num_hidden_layers=2), rank=16)
    masters = [master for layer in policy.layers.values() for master in (layer.A, layer.B)]
    shape = replace(SHAPES[name], layers=2)
    each = adapter_bytes(shape, MemorySettings(rank=16)) / sum(m.numel() for m in masters)
    assert each == 42  # master 4, gradient 4, moments 8, undo 12, working copy 2, two served copies 12
    partly = adapter_bytes(shape, MemorySettings(rank=16, targets=("q_proj", "v_proj")))
    assert 0 < partly < adapter_bytes(shape, MemorySettings(rank=16)) / 4


def test_a_policy_has_one_copy_of_the_weights():
    with torch.device("meta"):
        policy = Policy(meta_model("Qwen2.5-0.5B"), rank=16)
    policy._head()
    adapters = {id(master) for layer in policy.layers.values() for master in (layer.A, layer.B)}
    tensors = [p for p in policy.model.parameters() if id(p) not in adapters]
    tensors += [value for layer in policy.layers.values() for value in vars(layer).values() if torch.is_tensor(value)]
    planned = weight_bytes(SHAPES["Qwen2.5-0.5B"], MemorySettings())
    assert planned == pytest.approx(storage_bytes(tensors), rel=0.1)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointing"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_needs_what_torch_would_allocate(name, checkpointing):
    real = measure_pass(name, 4096, checkpointing=checkpointing, num_hidden_layers=6)
    shape = replace(SHAPES[name], layers=6)
    planned = activation_bytes(shape, 2, 4096, checkpointing=checkpointing, chunk=128)
    last = 2 * 2 * shape.hidden * 4096 if checkpointing else 0  # the last norm's input and output: until the scores
    assert planned.stored + last == pytest.approx(real.stored, rel=0.1)
    assert logit_bytes(shape, 4096, 128) == pytest.approx(real.scores, rel=0.1)
    assert planned.total == pytest.approx(real.peak, rel=0.1)


@pytest.mark.parametrize(
    ("name", "tokens", "keys", "limit"),
    [
        ("Qwen3-4B", 16384, None, 6e9),
        ("Qwen2.5-7B", 4096 + 8 * 1024, 4096 + 8 * (4096 + 1024), 8e9),
        ("Llama-3.1-8B", 4096 + 8 * 1024, 4096 + 8 * (4096 + 1024), 8e9),
    ],
    ids=["a row of 16K", "a group of 7B", "a group of 8B"],
)
def test_long_rows_and_groups_fit_with_checkpointing(name, tokens, keys, limit):
    real = measure_pass(name, tokens, keys=keys, checkpointing=True)
    planned = activation_bytes(SHAPES[name], 2, tokens, keys, checkpointing=True, chunk=128)
    assert planned.total == pytest.approx(real.peak, rel=0.1)
    assert max(planned.total, real.peak) <= limit


def test_rows_in_float32_and_of_gemma():
    for name in ("Gemma 3 4B", "Qwen2.5-0.5B"):
        real = measure_pass(name, 1024, dtype=torch.float32)
        planned = activation_bytes(SHAPES[name], 4, 1024, chunk=128)
        assert planned.total == pytest.approx(real.peak, rel=0.1)


# decisions


def on(name, gib, **changes):
    return plan_memory(SHAPES[name], int(gib * 2**30), MemorySettings(rank=16, **changes))


def test_the_plan_uses_what_is_left_for_the_cache_and_for_larger_batches():
    small, large = on("Qwen3-4B", 24, sampler="vllm"), on("Qwen3-4B", 80, sampler="vllm")
    assert small.checkpointing
    assert large.checkpointing
    assert small.kv_bytes < large.kv_bytes == 64 * 2048 * kv_token_bytes(SHAPES["Qwen3-4B"], 2)
    assert small.tokens_per_batch < large.tokens_per_batch == 16384
    assert large.prefill_tokens == 8192
    assert small.logit_chunk < large.logit_chunk


def test_lengths_are_capped_only_if_none_is_requested():
    assert on("Llama-3.1-8B", 80).max_model_len == 16384  # its context holds 131,072 tokens
    assert on("Llama-3.1-8B", 80, max_model_len=65536).max_model_len == 65536
    assert on("Qwen2.5-3B", 80, max_model_len=10**6).max_model_len == 32768
    assert on("Gemma 3 4B", 14.7).max_model_len < 16384
    with pytest.raises(TrainError, match="16,384 tokens"):
        on("Gemma 3 4B", 14.7, max_model_len=16384)


@pytest.mark.parametrize(
    ("name", "gib", "changes", "advice"),
    [
        ("Qwen3-4B", 14.7, {"max_model_len": 16384, "max_running": 16}, "max_model_len=4096"),
        ("Qwen2.5-7B", 20, {"max_running": 256, "max_model_len": 2048}, "max_running=64"),
        ("Qwen2.5-14B", 24, {}, 'sampler="vllm", learner="unsloth" and init_args={"load_in_4bit": True}'),
        (
            "Qwen2.5-7B",
            18.5,
            {"sampler": "vllm", "own_weights": frozenset({"vllm"}), "max_running": 8},
            'sampler="transformers"',
        ),
        ("Qwen2.5-14B", 24, {"dtype": torch.float16}, "a model with at most "),
    ],
    ids=lambda value: "",
)
def test_a_refusal_says_what_would_fit(name, gib, changes, advice):
    with pytest.raises(TrainError) as refused:
        on(name, gib, **changes)
    text = str(refused.value)
    assert text.startswith(name)
    assert "does not fit into the memory of the cuda device" in text
    assert f"{gib * 2**30 / 1e9:.1f} GB are free" in text
    assert advice in text.partition("What would fit: ")[2]


def test_the_advice_fits():
    on("Qwen3-4B", 14.7, max_model_len=4096, max_running=16)
    on("Qwen2.5-14B", 24, sampler="vllm", learner="unsloth", load_in_4bit=True)
    on("Qwen2.5-7B", 18.5, max_running=8)


def test_the_embedded_sampler_alone_needs_the_memory_of_its_longest_prompt():
    shape, size = SHAPES["Qwen3-4B"], 2
    alone = MemorySettings(sampler="transformers", learner=None, device_name="cuda:0", max_running=1)
    short, long = (plan_for_length(shape, 80 << 30, alone, length).parts["working memory"] for length in (8192, 16384))
    assert long - short == 8192 * prefill_token_bytes(shape, size)
    vllm = replace(alone, sampler="vllm")  # computes long prompts in parts
    assert len({plan_for_length(shape, 80 << 30, vllm, n).parts["working memory"] for n in (8192, 16384)}) == 1


def test_on_a_cpu_the_probabilities_of_the_attention_count():
    shape, cpu = SHAPES["Qwen2.5-0.5B"], MemorySettings(device="cpu", kv_bytes=1 << 30)
    plan = plan_for_length(shape, 64 * 2**30, cpu, 1024)
    assert plan.kv_bytes == 1 << 30
    assert not plan.checkpointing
    assert plan.parts["activations"] == activation_bytes(shape, 2, 1024).stored + 2 * 24 * 14 * 1024 * 1024
    assert plan.parts["weights"] > 2 * shape.linear_parameters * 2
    assert free_memory(torch.device("cpu")) > 0


def test_the_table_is_aligned_and_adds_up():
    plan = on("Qwen3-4B", 80, sampler="vllm")
    head, *lines = str(plan).splitlines()
    assert head == "Qwen3-4B in bfloat16, vllm and peft, in GB"
    assert {line[26] for line in lines} == {"."}
    assert sum(float(line[22:29]) for line in lines) == pytest.approx(80 * 2**30 / 1e9, abs=0.05)
    assert "rows of at most 16,384 tokens with checkpointing" in plan_summary(plan)
    assert repr(plan) == str(plan)


def test_other_architectures_are_counted_like_those_of_transformers():
    text = AutoConfig.for_model(
        "olmo2", vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4
    )
    with torch.device("meta"):
        model = model_class(text)(text)
    shape = model_shape(text)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert len(shape.linears) == 7
