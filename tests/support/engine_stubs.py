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


VLLM = {
    "vllm/__init__.py": '''
"""vLLM's interface.

`FAIL` holds what the next calls raise, by the name of the call. `REPLY` is every reply. With `LAG` 1, each step returns
the tokens of the step before, as with async scheduling: the first step returns nothing, and tokens of a request that
was aborted in the meantime still come.
"""
from dataclasses import dataclass
import json, pathlib

FAIL = {}
REPLY = [2]
LAG = 0
DEVICE = "cpu"


def empty(shape, dtype):
    import torch
    return torch.empty(shape, dtype=dtype, device=DEVICE)


@dataclass
class EngineArgs:
    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int = 64
    logprobs_mode: str = "raw_logprobs"
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int = 0
    gpu_memory_utilization: float = 0.9
    disable_log_stats: bool = False
    use_tqdm_on_load: bool = True
    enforce_eager: bool = False
    enable_chunked_prefill: bool = True
    max_num_batched_tokens: int = 0
    enable_lora: bool = False
    max_lora_rank: int = 8
    max_loras: int = 1
    max_cpu_loras: int = 1
    lora_target_modules: list | None = None
    kv_cache_dtype: str = "auto"
    load_format: str = "auto"
    language_model_only: bool = False
    hf_overrides: dict | None = None

    def create_model_config(self):
        if "config" in FAIL:
            raise FAIL["config"]
        return ModelConfig(json.loads((pathlib.Path(self.model) / "config.json").read_text())["architectures"][0])


@dataclass
class ModelConfig:
    architecture: str


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    ignore_eos: bool
    stop_token_ids: list
    logprobs: int
    detokenize: bool
    output_kind: str
    structured_outputs: object
    seed: int
''',
    "vllm/_C.py": "",
    "vllm/sampling_params.py": """
class RequestOutputKind:
    DELTA = "delta"


class StructuredOutputsParams(dict):
    pass
""",
    "vllm/model_executor/model_loader/__init__.py": """
LOADERS = {}


def register_model_loader(load_format):
    return lambda loader: LOADERS.setdefault(load_format, loader)


class BaseModelLoader:
    def __init__(self, load_config):
        self.load_config = load_config

    def create_model(self, vllm_config, model_config, prefix=""):
        return vllm_config.model_class(vllm_config)

    def load_model(self, vllm_config, model_config, prefix=""):
        model = self.create_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        self.load_weights(model, model_config)
        return model
""",
    "vllm/lora/request.py": """
from dataclasses import dataclass


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str
""",
    "vllm/lora/peft_helper.py": """
class PEFTHelper(dict):
    from_dict = classmethod(lambda cls, config: cls(config))
""",
    "vllm/lora/lora_model.py": """
class LoRAModel:
    @classmethod
    def from_lora_tensors(cls, lora_model_id, tensors, peft_helper, device="cuda", dtype=None, weights_mapper=None):
        adapter = cls()
        adapter.id, adapter.tensors, adapter.config, adapter.device = lora_model_id, tensors, peft_helper, device
        return adapter
""",
    "vllm/v1/worker/workspace.py": """
_manager = None         # the scratch memory of the engine that runs: of the whole process, as in vLLM
""",
    "vllm/v1/engine/llm_engine.py": '''
import json, pathlib
import torch
import vllm
from types import SimpleNamespace
from torch import nn
from vllm.model_executor.model_loader import LOADERS
from vllm.v1.worker import workspace

OPEN = []


class Executor:
    def shutdown(self):
        workspace._manager = None
        OPEN.remove(self)


class Finalizer:
    def detach(self):
        return self


STACKED = {"q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v")}
STACKED |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}


class Model(nn.Module):
    """The parameters of vLLM's Llama, in the memory of the CPU unless a loader of art_nb replaces them."""

    def __init__(self, args):
        super().__init__()
        config = json.loads((pathlib.Path(args.model) / "config.json").read_text())
        hidden, wide, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
        head = config.get("head_dim") or hidden // heads
        rows = heads + 2 * config["num_key_value_heads"]
        vocabulary, dtype = config["vocab_size"], getattr(torch, args.dtype)
        shapes = {"model.embed_tokens": (vocabulary, hidden), "model.norm": (hidden,)}
        if not config["tie_word_embeddings"]:
            shapes["lm_head"] = (vocabulary, hidden)
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            shapes |= {layer + "self_attn.qkv_proj": (rows * head, hidden), layer + "input_layernorm": (hidden,)}
            shapes |= {layer + "self_attn.o_proj": (hidden, heads * head), layer + "mlp.down_proj": (hidden, wide)}
            shapes |= {layer + "mlp.gate_up_proj": (2 * wide, hidden), layer + "post_attention_layernorm": (hidden,)}
        for name, shape in shapes.items():
            owner = self
            for part in name.split("."):
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter("weight", nn.Parameter(vllm.empty(shape, dtype), requires_grad=False))

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            owner, _, leaf = name.removesuffix(".weight").rpartition(".")
            stacked, *place = STACKED.get(leaf, (leaf,))
            parameter = parameters[f"{owner}.{stacked}.weight".lstrip(".")]
            parameter.weight_loader(parameter, tensor, *place)


class Worker:
    """The worker of an engine, with its manager of adapters."""

    def __init__(self, args):
        self.args, self.registered, self.model = args, {}, None
        if args.load_format != "auto":
            config = SimpleNamespace(**vars(args), model_class=Model)
            self.model = LOADERS[args.load_format](None).load_model(config, None)
        manager = SimpleNamespace(_adapter_manager=self)
        self.model_runner = SimpleNamespace(lora_manager=manager)

    def add_adapter(self, adapter):
        assert adapter.id not in self.registered and len(self.registered) < self.args.max_cpu_loras
        self.registered[adapter.id] = adapter


class LLMEngine:
    """Answers each request with the same tokens."""

    @classmethod
    def from_engine_args(cls, args):
        if "start" in vllm.FAIL:
            raise vllm.FAIL["start"]
        return cls(args)

    def __init__(self, args):
        self.model_config, self.arguments = args.create_model_config(), args
        self.model_executor, self.engine_core = Executor(), SimpleNamespace(_finalizer=Finalizer())
        OPEN.append(self.model_executor)
        self.workspace, self.requests, self.steps = object(), {}, []
        self.adapters, self.removed, self.aborted, self.resets = [], [], [], 0
        self.worker = Worker(args)
        workspace._manager = self.workspace

    def add_request(self, name, prompt, params, lora_request=None):
        if "add" in vllm.FAIL:
            raise vllm.FAIL["add"]
        if lora_request is not None:
            assert lora_request.lora_int_id in self.worker.registered
        self.adapters.append(lora_request)
        self.requests[name] = vllm.REPLY[: params.max_tokens]

    def step(self):
        assert workspace._manager is self.workspace, "the workspace of another engine"
        if "step" in vllm.FAIL:
            raise vllm.FAIL["step"]
        self.steps.append([self.next_token(name) for name in list(self.requests)])
        return self.steps.pop(0) if len(self.steps) > vllm.LAG else []

    def next_token(self, name):
        token, *rest = self.requests.pop(name)
        if rest:
            self.requests[name] = rest
        likely = {token: SimpleNamespace(logprob=-1.0), 7: SimpleNamespace(logprob=-2.0)}
        output = SimpleNamespace(token_ids=[token], logprobs=[likely], finish_reason=None if rest else "stop")
        return SimpleNamespace(request_id=name, finished=not rest, num_cached_tokens=0, outputs=[output])

    def abort_request(self, names):
        self.aborted += names
        for name in names:
            self.requests.pop(name, None)

    def remove_lora(self, number):
        self.removed.append(number)
        del self.worker.registered[number]

    def reset_prefix_cache(self):
        self.resets += 1
        return not self.requests and not vllm.FAIL.get("reset")

    def apply_model(self, func):
        return [func(self.worker.model)]

    def collective_rpc(self, method, args=(), kwargs=None):
        if callable(method):
            return [method(self.worker, *args)]
        for _ in kwargs["weights_iterator"]:
            pass
''',
}
