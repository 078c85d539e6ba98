"""What art_nb uses of vLLM and Unsloth exists in the sources of several versions. Nothing of them is imported."""

import ast
from functools import cache
from pathlib import Path

import pytest
from support.wheel_sources import sources

from art_nb.learners import unsloth
from art_nb.samplers import vllm

VLLM_VERSIONS = ("0.26.0", "0.32.0", "0.33.0")
UNSLOTH_VERSIONS = ("2026.10.7", "2026.10.9")
V1 = "vllm/v1/"
CLASSES = {  # names that a class must have: fields, attributes, methods
    "vllm/engine/arg_utils.py:EngineArgs": "create_model_config",
    "vllm/config/model.py:ModelConfig": "architecture max_model_len",
    "vllm/config/vllm.py:VllmConfig": "lora_config",
    "vllm/config/lora.py:LoRAConfig": "max_cpu_loras",
    "vllm/entrypoints/llm.py:LLM": "llm_engine",
    "vllm/sampling_params.py:SamplingParams": "",
    "vllm/sampling_params.py:StructuredOutputsParams": " ".join(vllm.FORMS),
    "vllm/sampling_params.py:RequestOutputKind": "DELTA",
    "vllm/outputs.py:RequestOutput": "request_id outputs finished num_cached_tokens",
    "vllm/outputs.py:CompletionOutput": "token_ids logprobs finish_reason",
    "vllm/logprobs.py:Logprob": "logprob",
    "vllm/model_executor/layers/vocab_parallel_embedding.py:VocabParallelEmbedding": "org_vocab_size",
    "vllm/lora/request.py:LoRARequest": "lora_name lora_int_id lora_path",
    V1 + "engine/llm_engine.py:LLMEngine": "model_config engine_core model_executor vllm_config",
    V1 + "engine/core_client.py:InprocClient": "engine_core _finalizer",
    V1 + "engine/core.py:EngineCore": "model_executor",
    V1 + "executor/abstract.py:Executor": "shutdown",
    V1 + "worker/gpu_worker.py:Worker": "reload_weights model_runner",
    "vllm/lora/worker_manager.py:WorkerLoRAManager": "_adapter_manager",
    "vllm/lora/model_manager.py:LoRAModelManager": "model",
    "vllm/model_executor/models/utils.py:WeightsMapper": "get_rename_mapper",
    V1 + "worker/lora_model_runner_mixin.py:LoRAModelRunnerMixin": "lora_manager",
}
CALLS = {  # parameters that a function must have; those before "*" in this order
    V1 + "engine/llm_engine.py:LLMEngine.from_engine_args": "engine_args",
    V1 + "engine/llm_engine.py:LLMEngine.add_request": "request_id prompt params * lora_request",
    V1 + "engine/llm_engine.py:LLMEngine.step": "",
    V1 + "engine/llm_engine.py:LLMEngine.abort_request": "request_ids",
    V1 + "engine/llm_engine.py:LLMEngine.reset_prefix_cache": "",
    V1 + "engine/llm_engine.py:LLMEngine.collective_rpc": "method * args kwargs",
    "vllm/lora/lora_model.py:LoRAModel.from_lora_tensors": "lora_model_id tensors peft_helper * device weights_mapper",
    "vllm/lora/peft_helper.py:PEFTHelper.from_dict": "config_dict",
    "vllm/lora/model_manager.py:LRUCacheLoRAModelManager.add_adapter": "lora",
    V1 + "engine/llm_engine.py:LLMEngine.remove_lora": "lora_id",
    V1 + "engine/llm_engine.py:LLMEngine.apply_model": "func",
    "vllm/model_executor/model_loader/__init__.py:register_model_loader": "load_format",
    "vllm/model_executor/model_loader/base_loader.py:BaseModelLoader.__init__": "load_config",
    "vllm/model_executor/model_loader/base_loader.py:BaseModelLoader.download_model": "model_config",
    "vllm/model_executor/model_loader/base_loader.py:BaseModelLoader.create_model": "* vllm_config model_config prefix",
    "vllm/model_executor/model_loader/base_loader.py:BaseModelLoader.load_weights": "model model_config",
    "vllm/model_executor/model_loader/base_loader.py:BaseModelLoader.load_model": "* vllm_config model_config prefix",
    V1 + "worker/gpu_model_runner.py:GPUModelRunner.reload_weights": "* weights_iterator",
    V1 + "worker/gpu/model_runner.py:GPUModelRunner.reload_weights": "* weights_iterator",
}
TEXTS = {  # words that one of the files must contain, in any case
    **{word: ("vllm/envs.py",) for word in (vllm.IN_PROCESS | vllm.SETTINGS)},
    **{word: ("vllm/__init__.py",) for word in ("LLM", "EngineArgs", "SamplingParams")},
    "_manager": (V1 + "worker/workspace.py",),
    "shard_id": ("vllm/model_executor/models/utils.py",),
    "weight_loader": ("vllm/model_executor/models/utils.py",),
    "head_dtype": ("vllm/config/model.py",),
    "processed_logprobs": ("vllm/config/model.py",),
    "kv cache is needed": (V1 + "core/kv_cache_utils.py", V1 + "core/kv_cache_planning.py"),
    "cache blocks. ": (V1 + "core/kv_cache_utils.py", V1 + "core/kv_cache_planning.py"),
    "free memory on device": (V1 + "worker/utils.py", V1 + "worker/gpu_worker.py"),
    "available memory on node": (V1 + "worker/cpu_worker.py",),
}
UNSLOTH_CLASSES = {
    "unsloth/models/loader.py:FastLanguageModel": "from_pretrained get_peft_model for_training for_inference"
}
UNSLOTH_CALLS = {
    "unsloth/models/loader.py:FastLanguageModel.from_pretrained": "model_name * max_seq_length dtype load_in_4bit "
    "use_exact_model_name fast_inference gpu_memory_utilization max_lora_rank",
    "unsloth/models/loader.py:FastLanguageModel.for_training": "model * use_gradient_checkpointing",
    "unsloth/models/llama.py:FastLlamaModel.get_peft_model": "model * r lora_alpha target_modules lora_dropout bias "
    "use_gradient_checkpointing",
    "unsloth/models/llama.py:LlamaModel_fast_forward": "self * input_ids attention_mask position_ids use_cache",
}
LOADER = ("unsloth/models/loader.py",)
UNSLOTH_TEXTS = {
    "FastLanguageModel": ("unsloth/models/__init__.py",),
    "vllm_engine": ("unsloth/models/llama.py",),
    **{word: LOADER for word in (*unsloth.FAST_MODELS, "max_loras", "max_num_seqs", "max_logprobs")},
}
LOAD_VLLM = "unsloth_zoo/vllm_utils.py:load_vllm"  # gets the other arguments of from_pretrained
ZOO_ARGS = {"max_loras", "max_num_seqs", "max_logprobs"} | unsloth.FAST_ENGINE_ARGS - {"kv_cache_memory_bytes"}
ZOO_CALLS = {LOAD_VLLM: f"* {' '.join(sorted(ZOO_ARGS))}"}
PLUGIN = "vllm_bnb_plugin/quantization/config.py"
ZOO_TEXTS = {word: ("unsloth_zoo/vllm_utils.py",) for word in (unsloth.FP32_HEAD, "vllm_bnb_plugin.bitsandbytes")}
# vLLM 0.26 is older than art_nb accepts. It is read because it is the version for Colab's CUDA 12.8 images.
DIFFERENCES = {
    "0.26.0": {
        "InprocClient has no _finalizer",  # `shut_down` checks for it
        "GPUModelRunner.reload_weights takes any arguments",
        "WeightsMapper has no get_rename_mapper",
        "BaseModelLoader.create_model does not exist",
    }
}


