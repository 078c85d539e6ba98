"""Memory on a GPU: what the plan gives to the engines, what 4 bits save, and the advice if memory is full."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from support.gpu_parts import groups_of, reply
from support.meta_memory import CONFIGS, config

import art_nb as art
from art_nb.backends import loading, planning
from art_nb.backends.engines import Engines
from art_nb.backends.planning import memory_settings, plan_model
from art_nb.core.types import TrainError
from art_nb.policy import device as device_module
from art_nb.policy.device import DeviceThread, use_device
from art_nb.policy.memory_plan import model_shape, plan_memory, weight_bytes

CARD = torch.device("cuda")
MEMORY = {"L4": 24, "H100": 80, "H200": 141}  # GiB


@cache
def shape_of(name):
    """Return the shape of a model."""
    return model_shape(config(name), name)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("card", MEMORY)
@pytest.mark.parametrize("sampler", ["transformers", "vllm"])
def test_the_kv_cache_leaves_room_for_weights_and_training(monkeypatch, name, card, sampler):
    """Finding 10: it was sized before vLLM's weights were loaded, and for the whole context of the model."""
    free, checkpoint = MEMORY[card] * 2**30, config(name)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    monkeypatch.setattr(planning, "read_config", lambda weights: checkpoint)
    monkeypatch.setattr(planning, "check_config", lambda *_: None)
    monkeypatch.setattr(planning, "model_shape", lambda *_: shape_of(name))
    try:
        plan = plan_model(name, Engines(sampler=sampler), CARD, dtype=torch.bfloat16)
    except TrainError:
        settings = memory_settings(checkpoint, Engines(sampler=sampler), CARD, torch.bfloat16)
        assert weight_bytes(shape_of(name), settings) > 0.6 * free
        return
    shape, copies = plan.shape, 1 + len(plan.settings.copies)
    everything = plan.kv_bytes + copies * 2 * shape.parameters + plan.parts["activations"]
    assert everything <= plan.needed <= free
    assert plan.max_model_len <= min(shape.context, 16384)
    assert plan.max_model_len < tokens_of(plan) <= max(64 * 2048, plan.max_model_len + 128)


def tokens_of(plan):
    """Return how many tokens the KV cache of a plan holds."""
    shape = plan.shape
    return plan.kv_bytes // (2 * shape.layers * shape.kv_heads * shape.head_dim * 2)


async def test_vllm_starts_with_the_sizes_of_the_plan(vllm_stub, named, tmp_path, monkeypatch):
    """Findings 10 and 22: the KV cache, the length of conversations, and more than 2,048 prompt tokens at once."""
    engines, model = Engines(sampler="vllm"), named()
    plan = plan_model(model.base_model, engines, CARD, memory=16 * 10**9, dtype=torch.bfloat16, max_model_len=128)
    plan = replace(plan, kv_bytes=12_345_678, prefill_tokens=4096)  # other sizes than without a plan
    monkeypatch.setattr(loading, "plan_registered", lambda *_: (plan, plan))
    async with art.LocalBackend(path=tmp_path, device="cpu", sampler="vllm", verbose=False) as backend:
        await model.register(backend)
        arguments = backend.runtime(model).sampler._engine.arguments
        assert arguments.kv_cache_memory_bytes == plan.kv_bytes
        assert arguments.max_model_len == plan.max_model_len == 128
        assert arguments.max_num_batched_tokens == plan.prefill_tokens


@pytest.mark.parametrize("name", CONFIGS)
def test_a_card_with_room_computes_more_prompt_tokens_at_once(name):
    plan = plan_memory(shape_of(name), 141 * 2**30, memory_settings(config(name), Engines("vllm"), CARD))
    assert plan.prefill_tokens > 2048


@pytest.mark.parametrize("name", CONFIGS)
def test_4_bits_beside_a_whole_policy_are_counted_as_an_additional_copy(name):
    """Finding 7: they save nothing, so the plan must not say that they do."""
    shape, four_bits = shape_of(name), {"init_args": {"load_in_4bit": True}}

    def weights(learner, **options):
        settings = memory_settings(config(name), Engines("transformers", learner), CARD, torch.bfloat16, **options)
        return weight_bytes(shape, settings)

    assert weights("peft") < weights("unsloth", **four_bits) < weights("unsloth")


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (4096, r"lower tokens_per_batch \(now 4096\)"),
        (16, r"The longest row has 3\d tokens\. A row is not split, .* \(now 16\) does not help\. Pass max_length=1"),
    ],
)
async def test_the_advice_for_a_full_memory_helps(named, tmp_path, monkeypatch, limit, told):
    """Finding 11: a row that is longer than `tokens_per_batch` is a micro-batch of its own."""
    model = named()
    async with art.LocalBackend(path=tmp_path, device="cpu", dtype="float32", verbose=False) as backend:
        await model.register(backend)
        groups = groups_of([await reply(model, i) for i in range(6)])
        runtime, longest = backend.runtime(model), []

        def step(rows, *args, **options):
            longest.append(max(len(row.tokens) for row in rows))
            raise MemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        monkeypatch.setattr(runtime.learner, "step", step)
        with pytest.raises(TrainError, match=told):
            await backend.train(model, groups, tokens_per_batch=limit)
        assert 16 < longest[0] < 4096


def test_only_a_thread_of_the_cpu_keeps_freed_memory_in_one_arena(monkeypatch):
    """Finding 26: a process with a GPU has many threads, which would compete for the arena."""
    kept = []
    monkeypatch.setattr(device_module, "keep_freed_memory", lambda: kept.append(True))
    for name, calls in (("fakegpu:1", 0), ("mps", 0), ("cpu", 1)):
        worker = DeviceThread()
        worker.call(use_device, torch.device(name))
        worker.close()
        assert len(kept) == calls
