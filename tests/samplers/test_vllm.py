"""vLLM in this process (`make test-vllm`): contract, logprobs, two ways to serve an adapter, a kernel unharmed."""

import asyncio
import gc
import json
import random
import re
import threading
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import openai
import pytest

pytest.importorskip("vllm")

import torch
from support.registered import QUESTION
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import art_nb as art
from art_nb.core.events import Warned
from art_nb.core.types import BackendMissing, ServeError
from art_nb.models.tiny import save_tiny_model, tiny_tokenizer
from art_nb.models.weights import fetch
from art_nb.policy import adapter_files
from art_nb.policy.adapters import copy_adapter, frozen_weights, load_adapter
from art_nb.policy.device import DeviceThread
from art_nb.policy.loading import load_policy
from art_nb.policy.lora import TARGETS, sequence_logprobs
from art_nb.samplers.base import SamplingParams
from art_nb.samplers.shared_weights import LOAD_FORMAT, share_policy
from art_nb.samplers.vllm import (
    KEPT_ADAPTERS,
    StartedEngine,
    VLLMSampler,
    Workspace,
    engine_settings,
    load_vllm,
    vllm_version,
)

NEEDS_TORCHVISION = pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's model needs torchvision")
NEAR = 0.05  # nats, of two programs that compute in bf16
SHAPE = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


@pytest.fixture(scope="module", params=["merged", "swapped"])
def made(request, tiny_model_dir):
    """A policy and vLLM beside it."""
    policy, worker = load_policy(tiny_model_dir), DeviceThread()
    sampler = worker.call(VLLMSampler, policy, worker, tiny_model_dir, max_running=8, adapter_mode=request.param)
    yield policy, sampler
    worker.call(sampler.close)
    worker.close()


def shaken(policy, seed):
    """An adapter that changes what the model says."""
    draw = torch.Generator().manual_seed(seed)
    return {name: t + 0.05 * torch.randn(t.shape, generator=draw) for name, t in copy_adapter(policy).items()}


async def said(sampler, prompt, key=None, **params):
    return [s async for s in sampler.generate(prompt, SamplingParams(**params), key)]


def exact(policy, prompt, reply, weights=None):
    """The logprobs of a reply under an adapter of the policy, or without one."""
    ids = prompt + [s.token_id for s in reply]
    return sequence_logprobs(policy, ids, [(weights and policy.cast(weights), None)])[len(prompt) - 1 :]


async def test_each_step_replies_with_its_weights(made):
    policy, sampler = made
    prompts = [[1, 5 + i, 9, 30 + i, 7] * 4 for i in range(6)]
    versions = {None: None} | {key: shaken(policy, i) for i, key in enumerate(("ttt@1", "ttt@2"))}
    for key, weights in versions.items():
        if key:
            sampler.load(key, weights)
    keys = [*versions] * 4
    replies = await asyncio.gather(
        *(said(sampler, prompts[i % 6], key, max_tokens=6 + i, seed=i, ignore_eos=True) for i, key in enumerate(keys))
    )
    for i, (key, reply) in enumerate(zip(keys, replies, strict=True)):
        assert [s.finish for s in reply] == [None] * (5 + i) + ["length"]
        near = exact(policy, prompts[i % 6], reply, versions[key])
        np.testing.assert_allclose([s.logprob for s in reply], near, atol=NEAR)
    assert sampler.stats()["running"] == sampler.stats()["waiting"] == 0