@cache
def used(module) -> ast.Module:
    """Return the syntax tree of a module of art_nb."""
    return ast.parse(Path(module.__file__).read_text(encoding="utf-8"))


def keywords(module, name: str) -> set[str]:
    """Return the keyword arguments of all calls of a function or class, by its last name."""
    calls = [node for node in ast.walk(used(module)) if isinstance(node, ast.Call)]
    named = [call for call in calls if name in (getattr(call.func, "attr", ""), getattr(call.func, "id", ""))]
    return {keyword.arg for call in named for keyword in call.keywords if keyword.arg}


def literal_keys(module, functions: set[str]) -> set[str]:
    """Return the keys of the dictionaries that some functions write out."""
    bodies = [node for node in ast.walk(used(module)) if isinstance(node, ast.FunctionDef) and node.name in functions]
    keys = [key for body in bodies for node in ast.walk(body) if isinstance(node, ast.Dict) for key in node.keys]
    return {key.value for key in keys if isinstance(key, ast.Constant)}


def engine_attributes() -> set[str]:
    """Return the attributes of vLLM's engine that the sampler uses."""
    nodes = [node for node in ast.walk(used(vllm)) if isinstance(node, ast.Attribute)]
    owner = lambda node: getattr(node.value, "attr", "") or getattr(node.value, "id", "")
    return {node.attr for node in nodes if owner(node) in ("engine", "_engine", "LLMEngine")}


