"""What `load_policy` takes and refuses: missing weights, models inside larger ones, architectures, patched classes."""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import SHAPE, VOCABULARY, plain, policy, random_adapter, tokenizer
from support.tiny import save_tiny_gguf
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2_5_VLConfig,
)
from transformers.models.llama import modeling_llama

import art_nb as art
from art_nb.core.types import StoreError, TrainError
from art_nb.models.gguf import load_gguf
from art_nb.policy.adapter_files import peft_files
from art_nb.policy.adapters import copy_adapter
from art_nb.policy.device import DeviceThread
from art_nb.policy.kernels import bf16_products
from art_nb.policy.loading import checked_policy, load_policy
from art_nb.policy.lora import coverage_note, sequence_logprobs
from art_nb.samplers.transformers import TransformersSampler

IDS = list(range(3, 40))


def saved(folder, model):
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def load(folder, **options):
    return load_policy(folder, device="cpu", **{"dtype": torch.float32} | options)


# weights


def without(folder, pattern):
    """Take tensors out of the checkpoint."""
    file = folder / "model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if not re.search(pattern, name)}, file, {"format": "pt"})


@pytest.mark.parametrize("pattern", [r"layers\.1\.mlp\.up_proj", r"norm", r"."], ids=["one", "norms", "all"])
def test_missing_weights_are_an_error(tmp_path, pattern):
    without(saved(tmp_path, copy.deepcopy(plain("qwen3_window"))), pattern)
    with pytest.raises(StoreError, match=r"incomplete: \d+ tensors of Qwen3ForCausalLM are missing, the first is "):
        load(tmp_path)


def test_a_tied_head_is_not_missing(tmp_path):
    folder = saved(tmp_path, copy.deepcopy(plain("llama")))
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert torch.allclose(sequence_logprobs(load(folder), IDS), sequence_logprobs(policy("llama"), IDS), atol=1e-6)


def test_weights_of_another_shape_and_damaged_files_are_an_error(tmp_path):
    folder = saved(tmp_path, copy.deepcopy(plain("llama")))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(StoreError, match="cannot be loaded"):
        load(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(StoreError, match="cannot be loaded"):
        load(folder)


def test_weights_go_directly_to_the_device(tmp_path, monkeypatch):
    seen, theirs = {}, PreTrainedModel.from_pretrained.__func__
    monkeypatch.setattr(
        PreTrainedModel,
        "from_pretrained",
        classmethod(lambda cls, *args, **options: seen.update(options) or theirs(cls, *args, **options)),
    )
    load(saved(tmp_path, copy.deepcopy(plain("qwen3_window"))))
    assert seen["device_map"] == {"": torch.device("cpu")}


# text models inside larger ones

TEXT = SHAPE | dict(num_hidden_layers=2, head_dim=16)
VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)


def gemma3_vision():
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=TEXT | {"sliding_window": 8}, vision_config=VISION))


def mistral3():
    vision = VISION | {"model_type": "pixtral", "head_dim": 16}
    return Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=TEXT | {"model_type": "mistral"}, vision_config=vision)
    )


def llava():
    vision = VISION | {"model_type": "clip_vision_model"}
    return LlavaForConditionalGeneration(LlavaConfig(text_config=TEXT | {"model_type": "llama"}, vision_config=vision))


@pytest.fixture(params=[gemma3_vision, mistral3, llava], ids=lambda make: make.__name__)
def wrapped(request):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = request.param().float().eval()
        for p in model.parameters():
            p.data += 0.05 * torch.randn_like(p)
    return model.requires_grad_(False)


@pytest.mark.parametrize("named", ["as saved", "as in transformers"])
def test_a_text_model_inside_a_larger_one_is_loaded(tmp_path, wrapped, named):
    folder = saved(tmp_path, wrapped)
    if named == "as in transformers":
        save_file(
            {name: t.clone() for name, t in wrapped.state_dict().items()},
            folder / "model.safetensors",
            {"format": "pt"},
        )
    text = load(folder)
    inner = wrapped.model.language_model
    layer = text.layers["model.language_model.layers.1.mlp.down_proj"]
    assert torch.equal(layer.weight, inner.layers[1].mlp.down_proj.weight)
    assert torch.equal(text.model.get_input_embeddings().weight, wrapped.get_input_embeddings().weight)
    with torch.no_grad():
        theirs = wrapped(input_ids=torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    theirs = theirs.gather(-1, torch.tensor(IDS)[1:, None])[:, 0]
    torch.testing.assert_close(sequence_logprobs(text, IDS), theirs, atol=1e-5, rtol=0)


def test_its_adapter_has_the_names_that_peft_and_vllm_expect(tmp_path, wrapped):
    text = load(saved(tmp_path, wrapped))
    (tmp_path / "adapter").mkdir()
    weights = random_adapter(text, 1)
    for name, content in peft_files(text, weights, "").items():
        (tmp_path / "adapter" / name).write_bytes(content)
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names)
    assert text.architecture == type(wrapped).__name__
    wrapped.load_adapter(str(tmp_path / "adapter"))  # PEFT finds every layer by these names
    changed = {name: p for name, p in wrapped.named_parameters() if "lora_" in name}
    assert len(changed) == len(weights)
    for name, p in changed.items():
        assert torch.equal(p, weights[name.replace(".default", "")])


