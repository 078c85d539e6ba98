"""The memory plan at registration: what is printed, which sizes it changes, and when it refuses."""

from dataclasses import replace

import pytest
import torch

import art_nb as art
from art_nb.backends import loading, planning
from art_nb.backends.engines import Engines
from art_nb.backends.planning import engine_share, plan_model, planned_engine_args, planned_limits, planned_options
from art_nb.core.types import TrainError
from art_nb.learners import unsloth


@pytest.fixture
def model(tiny_model_dir):
    return art.TrainableModel(name="ttt", project="tests", base_model=str(tiny_model_dir))


def card(model, memory, engines=None, **options):
    """The plan of a model on a card with so many free bytes."""
    options = {"name": "tiny", "dtype": torch.bfloat16} | options
    return plan_model(model.base_model, engines or Engines(), torch.device("cuda"), memory=memory, **options)


async def test_on_a_cpu_nothing_changes_and_the_table_is_printed_on_request(tiny_model_dir, tmp_path, capsys):
    printed = []
    for plan in (False, True):
        model = art.TrainableModel(name="ttt", project="tests", base_model=str(tiny_model_dir))
        backend = art.LocalBackend(path=tmp_path, device="cpu", sampler="transformers", plan=plan)
        async with backend:
            await model.register(backend)
            runtime = backend.runtime(model)
            printed.append(capsys.readouterr().out)
            assert (runtime.plan is not None) == plan
            assert runtime.sampler._slots.max_bytes == 1 << 30
            assert runtime.sampler._prefixes.max_bytes == 1 << 29
            assert runtime.sampler.max_model_len == 512
            assert backend.check_options(model, {}).tokens_per_batch == 1024
            assert not runtime.policy.checkpointing
            assert runtime.policy.logit_chunk == 128
    assert "KV cache" not in printed[0]
    assert "KV cache                 2.15" in printed[1]
    assert printed[1].splitlines()[-1].startswith("ttt: ")


async def test_on_cuda_the_engines_get_the_sizes_of_the_plan(model, tmp_path, capsys, monkeypatch):
    plan = card(model, 4 * 10**9, max_model_len=128)
    monkeypatch.setattr(loading, "plan_registered", lambda *_: (plan, plan))
    async with art.LocalBackend(path=tmp_path, device="cpu", sampler="transformers") as backend:
        await model.register(backend)
        runtime = backend.runtime(model)
        assert "Memory plan: " in capsys.readouterr().out
        assert runtime.plan is plan
        assert runtime.sampler.max_model_len == 128
        assert runtime.sampler._slots.max_bytes == plan.kv_bytes
        assert runtime.sampler._prefixes.max_bytes == plan.kv_bytes // 2
        assert runtime.policy.checkpointing == plan.checkpointing
        assert runtime.policy.logit_chunk == plan.logit_chunk == 1024
        assert backend.check_options(model, {}).tokens_per_batch == plan.tokens_per_batch == 16384
        assert backend.check_options(model, {"tokens_per_batch": 64}).tokens_per_batch == 64


async def test_on_cuda_a_plan_without_room_sets_checkpointing(model, tmp_path, monkeypatch):
    plan = replace(card(model, 4 * 10**9), checkpointing=True, tokens_per_batch=48)
    monkeypatch.setattr(loading, "plan_registered", lambda *_: (plan, plan))
    async with art.LocalBackend(path=tmp_path, device="cpu", sampler="transformers", verbose=False) as backend:
        await model.register(backend)
        runtime, sizes = backend.runtime(model), []
        assert runtime.policy.checkpointing
        step = runtime.learner.sft_step
        monkeypatch.setattr(runtime.learner, "sft_step", lambda *args, **kw: sizes.append(kw) or step(*args, **kw))
        messages = [{"role": "user", "content": "A1"}, {"role": "assistant", "content": "B2"}]
        await model.train_sft([art.Trajectory(messages_and_choices=messages)])
        assert sizes == [{"tokens_per_batch": 48}]


