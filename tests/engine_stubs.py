"""Stand-ins for engines that need a GPU: packages in a directory, with the metadata that importlib.metadata reads."""
import sys
from pathlib import Path

UNSLOTH = '''
"""Unsloth's interface over transformers and peft. As Unsloth does on CUDA, it truncates long rows without an error."""
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

FORWARDS = []           # of each forward: whether gradients are computed, whether the model is in training mode


class FastLanguageModel:
    @staticmethod
    def from_pretrained(name, max_seq_length, dtype, load_in_4bit):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        model.max_seq_length = model.model.max_seq_length = max_seq_length
        whole = model.model.forward

        def forward(input_ids, attention_mask, position_ids, **options):
            FORWARDS.append((torch.is_grad_enabled(), model.model.training))
            kept = [values[:, :max_seq_length] for values in (input_ids, attention_mask, position_ids)]
            return whole(input_ids=kept[0], attention_mask=kept[1], position_ids=kept[2], **options)

        model.model.forward = forward
        return model, None

    @staticmethod
    def get_peft_model(model, use_gradient_checkpointing, **options):
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))

    @staticmethod
    def for_training(model, use_gradient_checkpointing=None):
        return model.train()

    @staticmethod
    def for_inference(model):
        return model.eval()
'''


def write_package(directory: Path, name: str, version: str, modules: dict[str, str], requires: tuple[str, ...] = ()):
    """Write a package into `directory`: its modules by path, and its metadata."""
    for path, source in modules.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {r}" for r in requires), ""]))


def forget_modules(monkeypatch, *names: str) -> None:
    """Take packages out of `sys.modules`; the monkeypatch puts them back."""
    for module in [m for m in sys.modules if m.partition(".")[0] in names]:
        monkeypatch.delitem(sys.modules, module)