def test_other_composites_are_refused_before_anything_is_read(tmp_path):
    config = Qwen2_5_VLConfig()
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with pytest.raises(TrainError, match="Qwen2_5_VLForConditionalGeneration: only the text models inside gemma3, "):
        load(tmp_path)


# what config.json reveals


@pytest.mark.parametrize(
    ("content", "kind", "named"),
    [
        ({"model_type": "nobody_knows"}, TrainError, "nobody_knows"),
        ({"model_type": "t5"}, TrainError, "no causal language model for the model type 't5'"),
        ({"model_type": "llama", "num_hidden_layers": "two"}, TrainError, "cannot build"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "awq"}}, TrainError, "quantized (awq)"),
        ("{", StoreError, "cannot be loaded"),
    ],
    ids=["unknown", "encoder", "values", "quantized", "damaged"],
)
def test_a_config_that_cannot_be_trained(tmp_path, content, kind, named):
    (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(kind, match=re.escape(named)):
        load(tmp_path)


def test_gemma_in_float16_is_an_error(tmp_path):
    plain("gemma3").config.save_pretrained(tmp_path)
    with pytest.raises(TrainError, match='float16.*Pass dtype="bfloat16"'):
        load(tmp_path, dtype=torch.float16)


def test_a_tokenizer_that_does_not_fit_is_an_error(tmp_path):
    config = LlamaConfig(num_hidden_layers=1, **SHAPE | {"vocab_size": 50})
    with pytest.raises(StoreError, match="The tokenizer does not fit the model: it gives the id"):
        load(saved(tmp_path, LlamaForCausalLM(config)))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(StoreError, match="The tokenizer of .* cannot be loaded"):
        load(tmp_path)


# what only numbers reveal


def scaled_head(model):
    model.lm_head.register_forward_hook(lambda module, args, logits: logits * 1.001)


def masked_window(model):
    """A window that only the mask knows."""

    def shorten(module, args, kwargs):
        n = args[0].shape[1]
        near = torch.ones(n, n, dtype=torch.bool).tril().triu(-9)
        return args, kwargs | {"attention_mask": near[None, None]}

    model.model.layers[1].register_forward_pre_hook(shorten, with_kwargs=True)


def no_attend(model):
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {k: v for k, v in kwargs.items() if k != "attend"}), with_kwargs=True
    )


def wrong_shape(model):
    def cut(module, args, kwargs):
        return args, kwargs | {"hidden_states": kwargs["hidden_states"][..., :3]}

    model.model.layers[0].self_attn.register_forward_pre_hook(cut, with_kwargs=True)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (scaled_head, "the learner computes other probabilities than transformers"),
        (masked_window, "the learner computes other probabilities than transformers"),
        (no_attend, "does not run with art_nb's attention \\(TypeError"),
        (wrong_shape, "does not run with art_nb's attention \\(RuntimeError"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_the_check_finds_what_the_config_hides(change, why):
    model = copy.deepcopy(plain("llama"))
    checked_policy(copy.deepcopy(model), tokenizer())
    change(model)
    with pytest.raises(TrainError, match=f"^LlamaForCausalLM .*{why}"):
        checked_policy(model, tokenizer())


@pytest.mark.parametrize("family", ["mistral", "ministral", "qwen2", "qwen3_window", "gemma3"])
def test_the_check_leaves_windows_as_they_were(family):
    made, before = checked_policy(copy.deepcopy(plain(family)), tokenizer()), policy(family)
    assert torch.equal(sequence_logprobs(made, IDS), sequence_logprobs(before, IDS))


def test_out_of_memory_is_not_mistaken_for_an_architecture():
    model = copy.deepcopy(plain("llama"))

    def fail(*args):
        raise RuntimeError("CUDA out of memory")

    model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="^CUDA out of memory$"):
        checked_policy(model, tokenizer())


# patches by other libraries


def patched(*args, **kwargs):
    raise AttributeError("no attribute 'extend_rope_embedding'")