async def test_seeds_stops_tops_and_greed(made):
    _, sampler = made
    prompt = [1, 40, 41, 42]
    one, two, other = [await said(sampler, prompt, max_tokens=12, seed=s, ignore_eos=True) for s in (3, 3, 4)]
    assert [s.token_id for s in one] == [s.token_id for s in two] != [s.token_id for s in other]
    text = "".join(s.text for s in one)
    part = await said(sampler, prompt, max_tokens=12, seed=3, ignore_eos=True, stop=(text[3:5],))
    assert "".join(s.text for s in part) == text[: text.index(text[3:5])]
    assert part[-1].finish == "stop"
    greedy = await said(sampler, prompt, max_tokens=4, temperature=0, top_logprobs=3)
    assert all(len(s.top) == 3 and s.top[0] == (s.token_id, s.logprob) for s in greedy)
    hot, cold = [
        (await said(sampler, prompt, max_tokens=1, temperature=heat, top_logprobs=20))[0].top for heat in (1.5, 1)
    ]
    spread = [likely[0][1] - likely[19][1] for likely in (hot, cold)]
    assert 1.5 * spread[0] == pytest.approx(spread[1], rel=0.02)  # logprobs are those after the temperature
    cut = await said(sampler, prompt, max_tokens=8, top_k=1, seed=1, ignore_eos=True)
    assert [s.logprob for s in cut] == pytest.approx([0.0] * 8, abs=1e-6)


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"guided_choice": ["B2", "C3"]}, "B2|C3"),
        ({"guided_regex": "[AB][12]{3}"}, "[AB][12]{3}"),
        ({"structured_outputs": {"regex": "x{2}"}}, "xx"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["B2"]}}}},
            '"B2"',
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_a_reply_is_held_to_a_form(tiny_model_dir, tmp_path, asked, fits):
    model = art.TrainableModel(name="ttt", project="tests", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path=tmp_path, sampler="vllm", verbose=False) as backend:
        await model.register(backend)
        ask = {"model": model.get_inference_name(), "messages": QUESTION, "max_tokens": 12, "logprobs": True}
        choice = (await model.openai_client().chat.completions.create(**ask, extra_body=asked)).choices[0]
        with pytest.raises(openai.BadRequestError):
            await model.openai_client().chat.completions.create(**ask, extra_body={"guided_regex": "(("})
    assert re.fullmatch(fits, choice.message.content)
    assert choice.model_extra["cut"]  # the learner cannot score it as it was sampled


async def test_more_prompt_than_one_batch_holds(made):
    _, sampler = made
    prompts = [[1, 5 + i, 9, 30 + i, 7] * 90 for i in range(12)]
    replies = await asyncio.gather(*(said(sampler, prompt, max_tokens=3, ignore_eos=True) for prompt in prompts))
    assert [len(reply) for reply in replies] == [3] * 12


async def test_a_reply_nobody_waits_for_is_dropped(made):
    _, sampler = made
    stream = sampler.generate([1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True))
    await anext(stream)
    await stream.aclose()
    before = sampler.stats()["sampled_tokens"]
    await said(sampler, [1, 2, 3], max_tokens=2)
    assert sampler.stats()["running"] == 0
    assert sampler.stats()["sampled_tokens"] < before + 10


async def test_more_versions_than_are_kept(tiny_model_dir):
    policy, worker = load_policy(tiny_model_dir), DeviceThread()
    sampler = worker.call(VLLMSampler, policy, worker, tiny_model_dir, max_running=4, adapter_mode="swapped")
    versions = {f"ttt@{i}": shaken(policy, i) for i in range(KEPT_ADAPTERS + 3)}
    for key, weights in versions.items():
        sampler.load(key, weights)
    for key in [*versions, "ttt@0"]:
        reply = await said(sampler, [1, 40, 41], key, max_tokens=3, seed=1, ignore_eos=True)
        near = exact(policy, [1, 40, 41], reply, versions[key])
        np.testing.assert_allclose([s.logprob for s in reply], near, atol=NEAR)
    numbers = {record.lora_int_id for record in sampler._mode.known.values()}
    assert len(numbers) == KEPT_ADAPTERS
    assert sampler._engine.engine_core.list_loras() == numbers  # vLLM holds the same versions
    worker.call(sampler.close)
    worker.close()


