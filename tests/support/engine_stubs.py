"""Stand-ins for engines that need a GPU: packages in a directory, with the metadata that importlib.metadata reads."""

import sys
from pathlib import Path

UNSLOTH = '''
"""Unsloth's interface over transformers and peft. As Unsloth does on CUDA, it truncates long rows without an error."""
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

FORWARDS = []           # of each forward: whether gradients are computed, whether the model is in training mode
OPTIONS = []            # of each call of from_pretrained
DEVICE = "cpu"          # of a model without vLLM
STARTS_VLLM = True      # False as on machines on which Unsloth goes on without vLLM


class FastLanguageModel:
    @staticmethod
    def from_pretrained(model_name, max_seq_length, dtype, load_in_4bit, fast_inference=False, **options):
        OPTIONS.append(options)
        if fast_inference and STARTS_VLLM:
            from unsloth_zoo.vllm_utils import load_base

            model = load_base(model_name, max_seq_length, dtype, load_in_4bit, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype).to(DEVICE)
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


UNSLOTH_ZOO = '''
"""Unsloth starts vLLM and builds the model of transformers from vLLM's tensors, in 16 bits or in 4 bits."""
import inspect, os
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM


class Linear4bit(nn.Linear):
    """A linear layer with codes of 4 bits."""

    def __init__(self, codes, state):
        nn.Module.__init__(self)
        self.weight, self.bias, self.state = nn.Parameter(codes, requires_grad=False), None, state
        self.out_features, self.in_features = state.shape

    def forward(self, x):
        return F.linear(x, self.state.weights(self.weight).to(x.dtype))


def load_vllm(
    model_name, config, gpu_memory_utilization=0.8, max_seq_length=8192, dtype=None, training=True, max_lora_rank=16,
    max_loras=1, use_async=False, use_engine=False, disable_log_stats=False, enforce_eager=False,
    enable_prefix_caching=True, max_logprobs=0, use_bitsandbytes=True, max_num_seqs=256, max_num_batched_tokens=None,
):
    from vllm import FAIL, LLM

    if dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(f"Unsloth: We do not support dtype = {dtype} yet!")
    head = os.environ.get("UNSLOTH_VLLM_FP32_LM_HEAD") == "1"
    try:
        return LLM(
            model=model_name, gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=min(max_seq_length, FAIL.get("length", max_seq_length)), dtype=dtype, max_loras=max_loras,
            quantization="bitsandbytes" if use_bitsandbytes else None, max_lora_rank=max_lora_rank,
            load_format="bitsandbytes" if use_bitsandbytes else "auto",
            max_num_batched_tokens=max_num_batched_tokens or 0,
            max_num_seqs=max_num_seqs, max_logprobs=max_logprobs, logprobs_mode="processed_logprobs", enable_lora=True,
            disable_log_stats=disable_log_stats, enable_prefix_caching=enable_prefix_caching,
            enforce_eager=enforce_eager, hf_overrides={"head_dtype": "float32"} if head else None,
        )
    except Exception as error:
        raise RuntimeError(str(error))


PARTS = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}
PARTS |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}


def part_of(parameter, i, sizes):
    """Return a part of a joined parameter, and its state if it is quantized."""
    states = getattr(parameter, "bnb_quant_state", None)
    ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)] if states is None else parameter.bnb_shard_offsets
    return parameter.data[ends[i] : ends[i + 1]], states and states[i]


@torch.inference_mode()
def convert_vllm_to_huggingface(theirs, config, dtype):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    parameters = dict(theirs.named_parameters())
    for name, module in list(model.named_modules()):
        owner, _, leaf = name.rpartition(".")
        if not hasattr(module, "weight"):
            continue
        joined, i = PARTS.get(leaf, (leaf, 0))
        names = [part for part, (whole, _) in PARTS.items() if whole == joined] or [leaf]
        sizes = [len(model.get_submodule(f"{owner}.{part}" if owner else part).weight) for part in names]
        source = parameters.get(f"{owner}.{joined}.weight".lstrip("."), parameters["model.embed_tokens.weight"])
        tensor, state = part_of(source, i, sizes)
        if state is None:
            module.weight = nn.Parameter(tensor, requires_grad=False)
        else:
            setattr(model.get_submodule(owner), leaf, Linear4bit(tensor, state))
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(model.model.norm.weight.device)
    return model.eval()


