"""A stub of vLLM on the fake GPU: async scheduling, swapped adapters, aborted requests, and vLLM's errors."""

import asyncio
import gc
import weakref

import openai
import pytest
from support import fake_gpu
from support.gpu_parts import groups_of, reply

import art_nb as art
from art_nb.backends.engines import LEARNERS
from art_nb.core.events import Bus, Warned
from art_nb.core.types import BackendMissing, ServeError
from art_nb.policy.adapters import frozen_weights
from art_nb.samplers import vllm as vllm_sampler

TOKENS = [40, 41, 42, 2]  # the last one ends a reply


@pytest.fixture
def vllm(vllm_stub):
    """The stub of vLLM with async scheduling."""
    import vllm

    vllm.REPLY, vllm.LAG, vllm.DEVICE = TOKENS, 1, fake_gpu.NAME
    return vllm


@pytest.fixture(params=[fake_gpu.NAME, "cpu"])
async def model(request, vllm, named, tmp_path):
    """A model that the stub samples: with swapped adapters on the fake GPU, with merged ones on the CPU."""
    options = {"sampler": "vllm", "device": request.param, "dtype": "float32", "verbose": False}
    async with art.LocalBackend(path=tmp_path / "runs", **options) as backend:
        registered = named()
        await registered.register(backend)
        yield registered


def sampler_of(model):
    """Return the sampler of a registered model."""
    return model.backend().runtime(model).sampler


def engine_of(model):
    """Return the stub's engine of a registered model."""
    return sampler_of(model)._engine


async def ask(model, seed=0, **options):
    """Return a reply that ends with the end token."""
    return await reply(model, seed, extra_body={}, **{"max_tokens": 100} | options)


async def test_async_scheduling_loses_no_token(model):
    assert sampler_of(model).adapter_mode == ("merged" if sampler_of(model).policy.device.type == "cpu" else "swapped")
    choices = await asyncio.gather(*(ask(model, seed) for seed in range(5)))
    assert [choice.token_ids for choice in choices] == [TOKENS] * 5
    assert {choice.finish_reason for choice in choices} == {"stop"}
    assert {entry.logprob for choice in choices for entry in choice.logprobs.content} == {-1.0}
    short = await ask(model, max_tokens=2)
    assert (short.token_ids, short.finish_reason) == (TOKENS[:2], "length")
    top = (await ask(model, top_logprobs=2)).logprobs.content[0].top_logprobs
    assert [entry.logprob for entry in top] == [-1.0, -2.0]


async def test_vllm_shares_our_weights_except_on_a_cpu(model):
    sampler = sampler_of(model)
    shared = sampler.policy.device.type != "cpu"
    assert (sampler.shared, sampler.unshared_parameters) == (shared, [])
    args = engine_of(model).worker.args
    assert args.load_format == ("art_nb" if shared else "auto")
    assert args.hf_overrides == ({"head_dtype": "float32"} if shared else None)
    if shared:
        parameters = engine_of(model).worker.model.parameters()
        ours = sum(tensor.numel() for tensor in frozen_weights(sampler.policy).values())
        assert sum(parameter.numel() for parameter in parameters) == ours


async def test_weights_that_vllm_changes_are_an_error(vllm, named, tmp_path):
    from vllm.v1.engine.llm_engine import OPEN

    options = {"sampler": "vllm", "device": fake_gpu.NAME, "verbose": False}
    async with art.LocalBackend(path=tmp_path / "runs", **options) as backend:
        vllm.FAIL["change"] = "model.layers.1.mlp.gate_up_proj.weight"
        told = r"changed 2 of the weights .* the first is model\.layers\.1\.mlp\.gate_proj\.weight\. .*load_format"
        with pytest.raises(BackendMissing, match=told):
            await named().register(backend)
        assert not OPEN
        del vllm.FAIL["change"]
        model = named()
        await model.register(backend)
        assert (await ask(model)).token_ids == TOKENS


async def test_an_error_does_not_keep_the_weights(vllm, named, tmp_path, monkeypatch):
    """A notebook keeps the last error, and its frames would keep the policy."""
    policies = []

    def fail(policy, *args, **options):
        policies.append(weakref.ref(policy))
        raise BackendMissing("no learner")

    monkeypatch.setitem(LEARNERS, "peft", fail)
    options = {"sampler": "vllm", "device": fake_gpu.NAME, "verbose": False}
    async with art.LocalBackend(path=tmp_path / "runs", **options) as backend:
        with pytest.raises(BackendMissing, match="no learner") as kept:
            await named().register(backend)
        gc.collect()
        assert kept.value is not None
        assert policies[0]() is None


async def test_copied_weights_are_a_warning_with_advice(vllm, named, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_sampler, "unshared_parameters", lambda tensors, model: ["lm_head.weight"])
    messages, bus = [], Bus()
    bus.subscribe(lambda event: messages.append(event.message), Warned)
    options = {"sampler": "vllm", "device": fake_gpu.NAME, "verbose": False, "bus": bus}
    async with art.LocalBackend(path=tmp_path / "runs", **options) as backend:
        await named().register(backend)
    assert any("the first is lm_head.weight. If memory becomes full, lower max_model_len" in m for m in messages)


async def test_tokens_of_an_aborted_request_are_ignored(model, vllm):
    vllm.REPLY = [*TOKENS[:3] * 20, 2]
    text = sampler_of(model).tokenizer.decode([TOKENS[1]])
    stopped, whole = await asyncio.gather(ask(model, stop=[text]), ask(model, 1))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == TOKENS[:2]
    assert whole.token_ids == vllm.REPLY
    assert len(engine_of(model).aborted) == 1
    again = await ask(model, 2)  # the engine still has a token of nobody's request
    assert again.token_ids == vllm.REPLY