WRITTEN = literal_keys(vllm, {"model_settings", "settings", "engine_settings", "_start"})
ENGINE_ARGS = keywords(vllm, "EngineArgs") | WRITTEN
ENGINE_ARGS = (ENGINE_ARGS | {*vllm.RESERVED_ENGINE_ARGS}) - {"rank", "head_dtype"}  # these are no engine arguments
CLASSES["vllm/engine/arg_utils.py:EngineArgs"] += " " + " ".join(ENGINE_ARGS)
CLASSES["vllm/sampling_params.py:SamplingParams"] += " " + " ".join(keywords(vllm, "SamplingParams"))


def members(node: ast.ClassDef) -> set[str]:
    """Return the names of the fields, methods and attributes that a class defines."""
    names = set()
    for part in ast.walk(node):
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(part.name)
        targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
        names |= {getattr(target, "id", getattr(target, "attr", None)) for target in targets}
    return names - {None}


def find(tree: ast.AST, path: str) -> ast.AST | None:
    """Return the class or function with a dotted name."""
    for name in path.split("."):
        nodes = ast.iter_child_nodes(tree) if tree else ()
        tree = next((node for node in nodes if getattr(node, "name", None) == name), None)
    return tree


def missing_parameters(function: ast.FunctionDef, asked: str) -> list[str]:
    """Return how the parameters of a function differ from those that art_nb passes."""
    arguments = function.args
    ordered = [a.arg for a in arguments.posonlyargs + arguments.args]
    if ordered[:1] in (["self"], ["cls"]) and not asked.startswith("self"):
        ordered = ordered[1:]
    by_place, _, by_name = (part.split() for part in asked.partition("*"))
    if arguments.vararg and arguments.kwarg and not ordered:
        return ["takes any arguments"] if by_place + by_name else []
    names = {*ordered, *(a.arg for a in arguments.kwonlyargs)}
    unknown = [name for name in by_name if name not in names]
    wrong = [] if ordered[: len(by_place)] == by_place else [f"has the parameters {', '.join(ordered[:5])}"]
    defaults = len(ordered) - len(arguments.defaults)
    required = [name for name in ordered[:defaults] if name not in by_place + by_name]
    required += [
        a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults) if d is None and a.arg not in by_name
    ]
    return wrong + [f"has no parameter {name}" for name in unknown] + [f"requires {name}" for name in required]


def strings(tree: ast.AST) -> str:
    """Return all strings and names of a file in lower case. Adjacent string literals are one string."""
    parts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts.append(
                "".join(str(getattr(value, "value", "")) for value in node.values if type(value) is ast.Constant)
            )
        elif isinstance(node, ast.Constant):
            parts.append(str(node.value))
        elif isinstance(node, (ast.Name, ast.alias)):
            parts.append(getattr(node, "id", None) or node.name)
    return "\n".join(parts).lower()