def load_base(name, max_seq_length, dtype, load_in_4bit, use_exact_model_name=False, **options):
    assert use_exact_model_name
    config = AutoConfig.from_pretrained(name)
    allowed = inspect.getfullargspec(load_vllm).args
    passed = {key: value for key, value in options.items() if key in allowed}
    llm = load_vllm(name, config, max_seq_length=max_seq_length, dtype=dtype, use_bitsandbytes=load_in_4bit, **passed)
    inside = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner.model
    model = convert_vllm_to_huggingface(inside, config, dtype)
    model.vllm_engine, model.fast_generate = llm, llm.generate
    return model
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
    quantization: str | None = None
    max_logprobs: int = 20

    def create_model_config(self):
        if "config" in FAIL:
            raise FAIL["config"]
        config = json.loads((pathlib.Path(self.model) / "config.json").read_text())
        return ModelConfig(config["architectures"][0], self.max_model_len)


class LLM:
    """vLLM's class for synchronous use. `llm_engine` reads the weights of the checkpoint."""

    def __init__(self, **options):
        from vllm.v1.engine.llm_engine import LLMEngine

        self.llm_engine = LLMEngine.from_engine_args(EngineArgs(**options))
        self.llm_engine.worker.read()

    def generate(self, prompts):
        raise AssertionError("the sampler steps the engine itself")


@dataclass
class ModelConfig:
    architecture: str
    max_model_len: int


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
        vocabulary, dtype = config["vocab_size"], getattr(torch, str(args.dtype).removeprefix("torch."))
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


class State:
    """The shape and the scale of weights in 4 bits."""

    def __init__(self, weights):
        self.shape, self.scale = tuple(weights.shape), weights.abs().max() / 7

    def codes(self, weights):
        low, high = (weights / self.scale + 8).round().to(torch.uint8).flatten().view(-1, 2).unbind(1)
        return (low + 16 * high)[:, None]

    def weights(self, codes):
        halves = torch.cat([codes % 16, codes // 16], 1)
        return (halves.to(self.scale.dtype) - 8).view(self.shape) * self.scale


def quantize(owner, shards):
    """Replace the weight of a module by the codes of its parts, as the plugin of vLLM for bitsandbytes does."""
    states = [State(shard) for shard in shards]
    parts = [state.codes(shard) for state, shard in zip(states, shards)]
    owner.weight = nn.Parameter(torch.cat(parts), requires_grad=False)
    owner.weight.bnb_quant_state = dict(enumerate(states))
    owner.weight.bnb_shard_offsets = [sum(map(len, parts[:i])) for i in range(len(parts) + 1)]


class Worker:
    """The worker of an engine, with its manager of adapters."""

    def read(self):
        """Read the weights of the checkpoint."""
        from safetensors.torch import load_file

        self.model, shards = Model(self.args), {}
        for name, parameter in self.model.named_parameters():
            parameter.weight_loader = lambda p, tensor, place=0: shards.setdefault(p, {}).update({place: tensor})
        for path in pathlib.Path(self.args.model).glob("*.safetensors"):
            self.model.load_weights(load_file(path).items())
        for name, parameter in list(self.model.named_parameters()):
            placed = shards[parameter]
            parts = [placed[place].to(parameter.dtype) for place in ("q", "k", "v", 0, 1) if place in placed]
            parameter.data.copy_(torch.cat(parts))
            if self.args.quantization and "layers." in name and "norm" not in name:
                on_device = parameter.data.split([len(part) for part in parts])
                quantize(self.model.get_submodule(name.rpartition(".")[0]), on_device)
        self.model_runner.model = self.model

    def __init__(self, args):
        self.args, self.registered, self.model = args, {}, None
        if args.load_format in LOADERS:
            config = SimpleNamespace(**vars(args), model_class=Model)
            self.model = LOADERS[args.load_format](None).load_model(config, None)
        manager = SimpleNamespace(_adapter_manager=self)
        self.model_runner = SimpleNamespace(lora_manager=manager)

    def add_adapter(self, adapter):
        room = max(self.args.max_cpu_loras, self.args.max_loras)
        assert adapter.id not in self.registered and len(self.registered) < room
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
        self.model_executor = Executor()
        core = SimpleNamespace(model_executor=self.model_executor)
        self.engine_core = SimpleNamespace(_finalizer=Finalizer(), engine_core=core)
        OPEN.append(self.model_executor)
        lora = SimpleNamespace(max_cpu_loras=max(args.max_cpu_loras, args.max_loras))
        self.vllm_config = SimpleNamespace(lora_config=lora)
        self.workspace, self.requests, self.steps = object(), {}, []
        self.adapters, self.removed, self.aborted, self.resets = [], [], [], 0
        self.worker = self.model_executor.driver_worker = Worker(args)
        if "change" in vllm.FAIL:  # a parameter is converted in place
            self.worker.model.get_parameter(vllm.FAIL["change"]).data.mul_(2)
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