async def test_a_canceled_reply_is_aborted(model, vllm):
    vllm.REPLY = [*TOKENS[:3] * 120, 2]
    stream = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=[{"role": "user", "content": "A1"}], stream=True, max_tokens=400
    )
    async for _ in stream:
        break
    await stream.close()
    assert (await ask(model, 2, max_tokens=400)).token_ids == vllm.REPLY
    assert len(engine_of(model).aborted) <= 1  # 0 if the reply ended before the connection was closed
    assert not engine_of(model).requests


async def test_nothing_is_left_to_do_after_closing(model):
    """The device's thread asks once more if requests were running when the sampler was closed."""
    sampler = sampler_of(model)
    await sampler.worker.result(sampler.close)
    sampler.close = lambda: None  # the backend closes it again
    assert await sampler.worker.result(sampler._iterate) is False


async def test_each_training_step_is_sampled_with_its_own_adapter(model, vllm):
    """More versions than vLLM keeps. On the fake GPU, each is a LoRA request, and the oldest ones are removed."""
    choices = []
    for seed in range(6):
        vllm.REPLY = [30 + seed, *TOKENS[1:]]  # equal replies would have no gradient
        choices.append(await ask(model, seed))
    vllm.REPLY = TOKENS
    for step in range(1, 11):
        result = await model.backend().train(model, groups_of(choices), learning_rate=1e-3)
        assert result.step == step
        assert (await ask(model, step)).token_ids == TOKENS
    assert (await reply(model, 3, model.get_inference_name(2), extra_body={}, max_tokens=9)).token_ids == TOKENS
    engine = engine_of(model)
    if sampler_of(model).adapter_mode == "merged":
        assert engine.adapters == [None] * len(engine.adapters)
        return
    numbers = [None if lora is None else lora.lora_int_id for lora in engine.adapters]
    assert {*numbers[:6]} == {None}  # the untrained adapter is the base model
    assert len({*numbers[5:16]}) == 11
    assert len(engine.removed) >= 3
    assert not engine.resets  # each version keeps its part of the prefix cache
    latest = engine.worker.registered[numbers[15]]
    assert latest.config["lora_alpha"] == latest.config["r"]
    B = [t for name, t in latest.tensors.items() if ".lora_B." in name]
    assert all(t.device.type == fake_gpu.NAME for t in B)
    assert not {*engine.removed} & {*numbers[14:]}


async def test_an_error_of_a_step_fails_its_requests_only(model, vllm):
    vllm.FAIL["step"] = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(openai.InternalServerError, match="illegal memory access"):
        await ask(model)
    del vllm.FAIL["step"]
    assert (await ask(model)).token_ids == TOKENS


async def test_a_request_that_vllm_refuses_is_told(model, vllm):
    vllm.FAIL["add"] = ValueError("The decoder prompt (length 600) is longer than the maximum model length of 512.")
    with pytest.raises(openai.BadRequestError, match="vLLM rejected the request: The decoder prompt"):
        await ask(model)
    del vllm.FAIL["add"]
    assert (await ask(model)).token_ids == TOKENS


STARTS = [  # what vLLM 0.26 to 0.33 raise at the start
    (
        "To serve at least one request with the model's max seq len (512), (2.0 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (1.0 GiB). Based on the available memory, the estimated maximum "
        "model length is 256. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.",
        ServeError,
        "too little memory for the KV cache",
    ),
    ("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.", ServeError, "KV cache"),
    (
        "Free memory on device cuda:0 (0.4/14.6 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 13.1 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        ServeError,
        "too little memory for the KV cache",
    ),
    (
        "Available memory on node 0 (1.2/4.0 GiB) on startup is less than desired CPU memory utilization (0.9, 3.6 "
        "GiB).",
        ServeError,
        "too little memory for the KV cache",
    ),
    (
        "User-specified max_model_len (4096) is greater than the derived max_model_len (max_position_embeddings=512 or "
        "model_max_length=None in model's config.json).",
        BackendMissing,
        "Pass a smaller max_model_len",
    ),
    (
        "The model type 'gemma3_text' does not support float16. Reason: Numerical instability. Please use bfloat16 or "
        "float32 instead.",
        BackendMissing,
        "Pass another dtype",
    ),
    ("LoRA rank 64 is greater than max_lora_rank 16.", BackendMissing, "Lower the rank of the adapter"),
    (
        "'QKVParallelLinearWithLoRA' object has no attribute 'weight'",
        BackendMissing,
        'pass engine_args={"load_format": "auto"}',
    ),
]


@pytest.mark.parametrize(("message", "kind", "told"), STARTS, ids=lambda value: "")
async def test_what_vllm_raises_at_the_start_is_one_sentence(vllm, named, tmp_path, message, kind, told):
    vllm.FAIL["start"] = ValueError(message)
    options = {"sampler": "vllm", "device": fake_gpu.NAME, "verbose": False}
    async with art.LocalBackend(path=tmp_path / "runs", **options) as backend:
        with pytest.raises(kind, match=told) as caught:
            await named().register(backend)
        assert "\n" not in str(caught.value)
        del vllm.FAIL["start"]
        model = named()
        await model.register(backend)  # nothing is left behind
        assert (await ask(model)).token_ids == TOKENS
