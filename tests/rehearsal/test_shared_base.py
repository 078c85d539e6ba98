"""vLLM, Unsloth and the policy with one copy of the base weights, with stubs of both on the fake GPU."""

import asyncio
import gc
import weakref

import numpy as np
import pytest
import torch
from support import fake_gpu
from support.gpu_parts import groups_of, reply

import art_nb as art
from art_nb.backends import engines, shared_base
from art_nb.core.events import Warned
from art_nb.core.types import BackendMissing
from art_nb.learners import unsloth
from art_nb.policy.adapters import copy_adapter, frozen_weights, masters
from art_nb.policy.loading import load_policy
from art_nb.policy.lora import sequence_logprobs
from art_nb.policy.packing import WeightedRow, micro_batches

TOKENS = [40, 41, 42, 2]  # the last one ends a reply
BOTH = {"sampler": "vllm", "learner": "unsloth", "device": fake_gpu.NAME, "dtype": "bfloat16", "verbose": False}


@pytest.fixture
def vllm(unsloth_stub):
    """The stub of vLLM with async scheduling."""
    import vllm

    vllm.REPLY, vllm.LAG = TOKENS, 1
    return vllm


def storages(tensors):
    """Return the storages of tensors."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def open_engines():
    """Return the executors of the engines that are open."""
    from vllm.v1.engine.llm_engine import OPEN

    return OPEN


async def ask(model, seed=0):
    """Return a reply that ends with the end token."""
    return await reply(model, seed, extra_body={}, max_tokens=100)


@pytest.mark.parametrize("four_bits", [False, True], ids=["16 bits", "4 bits"])
async def test_one_base_is_sampled_and_trained(vllm, unsloth_stub, named, tmp_path, four_bits):
    warnings, bus = [], art.core.events.Bus()
    bus.subscribe(lambda event: warnings.append(event.message), Warned)
    options = BOTH | {"init_args": {"load_in_4bit": four_bits}, "max_running": 16, "bus": bus}
    async with art.LocalBackend(path=tmp_path / "runs", **options) as backend:
        model = named()
        await model.register(backend)
        runtime = backend.runtime(model)
        sampler, policy, engine = runtime.sampler, runtime.policy, runtime.sampler._engine
        assert len(open_engines()) == 1
        assert (sampler.unshared_parameters, warnings) == ([], [])
        theirs = storages(engine.worker.model.parameters())
        held = {name: t for name, t in frozen_weights(policy).items() if not t.is_meta}
        trained = [p for name, p in runtime.learner.model.named_parameters() if ".lora_" not in name]
        assert storages(held.values()) <= theirs
        assert storages(trained) == theirs
        assert policy.has_weights != four_bits
        assert {str(p.device.type) for p in masters(policy).values()} == {fake_gpu.NAME}
        assert policy.dtype == torch.bfloat16
        args = engine.arguments
        assert args.hf_overrides == {"head_dtype": "float32"}
        assert (args.logprobs_mode, args.max_logprobs) == ("processed_logprobs", 20)
        assert (args.max_num_seqs, args.max_loras, args.max_lora_rank) == (16, 2, 8)
        assert args.quantization == ("bitsandbytes" if four_bits else None)
        before = copy_adapter(policy)
        for step in (1, 2, 3, 4):
            choices = []
            for seed in range(6):
                vllm.REPLY = [30 + seed, *TOKENS[1:]]  # equal replies would have no gradient
                choices.append(await ask(model, seed))
            vllm.REPLY = TOKENS
            result = await backend.train(model, groups_of(choices), learning_rate=1e-3)
            assert result.step == step
            assert (await ask(model, step)).token_ids == TOKENS
        assert any(not torch.equal(before[name], t) for name, t in copy_adapter(policy).items())
        numbers = {lora.lora_int_id for lora in engine.adapters if lora is not None}
        assert len(numbers) == 4
        assert len(engine.removed) >= 2  # the engine keeps two versions
        assert not engine.resets
    assert not open_engines()
    assert unsloth_stub.OPTIONS[-1]["max_lora_rank"] == 8


async def test_the_policy_and_unsloth_compute_as_a_loaded_model(vllm, named, tmp_path):
    ids = list(range(3, 40))
    async with art.LocalBackend(path=tmp_path / "runs", **BOTH) as backend:
        model = named()
        await model.register(backend)
        runtime = backend.runtime(model)
        loaded = load_policy(model.base_model, device=fake_gpu.NAME, dtype=torch.bfloat16)
        expected = sequence_logprobs(loaded, ids).cpu()
        ours = runtime.worker.call(sequence_logprobs, runtime.policy, ids).cpu()
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)
        tokens = np.array(ids, np.int32)
        unknown = np.full(len(ids), np.nan, np.float32)
        [batch] = micro_batches([WeightedRow(tokens, np.arange(len(ids)) > 0, unknown)])
        with torch.no_grad():
            theirs, _ = runtime.worker.call(runtime.learner.logprobs, batch.to(runtime.policy.device))
        torch.testing.assert_close(theirs[batch.node_E].cpu(), expected, atol=0.1, rtol=0)


async def test_a_run_continues_with_the_other_way_of_loading(vllm, named, tmp_path):
    async with art.LocalBackend(path=tmp_path / "runs", **BOTH) as backend:
        model = named()
        await model.register(backend)
        choices = []
        for seed in range(6):
            vllm.REPLY = [30 + seed, *TOKENS[1:]]
            choices.append(await ask(model, seed))
        await backend.train(model, groups_of(choices), learning_rate=1e-3)
        weights = {name: t.cpu() for name, t in copy_adapter(backend.runtime(model).policy).items()}
    copies = BOTH | {"init_args": {"fast_inference": False}}
    async with art.LocalBackend(path=tmp_path / "runs", **copies) as backend:
        again = named()
        await again.register(backend)
        runtime = backend.runtime(again)
        assert runtime.step == 1
        for name, tensor in copy_adapter(runtime.policy).items():
            torch.testing.assert_close(tensor.cpu(), weights[name])


OBSTACLES = [
    ({"dtype": "float32"}, "Unsloth starts vLLM in bfloat16 or float16 only"),
    ({"engine_args": {"kv_cache_dtype": "fp8"}}, "Unsloth does not pass kv_cache_dtype of engine_args to vLLM"),
    ({"init_args": {"fast_inference": False}}, "init_args has fast_inference=False"),
]


@pytest.mark.parametrize(("changes", "reason"), OBSTACLES, ids=lambda value: "")
async def test_where_it_is_impossible_unsloth_loads_a_copy_and_says_why(vllm, named, tmp_path, changes, reason):
    warnings, bus = [], art.core.events.Bus()
    bus.subscribe(lambda event: warnings.append(event.message), Warned)
    async with art.LocalBackend(path=tmp_path / "runs", bus=bus, **BOTH | changes) as backend:
        model = named()
        await model.register(backend)
        runtime = backend.runtime(model)
        assert f"Unsloth loads its own copy of the weights beside those of vLLM: {reason}." in warnings
        shared = storages(frozen_weights(runtime.policy).values())
        assert storages(runtime.sampler._engine.worker.model.parameters()) <= shared
        trained = [p for name, p in runtime.learner.model.named_parameters() if ".lora_" not in name]
        assert not storages(trained) & shared
        assert (await ask(model)).token_ids == TOKENS


async def test_4_bits_need_the_plugin_of_vllm(vllm, named, tmp_path, monkeypatch):
    monkeypatch.setattr(unsloth, "find_spec", lambda name: None)
    warnings, bus = [], art.core.events.Bus()
    bus.subscribe(lambda event: warnings.append(event.message), Warned)
    options = BOTH | {"init_args": {"load_in_4bit": True}}
    async with art.LocalBackend(path=tmp_path / "runs", bus=bus, **options) as backend:
        await named().register(backend)
    assert any("pip install vllm-bnb-plugin" in message for message in warnings)
    assert any("The learner computes with 4-bit weights and the sampler with full weights" in m for m in warnings)


async def test_an_unsloth_that_goes_on_without_vllm_is_an_error(vllm, unsloth_stub, named, tmp_path):
    unsloth_stub.STARTS_VLLM = False
    async with art.LocalBackend(path=tmp_path / "runs", **BOTH) as backend:
        with pytest.raises(BackendMissing, match=r'Pass init_args=\{"fast_inference": False\}'):
            await named().register(backend)


def fail(*args):
    """Raise an error."""
    raise BackendMissing("another architecture")


async def test_errors_of_vllm_are_one_sentence_and_leave_nothing_behind(vllm, named, tmp_path, monkeypatch):
    vllm.FAIL["start"] = ValueError("LoRA rank 64 is greater than max_lora_rank 16.")
    async with art.LocalBackend(path=tmp_path / "runs", **BOTH) as backend:
        with pytest.raises(BackendMissing, match="Lower the rank of the adapter .* Unsloth has started this engine"):
            await named().register(backend)
        del vllm.FAIL["start"]
        with monkeypatch.context() as patch:
            patch.setattr(shared_base, "check_architecture", fail)
            with pytest.raises(BackendMissing, match="another architecture"):
                await named().register(backend)
        assert not open_engines()
        model = named()
        await model.register(backend)
        assert (await ask(model)).token_ids == TOKENS


async def test_a_shorter_limit_of_unsloth_is_told(vllm, named, tmp_path):
    vllm.FAIL["length"] = 256
    warnings, bus = [], art.core.events.Bus()
    bus.subscribe(lambda event: warnings.append(event.message), Warned)
    async with art.LocalBackend(path=tmp_path / "runs", bus=bus, max_model_len=300, **BOTH) as backend:
        model = named()
        await model.register(backend)
        assert backend.runtime(model).sampler.max_model_len == 256
    assert any("conversations of 256 tokens, so they are limited to that instead of 300" in m for m in warnings)


async def test_a_failed_registration_frees_the_weights_although_the_error_is_kept(vllm, named, tmp_path, monkeypatch):
    policies = []

    def fail_with(policy, *args, **options):
        policies.append(weakref.ref(policy))
        raise BackendMissing("no learner")

    monkeypatch.setitem(engines.LEARNERS, "unsloth", fail_with)
    async with art.LocalBackend(path=tmp_path / "runs", **BOTH) as backend:
        with pytest.raises(BackendMissing, match="no learner") as kept:
            await named().register(backend)
        await asyncio.sleep(0)
        gc.collect()
        assert policies[0]() is None
        assert kept.value is not None
        assert not open_engines()
