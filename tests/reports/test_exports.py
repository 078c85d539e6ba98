"""`model.export` of run directories, and adapter directories of other libraries as base models."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import art_nb as art
from art_nb.policy.merged_files import MergedFiles, read_updates, write_merged
from art_nb.reports.exports import check_target, export_model, modelfile

IDS = torch.arange(3, 40)[None]


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def peft_directory(base, folder, seed=0, **options):
    """A directory written by PEFT itself."""
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | options)
    model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1, generator=generator)
    model.save_pretrained(folder)
    return folder


async def registered(base, path, **fields):
    model = art.TrainableModel(name="exported", project="p", base_model=str(base), base_path=str(path), **fields)
    backend = art.LocalBackend(path=str(path), dtype="float32")
    await model.register(backend)
    return model, backend


@pytest.fixture
async def run(tiny_model_dir, tmp_path):
    """A closed run whose step 0 has a random adapter."""
    adapter = peft_directory(tiny_model_dir, tmp_path / "adapter", target_modules=["q_proj", "up_proj"])
    model, backend = await registered(adapter, tmp_path / ".art")
    await backend.close()
    return model


async def test_a_closed_run_gives_the_logits_of_peft(run, tiny_model_dir, tmp_path):
    merged = export_model(run.store.path, "merged", tmp_path / "merged", progress=False)
    adapter = export_model(run.store, "peft", tmp_path / "peft", step=0, progress=False)
    expected = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model_dir), adapter))
    plain = logits(AutoModelForCausalLM.from_pretrained(tiny_model_dir))
    assert (expected - plain).abs().max() > 0.01
    assert (logits(AutoModelForCausalLM.from_pretrained(merged)) - expected).abs().max() < 1e-5
    assert AutoTokenizer.from_pretrained(merged).chat_template == AutoTokenizer.from_pretrained(adapter).chat_template


async def test_an_existing_directory_is_kept(run, tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine.txt").write_text("keep")
    with pytest.raises(art.StoreError, match="was not written by"):
        await run.export("peft", target, overwrite=True)
    assert (target / "mine.txt").read_text() == "keep"
    path = await run.export("peft", tmp_path / "new")
    with pytest.raises(art.StoreError, match="overwrite=True"):
        await run.export("peft", path)
    assert await run.export("peft", path, overwrite=True) == path
    (path / "mine.txt").write_text("keep")
    with pytest.raises(art.StoreError, match="contains other files"):
        await run.export("peft", path, overwrite=True)
    assert (path / "mine.txt").read_text() == "keep"


@pytest.mark.parametrize("text", ['{"grafana": 1}', '{"format": "x", "run": "x", "versions": {}}', "[]", "broken"])
def test_an_export_json_of_another_program_is_no_earlier_export(tmp_path, text):
    (tmp_path / "export.json").write_text(text)
    with pytest.raises(art.StoreError, match="was not written by"):
        check_target(tmp_path, overwrite=True)


async def test_a_failed_export_leaves_nothing(run, tmp_path):
    weights = run.store.checkpoint_dir(0) / "adapter_model.safetensors"
    tensors, before = load_file(weights), sorted(tmp_path.iterdir())
    save_file({f"base_model.model.strange.{name}": value for name, value in tensors.items()}, weights)
    with pytest.raises(art.StoreError, match="is damaged .its weights differ") as failure:
        await run.export("merged", tmp_path / "out")
    assert "Could not write" not in str(failure.value)
    weights.write_bytes(b"broken")
    with pytest.raises(art.StoreError, match="no complete checkpoint"):
        await run.export("merged", tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before
    for options in ({"format": "onnx"}, {"format": "peft", "dtype": "float16"}, {"format": "merged", "dtype": "int8"}):
        with pytest.raises(art.TrainError, match="Invalid"):
            await run.export(path=tmp_path / "out", **options)


async def test_another_chat_template_is_exported(tiny_model_dir, tmp_path):
    config = {"chat_template": "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"}
    model, backend = await registered(tiny_model_dir, tmp_path / ".art", _internal_config=config)
    path = await model.export("merged", tmp_path / "merged")  # while the model is registered
    await backend.close()
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "[a]"
    assert export_model(model.store.path, "gguf", tmp_path / "m.gguf").stat().st_size > 100_000


@pytest.mark.parametrize("tools", ["", "{% for tool in tools %}{{ tool }}{% endfor %}"])
async def test_a_modelfile_has_no_template_that_leaves_tools_out(tiny_model_dir, tmp_path, tools):
    turns = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }};{% endfor %}[assistant]"
    model, backend = await registered(
        tiny_model_dir, tmp_path / ".art", _internal_config={"chat_template": tools + turns}
    )
    path = await model.export("ollama", tmp_path / "ollama")
    await backend.close()
    assert ('TEMPLATE """' in (path / "Modelfile").read_text()) == (not tools)


def test_stop_words_of_a_modelfile_are_written_as_they_are():
    assert 'PARAMETER stop "<｜end▁of▁sentence｜>"' in modelfile("m.gguf", 64, ["<｜end▁of▁sentence｜>"], None)


async def test_the_card_has_no_markup_of_others(run, tmp_path):
    question, metrics = [{"role": "user", "content": "a"}], {"<script>|x": 1}
    reward = [art.Trajectory(messages_and_choices=question, reward=r, metrics=metrics) for r in (0.0, 1.0)]
    run.store.write_groups("train", 0, [art.TrajectoryGroup(reward)])
    card = (await run.export("peft", tmp_path / "out")).joinpath("README.md").read_text()
    assert "<script>" not in card and "\\<script\\>\\|x" in card
    assert str(tmp_path) not in card and 'license_name: "unknown"' in card


def test_shards_keep_their_files(tiny_model_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.save_pretrained(tmp_path / "base", max_shard_size="150KB")
    adapter = peft_directory(tmp_path / "base", tmp_path / "adapter", use_rslora=True)
    (tmp_path / "merged").mkdir()
    write_merged(MergedFiles(tmp_path / "base", read_updates(adapter)), tmp_path / "merged")
    assert len([*(tmp_path / "merged").glob("model-*.safetensors")]) > 1
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), adapter)
    assert (logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")) - logits(tuned)).abs().max() < 1e-5
    with pytest.raises(art.StoreError, match="use_dora"):
        read_updates(peft_directory(tmp_path / "base", tmp_path / "dora", use_dora=True))


async def test_a_directory_like_torchtunes_is_a_base_model(tiny_model_dir, tmp_path):
    written = peft_directory(tiny_model_dir, tmp_path / "peft", target_modules=["q_proj", "v_proj"])
    folder = tmp_path / "epoch_0"  # torchtune 0.6: the adapter in PEFT's format with four settings, next to the configs
    folder.mkdir()
    save_file(load_file(written / "adapter_model.safetensors"), folder / "adapter_model.safetensors")
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": str(tiny_model_dir)}))
    (folder / "config.json").write_text((tiny_model_dir / "config.json").read_text())
    model, backend = await registered(folder, tmp_path / ".art")
    await backend.close()
    merged = await model.export("merged", tmp_path / "merged")
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model_dir), written)
    assert (logits(AutoModelForCausalLM.from_pretrained(merged)) - logits(tuned)).abs().max() < 1e-5
