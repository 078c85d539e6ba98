"""55 architectures with tiny random weights: each is computed to 1e-5 in fp32, or refused in one sentence.

The reference is transformers' own forward pass over each row alone. It is compared with the learner's logprobs of
packed rows and with the logprobs that the sampler reports, over rows that are longer than every attention window."""

import asyncio

import numpy as np
import pytest
import torch
from support import families
from support.audit import count
from support.families import VOCABULARY, random_adapter, tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from art_nb.core.types import TrainError
from art_nb.learners.base import Learner
from art_nb.policy.adapters import load_adapter
from art_nb.policy.device import DeviceThread
from art_nb.policy.loading import checked_policy, load_policy
from art_nb.policy.packing import WeightedRow, micro_batches
from art_nb.samplers.base import SamplingParams
from art_nb.samplers.transformers import TransformersSampler

CLOSE = 1e-5
SHAPE = families.SHAPE | {"num_hidden_layers": 2}
WINDOW = dict(sliding_window=9)
KINDS = ["sliding_attention", "full_attention"]
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    layer_types=["linear_attention", "full_attention"],
    head_dim=16,
)
GPT = dict(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2)

COMPUTED = {
    "apertus": SHAPE,
    "arcee": SHAPE,
    "cohere": SHAPE | {"logit_scale": 0.5},
    "cohere2": SHAPE | WINDOW | {"logit_scale": 0.25, "layer_types": KINDS, "head_dim": 16},
    "cwm": SHAPE | WINDOW | {"layer_types": KINDS, "head_dim": 16},
    "ernie4_5": SHAPE | {"head_dim": 16},
    "exaone4": SHAPE | WINDOW | {"layer_types": KINDS},
    "flex_olmo": SHAPE | {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": SHAPE | {"head_dim": 16},
    "gemma3_text": SHAPE | WINDOW | {"layer_types": KINDS, "head_dim": 16},
    "glm": SHAPE | {"head_dim": 16},
    "glm4": SHAPE | {"head_dim": 16},
    "glm4_moe": SHAPE
    | {
        "head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "granite": SHAPE | {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7},
    "granitemoe": SHAPE | {"logits_scaling": 2.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    "helium": SHAPE | {"head_dim": 16},
    "hunyuan_v1_dense": SHAPE | {"head_dim": 16},
    "llama": SHAPE,
    "ministral": SHAPE | WINDOW | {"layer_types": KINDS, "head_dim": 16},
    "ministral3": SHAPE | {"head_dim": 16},
    "mistral": SHAPE | WINDOW,
    "mixtral": SHAPE | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo": SHAPE,
    "olmo2": SHAPE,
    "olmo3": SHAPE | WINDOW | {"layer_types": KINDS},
    "olmoe": SHAPE | {"num_experts": 4, "num_experts_per_tok": 2},
    "phi": SHAPE,
    "phi3": SHAPE | WINDOW,
    "qwen2": SHAPE | WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": SHAPE | EXPERTS | {"shared_expert_intermediate_size": 48},
    "qwen3": SHAPE | {"head_dim": 16},
    "qwen3_moe": SHAPE | EXPERTS | {"head_dim": 16},
    "seed_oss": SHAPE | {"head_dim": 16},
    "smollm3": SHAPE | {"no_rope_layers": [1, 0]},
    "starcoder2": SHAPE | WINDOW,
}
REFUSED = {  # what the sentence must name
    "bloom": (dict(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4), "ALiBi"),
    "codegen": (GPT | {"rotary_dim": 8}, "a decoder without the layers"),
    "deepseek_v3": (
        SHAPE
        | dict(
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
        ),
        "kv_lora_rank=16",
    ),
    "diffllama": (SHAPE, "differential attention"),
    "doge": (SHAPE, "masks that depend on the input"),
    "gemma2": (SHAPE | {"head_dim": 16}, "attn_logit_softcapping=50"),
    "gemma4_text": (SHAPE | {"head_dim": 16}, "share keys and values"),
    "gpt2": (GPT, "learned position embeddings"),
    "gpt_neox": (
        dict(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
        ),
        "a decoder without the layers",
    ),
    "gpt_oss": (SHAPE | WINDOW | dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2), "attention sinks"),
    "jetmoe": (
        dict(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_key_value_heads=2,
            kv_channels=16,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        "a decoder without the layers",
    ),
    "llama4_text": (SHAPE | {"head_dim": 16}, "chunked_attention"),
    "mamba": (dict(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2), "linear_attention"),
    "minimax": (SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2}, "linear_attention"),
    "mpt": (dict(vocab_size=VOCABULARY, d_model=64, n_heads=4, n_layers=2), "ALiBi"),
    "nemotron": (SHAPE, "custom attention function"),
    "opt": (
        dict(
            vocab_size=VOCABULARY,
            hidden_size=64,
            ffn_dim=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            word_embed_proj_dim=64,
        ),
        "learned position embeddings",
    ),
    "persimmon": (SHAPE, "a decoder without the layers"),
    "qwen3_5_text": (SHAPE | LINEAR, "linear_attention"),
    "qwen3_next": (SHAPE | LINEAR | EXPERTS, "linear_attention"),
    "stablelm": (SHAPE, "custom attention function"),
    "vaultgemma": (SHAPE | {"head_dim": 16}, "attn_logit_softcapping=50"),
}
SAMPLE = ("mistral", "ministral", "phi", "cohere2", "granite", "qwen2")
PICKED = ("stablelm", "gemma4_text", "deepseek_v3")


def test_there_are_55():
    assert len(COMPUTED) + len(REFUSED) >= 55
    assert not COMPUTED.keys() & REFUSED.keys()


def test_the_documentation_lists_them(root):
    text = (root / "docs" / "how-to" / "base-model.md").read_text(encoding="utf-8")
    section = (
        text.partition("## Supported models\n")[2].partition("at most 1e-5 in float32:\n\n")[2].partition("\n\n")[0]
    )
    assert section.replace("\n", " ") == ", ".join(f"`{kind}`" for kind in sorted(COMPUTED))


def config_of(kind, options):
    return CONFIG_MAPPING[kind](**options)


def made(kind, options):
    """A model of transformers' own class whose every parameter is random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config_of(kind, options)).float().eval()
        for name, p in model.named_parameters():  # norms of one, biases of zero would hide mistakes
            p.data += torch.randn_like(p) * (0.3 if "norm" in name else 0.08)
    return model.requires_grad_(False)


def saved(folder, model):
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def add_adapter(model, policy, adapter):
    """Add the adapter to the weights of transformers' model."""
    for name, layer in policy.layers.items():
        A, B = adapter[f"{name}.lora_A.weight"], adapter[f"{name}.lora_B.weight"]
        model.get_submodule(name).weight.data += layer.scale * B @ A


@torch.no_grad()
def their_logprobs(model, ids):
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]


def some_rows(seed=0):
    """Rows of up to 60 tokens that fork at several depths."""
    rng, trunk = np.random.default_rng(seed), np.random.default_rng(1).integers(3, VOCABULARY, 40)
    return [np.concatenate([trunk[:n], rng.integers(3, VOCABULARY, 20)]).tolist() for n in (5, 20, 20, 40)]


def learner_error(policy, model, rows):
    """The largest difference of the learner's logprobs of packed rows."""
    unknown = np.full(100, np.nan, np.float32)
    made = [WeightedRow(np.array(row, np.int32), np.arange(len(row)) > 0, unknown[: len(row)]) for row in rows]
    worst = 0.0
    for batch in micro_batches(made, 96):
        logprobs = Learner(policy).logprobs(batch)[0].detach()[batch.node_E]
        theirs = torch.cat([their_logprobs(model, row.tokens.tolist()) for row in batch.rows])
        worst = max(worst, float((logprobs - theirs).abs().max()))
    return worst


def sampler_error(policy, model, adapter, rows):
    """The largest difference of the logprobs that the sampler reports, over two turns that reuse the cache."""
    worker = DeviceThread()
    sampler = TransformersSampler(policy, worker, max_running=8)
    sampler.load("m@1", adapter)

    async def roll(ids, seed):
        worst = 0.0
        for turn in range(2):
            params = SamplingParams(max_tokens=5, seed=seed + turn, ignore_eos=True)
            sampled = [s async for s in sampler.generate(ids, params, "m@1")]
            ids = [*ids, *(s.token_id for s in sampled)]
            theirs = their_logprobs(model, ids)[-len(sampled) :]
            worst = max(worst, float((torch.tensor([s.logprob for s in sampled]) - theirs).abs().max()))
            ids = [*ids, 5, 6, 7]
        return worst

    async def all_rows():
        return max(await asyncio.gather(*(roll(row[:40], 9 * i) for i, row in enumerate(rows))))

    try:
        return asyncio.run(all_rows())
    finally:
        worker.close()


def selection(kinds, picked):
    return [
        pytest.param(kind, marks=[] if count(True, kind in picked) else pytest.mark.skip("make audit runs it"))
        for kind in kinds
    ]


@pytest.mark.parametrize("kind", selection(REFUSED, ("bloom", "diffllama", "doge", "nemotron", "opt")))
def test_where_the_config_would_not_say_it_the_check_does(kind):
    with pytest.raises(TrainError) as caught:
        checked_policy(made(kind, REFUSED[kind][0]), tokenizer())
    print(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("kind", selection(COMPUTED, SAMPLE))
def test_sampler_and_learner_compute_it_to_1e_5(tmp_path, kind):
    model = made(kind, COMPUTED[kind])
    policy = load_policy(saved(tmp_path, model), device="cpu", dtype=torch.float32)
    adapter = random_adapter(policy, 1, 0.05)
    load_adapter(policy, adapter)
    add_adapter(model, policy, adapter)
    errors = learner_error(policy, model, some_rows()), sampler_error(policy, model, adapter, some_rows())
    print(f"{kind}: learner {errors[0]:.1e}, sampler {errors[1]:.1e}")
    assert max(errors) < CLOSE


@pytest.mark.parametrize("kind", selection(REFUSED, PICKED))
def test_it_is_refused_before_weights_are_read(tmp_path, kind):
    options, named = REFUSED[kind]
    config = config_of(kind, options)
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(tmp_path)  # a directory without weights and tokenizer
    with pytest.raises(TrainError) as caught:
        load_policy(tmp_path, device="cpu", dtype=torch.float32)
    print(caught.value)
    assert named in str(caught.value)
    assert "Choose a model of" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