async def test_more_versions_at_once_than_are_kept(tiny_model_dir):
    policy, worker = load_policy(tiny_model_dir), DeviceThread()
    sampler = worker.call(VLLMSampler, policy, worker, tiny_model_dir, max_running=16, adapter_mode="swapped")
    versions = {f"ttt@{i}": shaken(policy, i) for i in range(KEPT_ADAPTERS + 3)}
    for key, weights in versions.items():
        sampler.load(key, weights)
    replies = await asyncio.gather(
        *(said(sampler, [1, 40, 41], key, max_tokens=5, seed=1, ignore_eos=True) for key in versions)
    )
    for key, reply in zip(versions, replies, strict=True):
        near = exact(policy, [1, 40, 41], reply, versions[key])
        np.testing.assert_allclose([s.logprob for s in reply], near, atol=NEAR)
    worker.call(sampler.close)
    worker.close()


async def test_each_version_keeps_its_prefix_cache(tiny_model_dir):
    """An update of the adapter invalidates nothing of the other versions."""
    policy, worker = load_policy(tiny_model_dir), DeviceThread()
    sampler = worker.call(VLLMSampler, policy, worker, tiny_model_dir, max_running=4, adapter_mode="swapped")
    prompt = [1, 40, 41, 42] * 100
    hits = {}
    for key, seed in (("ttt@1", 1), ("ttt@2", 2), ("ttt@1", None), ("ttt@2", None)):
        if seed is not None:
            sampler.load(key, shaken(policy, seed))
            sampler.clear_caches()  # as before each training step
        before = sampler.stats()["cached_tokens"]
        await said(sampler, prompt, key, max_tokens=2, ignore_eos=True)
        hits[key] = sampler.stats()["cached_tokens"] - before
        assert (hits[key] > 200) == (seed is None)
    worker.call(sampler.close)
    worker.close()


async def test_an_untrained_adapter_is_the_base_model(made):
    policy, sampler = made
    sampler.load("ttt@0", copy_adapter(policy))
    prompt = [1, 60, 61, 62] * 100
    await said(sampler, prompt, None, max_tokens=2, ignore_eos=True)
    before = sampler.stats()["cached_tokens"]
    reply = await said(sampler, prompt, "ttt@0", max_tokens=2, seed=1, ignore_eos=True)
    assert sampler.stats()["cached_tokens"] - before > 200
    np.testing.assert_allclose([s.logprob for s in reply], exact(policy, prompt, reply), atol=NEAR)


async def test_a_prefix_cache_in_use_is_not_taken_for_cleared(tiny_model_dir, monkeypatch):
    policy, worker = load_policy(tiny_model_dir), DeviceThread()
    sampler = worker.call(VLLMSampler, policy, worker, tiny_model_dir, max_running=4, adapter_mode="merged")
    sampler.load("ttt@1", weights := shaken(policy, 1))
    with monkeypatch.context() as held:
        held.setattr(sampler._engine, "reset_prefix_cache", lambda: False)
        with pytest.raises(ServeError, match="did not clear its prefix cache"):
            await said(sampler, [1, 2, 3], "ttt@1", max_tokens=4)
    reply = await said(sampler, [1, 2, 3], "ttt@1", max_tokens=4, ignore_eos=True)  # merged and cleared again
    np.testing.assert_allclose([s.logprob for s in reply], exact(policy, [1, 2, 3], reply, weights), atol=NEAR)
    worker.call(sampler.close)
    worker.close()


async def test_a_broken_step_fails_the_requests_at_hand_and_no_others(tiny_model_dir, monkeypatch):
    policy, worker = load_policy(tiny_model_dir), DeviceThread()
    sampler = worker.call(VLLMSampler, policy, worker, tiny_model_dir, max_running=4)
    with monkeypatch.context() as broken:
        broken.setattr(sampler._engine, "step", lambda: 1 / 0)
        with pytest.raises(ServeError, match="ZeroDivisionError"):
            await said(sampler, [1, 2, 3], max_tokens=4)
    assert len(await said(sampler, [1, 2, 3], max_tokens=4, ignore_eos=True)) == 4
    worker.call(sampler.close)
    worker.close()


