"""A directory with an adapter as base_model: training begins where another program, or another run, left it."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.registered import QUESTION, heard
from transformers import AutoModelForCausalLM

import art_nb as art
from art_nb.core.events import Warned
from art_nb.core.types import StoreError, TrainError
from art_nb.learners import checkpoints
from art_nb.models.tiny import tiny_model
from art_nb.models.weights import adapter_shape, base_name, fetch
from art_nb.policy import adapter_files
from art_nb.policy.lora import sequence_logprobs

IDS = [1, 40, 41, 42, 2, 1, 77, 78]
LESSONS = [art.Trajectory(messages_and_choices=[*QUESTION, {"role": "assistant", "content": "B2"}])] * 2


@pytest.fixture
def place(tiny_model_dir, tmp_path):
    """An adapter as PEFT leaves it: of rank 4, its targets an expression, in bf16, and not nought."""
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=r".*\.(q_proj|down_proj)", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32), config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.2)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
async def local(tmp_path):
    async with art.LocalBackend(path=tmp_path / "runs", verbose=False, dtype="float32") as backend:
        yield backend


def begun(place, name="warm", **options):
    return art.TrainableModel(name=name, project="tests", base_model=str(place), **options)


def mend(place, **fields):
    """Change what the adapter says of itself."""
    file = place / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def adapter_of(model, step):
    return adapter_files.read_adapter(model.store.checkpoint_dir(step))


def logprobs(backend, model):
    home = backend.runtime(model)
    return home.worker.call(sequence_logprobs, home.policy, IDS)


async def test_the_first_step_is_pefts_model(place, local, tiny_model_dir):
    from peft import PeftModel

    model = begun(place)
    await model.register(local)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    peft = PeftModel.from_pretrained(plain, place).eval()
    with torch.no_grad():
        logits = peft(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    theirs = logits.gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0]
    torch.testing.assert_close(logprobs(local, model), theirs, atol=1e-4, rtol=0)
    written = json.loads((model.store.checkpoint_dir(0) / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["target_modules"]) == (4, 6, ["down_proj", "q_proj"])
    assert written["base_model_name_or_path"] == str(tiny_model_dir)
    assert checkpoints.lineage(model.store.checkpoint_dir(0)) == [str(model.store.checkpoint_dir(0)), str(place)]
    assert await model.get_step() == 0
    assert str(tiny_model_dir) in local.runtime(model).names()  # the model without any adapter


async def test_training_continues_and_resumes(place, tmp_path):
    model = begun(place)
    async with art.LocalBackend(path=tmp_path / "runs", verbose=False) as backend:
        await model.register(backend)
        await model.train_sft(LESSONS, art.TrainSFTConfig(learning_rate=1e-3))
        after = logprobs(backend, model)
    first, second = adapter_of(model, 0), adapter_of(model, 1)
    assert first.keys() == second.keys()
    assert any(not torch.equal(first[name], second[name]) for name in first)
    async with art.LocalBackend(path=tmp_path / "runs", verbose=False) as backend:
        again = begun(place)
        await again.register(backend)
        assert await again.get_step() == 1
        torch.testing.assert_close(logprobs(backend, again), after)


async def test_a_checkpoint_of_ours_begins_another_run(local, tiny_model_dir):
    taught = begun(tiny_model_dir, "taught", lora_config={"rank": 2, "target_modules": ["v_proj"]})
    await taught.register(local)
    await taught.train_sft(LESSONS, art.TrainSFTConfig(learning_rate=1e-2))
    said = heard(local, Warned)
    model = begun(taught.store.checkpoint_dir(1), lora_config={"rank": 16, "target_modules": ["v_proj"]})
    await model.register(local)
    assert await model.get_step() == 0
    torch.testing.assert_close(logprobs(local, model), logprobs(local, taught))
    assert [event.message for event in said if "determines its rank." in event.message]
    assert base_name(model.base_model) == str(tiny_model_dir)
    assert art.get_tokenizer(model.base_model).eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"base_model_name_or_path": "nowhere"}, StoreError, "was trained from 'nowhere', which is not available"),
        ({"base_model_name_or_path": "no/such-model"}, StoreError, "no/such-model cannot be loaded"),
        ({"base_model_name_or_path": None}, StoreError, "does not say of which model"),
        ({"use_rslora": True}, StoreError, "use_rslora"),
        ({"r": 8}, TrainError, "does not fit"),
    ],
    ids=["no such name", "not on the hub", "none", "rslora", "rank"],
)
async def test_an_adapter_that_cannot_begin_a_run(place, local, fields, error, said):
    mend(place, **fields)
    model = begun(place)
    with pytest.raises(error, match=said):
        await model.register(local)
    assert model.store.steps_saved() == []


async def test_an_adapter_of_another_model(place, local, tmp_path, tiny_model_dir):
    other = shutil.copytree(tiny_model_dir, tmp_path / "other")
    config = tiny_model(len(art.get_tokenizer(str(tiny_model_dir)))).config
    config.num_hidden_layers = 1
    type(tiny_model(320))(config).save_pretrained(other)
    mend(place, base_model_name_or_path=str(other))
    with pytest.raises(TrainError, match=f"{place}: The adapter does not fit"):
        await begun(place).register(local)


def test_an_adapter_of_an_adapter(place, tmp_path):
    second = shutil.copytree(place, tmp_path / "second")
    mend(second, base_model_name_or_path=str(place))
    with pytest.raises(StoreError, match="is an adapter itself"):
        fetch(second)
    file = second / "adapter_config.json"
    for content in ("[]", "{", "{}"):
        file.write_text(content)
        with pytest.raises(StoreError, match="does not say of which model"):
            fetch(second)


def test_other_kinds_of_adapters_are_refused(place):
    file = place / "adapter_config.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in written.items() if k != "r"} | {"peft_type": "IA3"}))
    with pytest.raises(StoreError, match="type IA3"):
        adapter_shape(place)
    (place / "adapter_model.safetensors").unlink()
    file.write_text(json.dumps(written))
    with pytest.raises(StoreError, match="no adapter_model.safetensors"):
        adapter_shape(place)