def differences(package, version, classes, calls, texts) -> set[str]:
    """Return everything that art_nb uses and that a version of a package does not have."""
    places = {place.partition(":")[0] for place in (classes | calls)}
    paths = tuple(sorted(places.union(*texts.values())))
    trees = {path: ast.parse(text) for path, text in sources(package, version, paths).items() if path}
    found = set()
    for place, names in classes.items():
        path, _, name = place.partition(":")
        node = find(trees.get(path), name)
        has = set() if node is None else members(node)
        found |= {f"{name} has no {missing}" for missing in {*names.split()} - has}
    for place, asked in calls.items():
        path, _, name = place.partition(":")
        function = find(trees.get(path), name)
        problems = ["does not exist"] if function is None else missing_parameters(function, asked)
        found |= {f"{name} {problem}" for problem in problems}
    for word, files in texts.items():
        if not any(word.lower() in strings(trees[path]) for path in files if path in trees):
            found.add(f"{' and '.join(files)} has no {word!r}")
    return found


@pytest.mark.net
@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_vllm_has_what_the_sampler_uses(version, report):
    found = differences("vllm", version, CLASSES, CALLS, TEXTS)
    count = sum(len(names.split()) for names in [*CLASSES.values(), *CALLS.values()]) + len(TEXTS)
    report("engine interfaces", f"vllm {version}: {count} names, {len(found)} differences {sorted(found) or ''}")
    assert found == DIFFERENCES.get(version, set())
    compiled = [name for name in sources("vllm", version, ())[""].splitlines() if name.startswith("vllm/_C")]
    assert any(name.startswith(("vllm/_C_stable_libtorch.", "vllm/_C.")) for name in compiled), compiled


@pytest.mark.net
@pytest.mark.parametrize("version", UNSLOTH_VERSIONS)
def test_unsloth_has_what_the_learner_uses(version, report):
    found = differences("unsloth", version, UNSLOTH_CLASSES, UNSLOTH_CALLS, UNSLOTH_TEXTS)
    found |= differences("unsloth-zoo", version, {}, ZOO_CALLS, ZOO_TEXTS)
    count = sum(
        len(names.split()) for names in [*UNSLOTH_CLASSES.values(), *UNSLOTH_CALLS.values(), *ZOO_CALLS.values()]
    )
    report("engine interfaces", f"unsloth {version}: {count} names, {len(found)} differences {sorted(found) or ''}")
    assert not found


@pytest.mark.net
def test_the_plugin_of_vllm_has_the_module_that_unsloth_imports():
    assert "class BitsAndBytesConfig" in sources("vllm-bnb-plugin", "0.0.3", (PLUGIN,))[PLUGIN]


def test_the_lists_contain_what_the_code_uses():
    """A new call of an engine must be added to the lists above."""
    methods = {place.rpartition(".")[2] for place in CALLS if ":LLMEngine." in place}
    known = methods | {*CLASSES[V1 + "engine/llm_engine.py:LLMEngine"].split()}
    assert engine_attributes() <= known | {"_manager"}
    assert {"model", "dtype", "kv_cache_memory_bytes", "enable_lora", "enforce_eager", "max_num_seqs"} <= ENGINE_ARGS
    assert {"seed", "logprobs", "output_kind", "structured_outputs"} <= keywords(vllm, "SamplingParams")
    for place in UNSLOTH_CALLS:
        name = place.rpartition(".")[2].rpartition(":")[2]
        passed = keywords(unsloth, {"LlamaModel_fast_forward": "inner"}.get(name, name))
        assert passed - (ZOO_ARGS if name == "from_pretrained" else set()) <= {*UNSLOTH_CALLS[place].split()}, name


def test_a_missing_name_is_found():
    tree = ast.parse("class A:\n    x: int\n    def f(self, a, b, c=1, *, d, e=2): self.y = 1")
    assert members(find(tree, "A")) == {"x", "f", "y"}
    assert missing_parameters(find(tree, "A.f"), "a * e") == ["requires b", "requires d"]
    assert missing_parameters(find(tree, "A.f"), "b * d z") == [
        "has the parameters a, b, c", "has no parameter z", "requires a"
    ]  # fmt: skip
    assert find(tree, "A.g") is None