@pytest.mark.parametrize("prompt", [[], [1] * 600, [100_000]], ids=["empty", "too long", "no such token"])
async def test_what_cannot_be_sampled_is_told(made, prompt):
    with pytest.raises(ServeError):
        await said(made[1], prompt)


async def test_vllm_keeps_the_contract(keeps_contract):
    await keeps_contract(sampler="vllm")


def qwen2():
    """Biases on queries, keys and values."""
    return Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=2, tie_word_embeddings=True, **SHAPE))


def qwen3():
    """Norms on queries and keys."""
    return Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=2, head_dim=32, tie_word_embeddings=False, **SHAPE))


def gemma3():
    """Scaled embeddings, windows of eight tokens."""
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            num_hidden_layers=2, head_dim=32, sliding_window=8, layer_types=kinds, query_pre_attn_scalar=32, **SHAPE
        )
    )


def gemma3_with_images():
    """A text model in a checkpoint with a vision tower."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "vision_use_head": False}
    text = SHAPE | {"num_hidden_layers": 2, "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, tie_word_embeddings=True)
    )


def save_family(family, where):
    """Save a random model whose norms and biases are not those of a new one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        plain = family().float()
        for name, p in plain.named_parameters():
            p.data += torch.randn_like(p) * (0.3 if "norm" in name else 0.05)
    plain.save_pretrained(where)
    tiny_tokenizer().save_pretrained(where)


def addresses(model):
    """Return the address, the size and the shape of each parameter."""
    return {name: (p.data_ptr(), p.numel() * p.itemsize, tuple(p.shape)) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        (qwen2, TARGETS),
        (qwen3, TARGETS),
        (gemma3, TARGETS),
        pytest.param(gemma3_with_images, TARGETS, marks=NEEDS_TORCHVISION),
        (qwen2, ("q_proj", "v_proj", "down_proj")),  # the policy has not joined its projections
    ],
    ids=["qwen2", "qwen3", "gemma3", "gemma3_with_images", "separate"],
)
async def test_vllm_computes_with_our_tensors(family, targets, tmp_path):
    """No parameter of vLLM has memory of its own, and adapters run next to them."""
    save_family(family, tmp_path)
    policy, worker = load_policy(tmp_path, targets=targets), DeviceThread()
    prompt = [1, 40, 41, 42] * 6
    expected = sequence_logprobs(policy, prompt)
    sampler = worker.call(VLLMSampler, policy, worker, tmp_path, max_running=4, adapter_mode="swapped", shared=True)
    assert sampler.unshared_parameters == []
    ours = {t.data_ptr(): (name, t) for name, t in frozen_weights(policy).items()}
    theirs = sampler._engine.apply_model(addresses)[0]
    covered = 0
    for name, (address, size, _) in theirs.items():
        first, _ = ours[address]  # an address of a tensor of ours, for joined parameters of the first one
        assert first.rpartition(".")[2] == name.rpartition(".")[2]
        covered += size
    assert covered == sum(t.numel() * t.itemsize for _, t in ours.values())  # all of them, and nothing else
    assert torch.equal(sequence_logprobs(policy, prompt), expected)  # the policy computes the same as before
    sampler.load("ttt@1", weights := shaken(policy, 1))
    for key in (None, "ttt@1"):
        reply = await said(sampler, prompt, key, max_tokens=12, seed=1, ignore_eos=True)
        near = exact(policy, prompt, reply, weights if key else None)
        np.testing.assert_allclose([s.logprob for s in reply], near, atol=2 * NEAR)
    worker.call(sampler.close)
    assert torch.equal(sequence_logprobs(policy, prompt), expected)  # also after vLLM has shut down
    worker.close()