@pytest.mark.parametrize("when", ["before", "after"])
def test_patches_of_the_classes_do_not_reach_our_model(tmp_path, monkeypatch, when):
    folder, wanted = saved(tmp_path, copy.deepcopy(plain("llama"))), sequence_logprobs(policy("llama"), IDS)

    def patch():
        for name in ("LlamaModel", "LlamaDecoderLayer", "LlamaAttention", "LlamaMLP", "LlamaForCausalLM"):
            monkeypatch.setattr(getattr(modeling_llama, name), "forward", patched)
        monkeypatch.setattr(modeling_llama, "LlamaRotaryEmbedding", patched)
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", patched)

    if when == "before":
        patch()
    ours = load(folder)
    patch()
    torch.testing.assert_close(sequence_logprobs(ours, IDS), wanted, atol=1e-6, rtol=0)


def test_a_policy_over_a_given_model_keeps_the_forwards_of_its_classes(monkeypatch):
    ours = policy("llama")
    wanted = sequence_logprobs(ours, IDS)
    for name in ("LlamaModel", "LlamaDecoderLayer", "LlamaRotaryEmbedding"):
        monkeypatch.setattr(getattr(modeling_llama, name), "forward", patched)
    assert torch.equal(sequence_logprobs(ours, IDS), wanted)


# coverage, precision


def test_an_adapter_on_part_of_the_layers_is_reported():
    experts = MixtralConfig(num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, **SHAPE)
    note = coverage_note(checked_policy(MixtralForCausalLM(experts).float(), tokenizer()))
    assert re.match(
        r"The adapter covers 1\d% of the parameters of the linear layers. It leaves out "
        r"experts.gate_up_proj, experts.down_proj, gate.weight.$",
        note,
    )
    part = checked_policy(copy.deepcopy(plain("llama")), tokenizer(), targets=("q_proj", "v_proj"))
    assert re.search("pass target_modules with (up_proj|gate_proj|down_proj), .*, k_proj added", coverage_note(part))
    assert coverage_note(policy("llama")) == "", "the head gets no adapter, and nobody expects one"


async def test_registration_says_so_once(tmp_path, capsys):
    config = MixtralConfig(num_hidden_layers=1, num_local_experts=4, num_experts_per_tok=2, **SHAPE)
    folder = saved(tmp_path / "model", MixtralForCausalLM(config).float())
    model = art.TrainableModel(name="experts", project="tests", base_model=str(folder))
    async with art.LocalBackend(path=tmp_path, sampler="transformers", device="cpu") as backend:
        await model.register(backend)
        await model.register(backend)
    assert capsys.readouterr().out.count("% of the parameters of the linear layers. It leaves out experts.") == 1


def test_the_context_ends_where_position_embeddings_would_change():
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 64}
    rope = {"rope_type": "longrope", "rope_theta": 1e4} | factors
    config = LlamaConfig(num_hidden_layers=1, head_dim=32, rope_parameters=rope, **SHAPE)
    made = checked_policy(LlamaForCausalLM(config), tokenizer())
    worker = DeviceThread()
    try:
        assert TransformersSampler(made, worker).max_model_len == 64
        assert TransformersSampler(policy("llama"), worker).max_model_len == 512
    finally:
        worker.close()


def test_a_gguf_file_without_some_weights_is_an_error(tmp_path, monkeypatch):
    from gguf import GGUFWriter

    add = GGUFWriter.add_tensor
    monkeypatch.setattr(
        GGUFWriter, "add_tensor", lambda self, name, *rest: name == "blk.1.ffn_up.weight" or add(self, name, *rest)
    )
    file = save_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(StoreError, match="incomplete: 1 tensors of LlamaForCausalLM are missing"):
        load_gguf(file)


def test_the_precision_switch_is_for_the_cpu_only():
    matmul, before = torch.backends.mkldnn.matmul, torch.backends.mkldnn.matmul.fp32_precision
    with bf16_products(torch.ones(1, dtype=torch.bfloat16, device="meta")):
        assert matmul.fp32_precision == before
        torch.get_float32_matmul_precision()  # raises where the switch is set
    with bf16_products(torch.ones(1, dtype=torch.bfloat16)):
        assert matmul.fp32_precision == "bf16"


def test_gpt_oss_is_refused_by_its_feature(tmp_path):
    config = GptOssConfig(vocab_size=VOCABULARY, num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    with pytest.raises(TrainError, match="It has attention sinks, which art_nb does not compute"):
        load(tmp_path)


def test_the_adapter_of_a_checked_policy_can_be_trained():
    made = checked_policy(copy.deepcopy(plain("llama")), tokenizer())
    assert all(not p.is_inference() and p.requires_grad for p in made.parameters())
    assert not any(t.is_inference() for t in copy_adapter(made).values())