async def test_on_cuda_a_model_that_does_not_fit_is_refused_before_it_is_loaded(model, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "pick_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(planning, "free_memory", lambda device: 10**8)
    monkeypatch.setattr(loading, "load_policy", lambda *args, **options: pytest.fail("the weights were loaded"))
    async with art.LocalBackend(path=tmp_path, dtype="bfloat16", sampler="transformers", verbose=False) as backend:
        with pytest.raises(TrainError, match=r"does not fit .* and 0\.1 GB are free\. What would fit: "):
            await model.register(backend)


async def test_elsewhere_a_plan_that_does_not_fit_is_a_warning(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planning, "free_memory", lambda device: 10**8)
    async with art.LocalBackend(path=tmp_path, device="cpu", sampler="transformers", plan=True) as backend:
        await model.register(backend)
        assert "does not fit into the memory of the cpu device" in capsys.readouterr().out
        assert backend.runtime(model).plan is None


def test_vllm_gets_its_sizes_as_engine_arguments(model):
    plan = card(model, 10**10, Engines(sampler="vllm"))
    assert not plan.settings.own_weights
    assert plan.parts["weights"] == card(model, 10**10).parts["weights"]  # one copy for both engines
    unsloth = card(model, 10**10, Engines(sampler="vllm", learner="unsloth"))
    assert unsloth.parts["weights"] == plan.parts["weights"]  # one copy for all
    copied = card(model, 10**10, Engines(sampler="vllm", learner="unsloth"), init_args={"fast_inference": False})
    assert copied.parts["weights"] == 2 * plan.parts["weights"]
    assert "one copy, and one of Unsloth" in str(copied)
    every = card(model, 10**10, Engines(sampler="vllm", learner="unsloth"), engine_args={"load_format": "auto"})
    assert every.parts["weights"] == 3 * plan.parts["weights"]
    assert "one copy, and one of vLLM, and one of Unsloth" in str(every)
    embedded = card(model, 10**10, Engines(learner="unsloth"))
    assert embedded.parts["weights"] == 2 * plan.parts["weights"]
    copied = card(model, 10**10, Engines(sampler="vllm"), engine_args={"load_format": "auto"})
    assert copied.parts["weights"] == 2 * plan.parts["weights"]
    assert planned_engine_args(plan, "vllm", {}) == {
        "kv_cache_memory_bytes": plan.kv_bytes,
        "max_num_batched_tokens": plan.prefill_tokens,
    }
    requested = {"kv_cache_memory_bytes": 10**9}
    assert planned_engine_args(plan, "vllm", requested)["kv_cache_memory_bytes"] == 10**9
    assert card(model, 10**10, Engines(sampler="vllm"), engine_args=requested).kv_bytes == 10**9
    assert planned_limits(plan, "vllm", None) == {"max_model_len": 512}
    assert planned_limits(plan, "somebody's sampler", None) == {"max_model_len": 512}


def test_an_engine_of_unsloth_gets_a_share_of_the_memory(model):
    engines = Engines(sampler="vllm", learner="unsloth")
    plan = card(model, 10**10, engines)
    share = engine_share(plan)
    assert (
        plan.parts["weights"] + plan.kv_bytes + plan.parts["libraries and graphs"] < share * plan.memory < plan.memory
    )
    smaller = card(model, 10**10, engines, max_running=4)
    assert engine_share(smaller) < share <= 0.95
    assert engine_share(None) == 0.5
    requested = card(model, 10**10, engines, engine_args={"kv_cache_memory_bytes": 10**9})
    assert requested.parts["weights"] == plan.parts["weights"]
    assert 10**9 < engine_share(requested) * requested.memory < 4 * 10**9


def test_4_bits_count_only_with_unsloth(model, monkeypatch):
    monkeypatch.setattr(unsloth, "find_spec", lambda name: name)  # the plugin of vLLM is installed
    four_bits = {"init_args": {"load_in_4bit": True}}
    assert not card(model, 10**10, **four_bits).settings.load_in_4bit
    plan = card(model, 10**10, Engines(sampler="vllm", learner="unsloth"), **four_bits)
    assert plan.settings.load_in_4bit
    assert plan.checkpointing
    assert "one copy, 4 bits" in str(plan)
    assert plan.parts["weights"] < card(model, 10**10).parts["weights"]
    monkeypatch.setattr(unsloth, "find_spec", lambda name: None)
    without = card(model, 10**10, Engines(sampler="vllm", learner="unsloth"), **four_bits)
    assert "one copy, and one of Unsloth, 4 bits" in str(without)
    assert planned_options(plan) == {}  # Unsloth pads rows


def test_the_shape_of_the_adapter_counts(model):
    small, large = (card(model, 10**10, lora={"rank": rank}) for rank in (8, 16))
    partly = card(model, 10**10, lora={"rank": 16, "targets": ("q_proj",)})
    adapters = [plan.parts["adapter and optimizer"] for plan in (small, large, partly)]
    assert adapters[1] == 2 * adapters[0] > adapters[0] > adapters[2]


def test_masks_count_in_float32_and_on_gpus_without_flash_attention(model, monkeypatch):
    without, with_masks = card(model, 10**10), card(model, 10**10, dtype=torch.float32)
    assert not without.settings.masks
    assert with_masks.settings.masks
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    for capability, masks in (((7, 5), True), ((8, 0), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        plan = card(model, 10**10, dtype=torch.float16)
        assert plan.settings.masks == masks
        assert not card(model, 10**10, Engines(sampler="vllm", learner="unsloth")).settings.masks
    assert plan.parts["activations"] < with_masks.parts["activations"]