async def test_a_change_of_our_tensor_is_a_change_of_vllm(tiny_model_dir):
    policy, worker = load_policy(tiny_model_dir), DeviceThread()
    sampler = worker.call(
        VLLMSampler, policy, worker, tiny_model_dir, max_running=4, adapter_mode="swapped", shared=True
    )
    with torch.no_grad():
        for tensor in frozen_weights(policy).values():
            tensor.mul_(1.1)
    policy.drop_packed_weights()
    policy._head_product = None
    prompt = [1, 40, 41, 42] * 6
    reply = await said(sampler, prompt, max_tokens=8, seed=1, ignore_eos=True)
    np.testing.assert_allclose([s.logprob for s in reply], exact(policy, prompt, reply), atol=NEAR)
    worker.call(sampler.close)
    worker.close()


async def test_shared_weights_give_fp32_logits(tiny_model_dir):
    """Both are the default on a GPU."""
    policy, worker = load_policy(tiny_model_dir, dtype=torch.bfloat16), DeviceThread()
    options = {"adapter_mode": "swapped", "shared": True, "engine_args": {"hf_overrides": {"head_dtype": "float32"}}}
    sampler = worker.call(VLLMSampler, policy, worker, tiny_model_dir, max_running=4, **options)
    assert sampler.unshared_parameters == []
    sampler.load("ttt@1", weights := shaken(policy, 1))
    for key in (None, "ttt@1"):
        reply = await said(sampler, [1, 40, 41, 42] * 6, key, max_tokens=12, seed=1, ignore_eos=True)
        near = exact(policy, [1, 40, 41, 42] * 6, reply, weights if key else None)
        np.testing.assert_allclose([s.logprob for s in reply], near, atol=NEAR)
    worker.call(sampler.close)
    worker.close()


def started_engine(policy, directory):
    """An engine of vLLM's class `LLM`, as Unsloth starts it, with the weights of the policy."""
    load_vllm()
    workspace = Workspace()
    settings = engine_settings(policy, 256) | {"load_format": LOAD_FORMAT, "kv_cache_memory_bytes": 1 << 26}
    settings |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_logprobs": 20, "max_num_seqs": 4}
    settings |= {"max_model_len": 256, "logprobs_mode": "processed_logprobs", "dtype": policy.dtype}
    with workspace.in_use(), share_policy(policy):
        llm = import_module("vllm").LLM(model=str(directory), **settings)
    return StartedEngine(llm.llm_engine, workspace, tuple(frozen_weights(policy).values()))


async def test_an_engine_that_another_library_has_started(tiny_model_dir):
    policy, worker = load_policy(tiny_model_dir, dtype=torch.bfloat16), DeviceThread()
    started = worker.call(started_engine, policy, tiny_model_dir)
    options = {"adapter_mode": "swapped", "shared": True, "started": started, "max_model_len": 300, "max_running": 4}
    sampler = worker.call(VLLMSampler, policy, worker, tiny_model_dir, **options)
    assert sampler.unshared_parameters == []
    assert sampler.max_model_len == 256
    versions, prompt = {f"ttt@{i}": shaken(policy, i) for i in range(4)}, [1, 40, 41, 42] * 6
    for key, weights in versions.items():
        sampler.load(key, weights)
    asked = [None, *versions]
    replies = await asyncio.gather(
        *(said(sampler, prompt, key, max_tokens=12, seed=1, ignore_eos=True, top_logprobs=3) for key in asked)
    )
    for key, reply in zip(asked, replies, strict=True):
        near = exact(policy, prompt, reply, versions.get(key))
        np.testing.assert_allclose([s.logprob for s in reply], near, atol=2 * NEAR)
    assert len(sampler._mode.known) == sampler._mode.kept == 2
    worker.call(sampler.close)
    worker.close()


