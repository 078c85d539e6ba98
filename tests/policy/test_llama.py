"""The Llama in plain PyTorch: it equals that of transformers, and leaves everything else to transformers."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import random_adapter, tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaConfig

from art_nb.core.types import StoreError
from art_nb.models.tiny import tiny_model, tiny_tokenizer
from art_nb.policy.adapters import load_adapter, masters
from art_nb.policy.architectures import model_class, read_config
from art_nb.policy.llama import LlamaForCausalLM, PlainConfig, read_plain_config
from art_nb.policy.loading import checked_policy, load_model, load_policy, load_tokenizer
from art_nb.policy.lora import TARGETS, Policy
from art_nb.policy.packing import Segment, tree_attention

CPU, FP32 = torch.device("cpu"), torch.float32
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def config(**options):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**SIZES | heads | {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5} | options)


def saved(folder, **options):
    """Save a model of transformers with random weights, and return it."""
    torch.manual_seed(0)
    model = model_class(config(**options))(config(**options)).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    return model


VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 16},
    "one key head": {"num_key_value_heads": 1},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_the_logits_equal_those_of_transformers(tmp_path, options):
    expected = saved(tmp_path, **options)
    loaded = load_model(tmp_path, read_config(tmp_path), FP32, CPU)
    assert type(loaded) is LlamaForCausalLM
    ids = torch.randint(96, (3, 40))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, expected(ids).logits, atol=1e-6, rtol=1e-5)
    assert dict(loaded.named_parameters()).keys() == dict(expected.named_parameters()).keys()


@pytest.mark.parametrize("targets", [TARGETS, ("q_proj", "down_proj")], ids=["all", "two"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_logprobs_and_gradients_equal_those_of_a_policy_of_transformers(tmp_path, targets, checkpointing):
    expected = Policy(saved(tmp_path), targets=targets)
    policy = Policy(load_model(tmp_path, read_config(tmp_path), FP32, CPU), targets=targets)
    weights = random_adapter(policy, 1)
    gradients = []
    for each in (expected, policy):
        load_adapter(each, weights)
        each.checkpointing = checkpointing
        ids = torch.arange(3, 40)
        attend = tree_attention([Segment(0, len(ids), ids[:0])])
        logprobs, entropy = each.scores(each.hidden(ids, torch.arange(len(ids)), attend)[:-1], ids[1:])
        (logprobs.sum() + entropy.sum()).backward()
        gradients.append({name: master.grad for name, master in masters(each).items()})
    assert policy.architecture == expected.architecture
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-4)


def test_the_decoder_covers_it(tmp_path):
    saved(tmp_path, vocab_size=300)
    tokenizer().save_pretrained(tmp_path)
    policy = load_policy(tmp_path, device="cpu", dtype=FP32)
    reference = checked_policy(load_model(tmp_path, AutoConfig.from_pretrained(tmp_path), FP32, CPU), tokenizer())
    assert type(policy.model) is LlamaForCausalLM and policy.has_decoder == reference.has_decoder
    assert policy.has_native_decoder == reference.has_native_decoder


CHANGES = {
    "bias": {"attention_bias": True},
    "MLP bias": {"mlp_bias": True},
    "activation": {"hidden_act": "gelu"},
    "scaled positions": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "old scaled positions": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "partial rotation": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "unknown option": {"residual_scale": 2.0},
    "quantized": {"quantization_config": {"quant_method": "gptq"}},
    "other model": {"model_type": "mistral"},
    "other class": {"architectures": ["LlamaForSequenceClassification"]},
    "no heads": {"num_attention_heads": 0, "head_dim": None},
    "a text as a number": {"num_hidden_layers": "2"},
    "unknown dtype": {"dtype": "float99"},
    "a list as positions": {"rope_parameters": [1.0]},
    "missing layer": {"num_hidden_layers": 3},
    "additional layer": {"num_hidden_layers": 1},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_everything_else_is_left_to_transformers(tmp_path, change):
    saved(tmp_path)
    assert isinstance(read_plain_config(tmp_path), PlainConfig)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | change))
    assert read_plain_config(tmp_path) is None


def test_the_older_name_of_the_rotation_does_not_replace_it(tmp_path):
    """The config of many checkpoints contains both. In transformers 5.24, they are the same attribute."""
    saved(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    rope = fields["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(fields | {"rope_scaling": None}))
    config = read_plain_config(tmp_path)
    assert config.rope_parameters == rope and "rope_scaling" not in vars(config)


@pytest.mark.parametrize("damage", ["{", "[]", "null"])
def test_damaged_files_are_left_to_transformers(tmp_path, damage):
    saved(tmp_path)
    (tmp_path / "config.json").write_text(damage)
    assert read_plain_config(tmp_path) is None
    assert read_plain_config(tmp_path / "missing") is None


def test_other_tensors_are_left_to_transformers(tmp_path):
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, file, {"format": "pt"})
    assert read_plain_config(tmp_path) is None
    file.write_bytes(b"no tensors")
    assert read_plain_config(tmp_path) is None


def test_tokenizer_and_generation_config_equal_those_of_transformers(tmp_path):
    saved(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[1, 2]).save_pretrained(tmp_path)
    ours, expected = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(expected) and ours.chat_template == expected.chat_template
    assert ours.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert ours.init_kwargs == expected.init_kwargs
    loaded = load_model(tmp_path, read_config(tmp_path), FP32, CPU)
    assert loaded.generation_config.eos_token_id == [1, 2]
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(StoreError, match="cannot be loaded"):
        load_model(tmp_path, read_config(tmp_path), FP32, CPU)


@pytest.mark.parametrize("change", [{}, {"dtype": "bfloat16"}, {"dtype": None, "torch_dtype": "float16"}])
def test_the_config_has_the_values_of_transformers(tmp_path, change):
    saved(tmp_path, eos_token_id=None)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | change))
    ours, expected = read_plain_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    unlike = ("transformers_version", "torch_dtype")
    assert {name: getattr(expected, name) for name in vars(ours) if name not in unlike} == {
        name: value for name, value in vars(ours).items() if name not in unlike
    }
    assert ours.get_text_config() is ours


REGISTER = """
import asyncio, sys
import art_nb as art

async def main():
    model = art.TrainableModel(name="start", project="test", base_model=sys.argv[1])
    async with art.LocalBackend(path=sys.argv[2], device="cpu", verbose=False) as backend:
        await model.register(backend)
        slow = {"torch._dynamo", "torch.distributed.tensor"}
        slow |= {"transformers.modeling_utils", "transformers.configuration_utils", "transformers.models"}
        print(sorted(slow & {*sys.modules}))

asyncio.run(main())
"""


def test_a_registered_model_needs_no_slow_imports(tmp_path):
    model, words = tiny_model(len(tiny_tokenizer())), tiny_tokenizer()
    model.save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    assert isinstance(read_config(tmp_path / "model"), PlainConfig)
    command = [sys.executable, "-c", REGISTER, str(tmp_path / "model"), str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