def test_merging_needs_weights_of_its_own(tiny_model_dir):
    policy, worker = load_policy(tiny_model_dir), DeviceThread()
    with pytest.raises(ValueError, match="cannot be shared"):
        worker.call(VLLMSampler, policy, worker, tiny_model_dir, adapter_mode="merged", shared=True)
    worker.close()


async def test_fp32_logits_are_nearer_to_the_learner(smollm2_dir):
    """The logits of vLLM's head in fp32, as on CUDA, and in the dtype of the model."""
    policy, worker = load_policy(smollm2_dir, dtype=torch.bfloat16), DeviceThread()
    prompt, drift = policy.tokenizer("The capital of France is")["input_ids"], {}
    for dtype in ("model", "float32"):
        overrides = {"engine_args": {"hf_overrides": {"head_dtype": dtype}}, "max_model_len": 256}
        sampler = worker.call(VLLMSampler, policy, worker, smollm2_dir, max_running=4, **overrides)
        replies = await asyncio.gather(
            *(said(sampler, prompt, max_tokens=24, seed=i, ignore_eos=True, temperature=1.0) for i in range(4))
        )
        errors = [
            abs(np.array([s.logprob for s in reply]) - worker.call(exact, policy, prompt, reply).numpy())
            for reply in replies
        ]
        drift[dtype] = float(np.mean(errors))
        worker.call(sampler.close)
    worker.close()
    print(f"mean difference to the policy: {drift}")
    assert drift["float32"] < NEAR


@pytest.mark.parametrize("family", [qwen2, qwen3, gemma3], ids=lambda family: family.__name__)
async def test_each_family_is_sampled_as_it_is_trained(family, tmp_path):
    save_family(family, tmp_path)
    policy, worker = load_policy(tmp_path), DeviceThread()
    sampler = worker.call(VLLMSampler, policy, worker, tmp_path, max_running=4)
    sampler.load("ttt@1", weights := shaken(policy, 1))
    prompt = [1, 40, 41, 42] * 6
    for key in (None, "ttt@1"):
        reply = await said(sampler, prompt, key, max_tokens=12, seed=1, ignore_eos=True)
        near = exact(policy, prompt, reply, weights if key else None)
        np.testing.assert_allclose([s.logprob for s in reply], near, atol=2 * NEAR)
    worker.call(sampler.close)
    worker.close()


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first time, the weights are fetched and converted
async def test_real_gemma_is_sampled_as_it_is_trained():
    where = fetch("gemma3-270m")
    policy, worker = load_policy(where), DeviceThread()
    sampler = worker.call(VLLMSampler, policy, worker, where, max_running=2, max_model_len=256)
    sampler.load("ttt@1", {name: t / 50 for name, t in shaken(policy, 1).items()})
    prompt = policy.tokenizer("The capital of France is")["input_ids"]
    for key in (None, "ttt@1"):
        reply = await said(sampler, prompt, key, max_tokens=8, seed=1, ignore_eos=True)
        near = worker.call(exact, policy, prompt, reply, key and sampler._adapters[key][1])
        np.testing.assert_allclose([s.logprob for s in reply], near, atol=6 * NEAR)
    worker.call(sampler.close)
    worker.close()


async def test_settings_pass_through_and_unknown_ones_are_named(tiny_model_dir, tmp_path):
    heard = []
    model = art.TrainableModel(
        name="ttt",
        project="tests",
        base_model=str(tiny_model_dir),
        _internal_config={"engine_args": {"num_scheduler_steps": 8, "max_num_seqs": 3}},
    )
    backend = art.LocalBackend(
        path=tmp_path,
        sampler="vllm",
        verbose=False,
        engine_args={"max_num_batched_tokens": 640, "enable_chunked_prefill": True},
    )
    backend.bus.subscribe(heard.append, Warned)
    async with backend:
        await model.register(backend)
        config = backend.runtime(model).sampler._engine.vllm_config
    assert config.scheduler_config.max_num_batched_tokens == 640
    assert [event.message.split(":")[0] for event in heard] == [
        f"{vllm_version()} has no setting num_scheduler_steps",
        "max_num_seqs of engine_args are set by the backend",
    ]


@pytest.mark.parametrize("architecture", ["NoSuchForCausalLM", "LlamaModel"])
async def test_what_config_json_reveals_is_told_before_weights_are_read(tmp_path, architecture):
    folder = save_tiny_model(tmp_path / "weightless")
    (folder / "model.safetensors").write_bytes(b"")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    model = art.TrainableModel(name="ttt", project="tests", base_model=str(folder))
    async with art.LocalBackend(path=tmp_path / "runs", sampler="vllm", verbose=False) as backend:
        with pytest.raises(BackendMissing, match="vLLM (cannot run this model|runs this model as)"):
            await model.register(backend)


async def test_the_kernel_is_left_as_it_was(tiny_model_dir, tmp_path):
    gc.unfreeze()  # conftest.py has frozen what collection made
    random.seed(11)
    np.random.seed(11)
    torch.manual_seed(11)
    wanted = random.random(), np.random.random(), float(torch.rand(()))
    random.seed(11)
    np.random.seed(11)
    torch.manual_seed(11)
    before, names = torch.set_num_threads, {t.name for t in threading.enumerate()}
    for name in ("first", "second"):  # an engine after close() is a whole one
        model = art.TrainableModel(name=name, project="tests", base_model=str(tiny_model_dir))
        async with art.LocalBackend(path=tmp_path, sampler="vllm", verbose=False) as backend:
            await model.register(backend)
            answer = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(), messages=QUESTION, max_tokens=4
            )
            assert answer.usage.completion_tokens > 0
    assert (random.random(), np.random.random(), float(torch.rand(()))) == wanted
    assert torch.set_num_threads is before
    assert gc.get_freeze_count() == 0
    assert {t.name for t in threading.enumerate() if "art" in t.name} <= names


async def test_two_steps_of_grpo_each_sampled_from_the_weights_of_the_one_before(smollm2_dir, tmp_path):
    model = art.TrainableModel(name="two", project="tests", base_model=str(smollm2_dir))

    async def rollout(model, seed):
        choice = (
            await model.openai_client().chat.completions.create(
                model=model.get_inference_name(),
                max_tokens=12,
                logprobs=True,
                messages=[{"role": "user", "content": f"Say a word that begins with {'abcdefgh'[seed % 8]}."}],
            )
        ).choices[0]
        return art.Trajectory(
            messages_and_choices=[{"role": "user", "content": "?"}, choice],
            reward=float(len(choice.message.content or "") % 7),
        )

    async with art.LocalBackend(path=tmp_path, sampler="vllm", verbose=False) as backend:
        await model.register(backend)
        run = art.train(
            model, rollout, range(8), steps=2, groups_per_step=2, rollouts_per_group=4, learning_rate=3e-3, show=False
        )
        await run
        groups, store = run.groups, model.store
    assert run.step == 2
    drift = [row["offpolicy/logprob_diff_mean"] for row in store.history()]
    assert max(drift) < 2 * NEAR  # every other word is as likely here: 3 to 4 nats a token
    policy, fits = load_policy(smollm2_dir), {}
    choices = [t.messages_and_choices[-1] for t in groups[-1]]
    for step in (0, 1):
        load_adapter(policy, adapter_files.read_adapter(store.checkpoint_dir(step)))
        fits[step] = np.concatenate(
            [
                np.array(c.model_extra["token_logprobs"])
                - sequence_logprobs(policy, c.model_extra["prompt_token_ids"] + c.model_extra["token_ids"]).numpy()[
                    len(c.model_extra["prompt_token_ids"]) - 1 :
                ]
                for c in choices
            ]
        )
    assert {c.model_extra["policy_version"] for c in choices} == {1}
    assert abs(fits[1]).mean() < 2 * NEAR < abs(fits[0]).mean()
