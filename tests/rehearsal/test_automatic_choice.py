"""What `LocalBackend()` selects on a T4, on newer GPUs, and on a Mac."""

import re

import pytest
import torch
from transformers import LlamaConfig

from art_nb.backends import engines
from art_nb.backends.engines import choose_engines, choose_sampler
from art_nb.backends.loading import LoadSettings
from art_nb.cli.machine import check_engines
from art_nb.core.types import BackendMissing
from art_nb.policy import loading
from art_nb.policy.loading import chosen_dtype, pick_device

CUDA, MPS = torch.device("cuda"), torch.device("mps")


@pytest.fixture
def gpu(monkeypatch):
    """A function that pretends to have a GPU with a compute capability, and a usable vLLM."""

    def pretend(major, minor):
        properties = type("Properties", (), {"major": major, "minor": minor})
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        for name, value in {
            "is_available": True,
            "device_count": 1,
            "current_device": 0,
            "get_device_properties": properties,
            "get_device_capability": (major, minor),
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)

    monkeypatch.setattr(engines, "require_vllm", lambda device: "vllm 0.32.0")
    return pretend


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)], ids=["V100", "T4"])
def test_a_gpu_without_bfloat16_gets_the_embedded_sampler_and_float16(gpu, monkeypatch, capability):
    gpu(*capability)
    monkeypatch.setattr(engines, "require_vllm", lambda device: pytest.fail("vLLM was imported"))
    warnings = []
    for settings in (LoadSettings(), LoadSettings.of_profile("t4", None)):
        devices = settings.devices()
        assert devices == (CUDA, CUDA)
        chosen = choose_engines(settings.sampler, settings.learner, devices, lambda key, text: warnings.append(text))
        assert (chosen.sampler, chosen.learner) == ("transformers", "peft")
        assert chosen_dtype(LlamaConfig(), CUDA, settings.torch_dtype()) == torch.float16
    assert f"This GPU has compute capability {capability[0]}.{capability[1]}, and vLLM's FlashAttention" in warnings[0]


@pytest.mark.parametrize("dtype", ["bf16", torch.bfloat16, "float64"])
def test_an_unknown_dtype_is_rejected_before_registration(dtype):
    expected = f'Invalid `dtype={dtype!r}`: expected "bfloat16", "float16" or "float32".'
    with pytest.raises(ValueError, match=re.escape(expected)):
        LoadSettings.of_profile(None, "cpu", dtype=dtype)


def test_a_newer_gpu_gets_vllm_and_bfloat16(gpu):
    for capability in ((8, 0), (8, 9), (9, 0), (12, 0)):
        gpu(*capability)
        assert choose_sampler("auto", "cuda", pytest.fail) == ("vllm", "vllm 0.32.0")
        assert chosen_dtype(LlamaConfig(), CUDA, None) == torch.bfloat16


def test_vllm_can_still_be_tried_on_a_t4(gpu):
    gpu(7, 5)
    assert choose_sampler("vllm", "cuda", pytest.fail) == ("vllm", "vllm 0.32.0")


def test_the_doctor_says_why_vllm_is_not_used(gpu, monkeypatch):
    gpu(7, 5)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (14_000_000_000, 15_000_000_000))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    sampler = next(check for check in check_engines() if check.name == "sampler")
    assert (sampler.verdict, sampler.finding) == ("warn", "transformers.")
    assert "slower than vLLM on a GPU. This GPU has compute capability 7.5" in sampler.advice
    gpu(9, 0)
    sampler = next(check for check in check_engines() if check.name == "sampler")
    assert (sampler.verdict, sampler.finding, sampler.advice) == ("ok", "vllm 0.32.0.", "")


def test_on_the_second_gpu_auto_is_the_embedded_sampler(gpu):
    gpu(9, 0)
    warnings = []
    assert choose_sampler("auto", "cuda:1", lambda key, text: warnings.append(text))[0] == "transformers"
    assert "vLLM runs on the first CUDA device only, and its device is cuda:1" in warnings[0]
    with pytest.raises(BackendMissing, match="first CUDA device only"):
        choose_sampler("vllm", "cuda:1", print)


def test_a_mac_gets_the_embedded_sampler_without_a_warning(monkeypatch):
    monkeypatch.setattr(loading.torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(engines, "require_vllm", lambda device: pytest.fail("vLLM was imported"))
    assert pick_device() == pick_device("mps") == MPS
    chosen = choose_engines("auto", "auto", (MPS, MPS), lambda key, text: pytest.fail(text))
    assert (chosen.sampler, chosen.learner) == ("transformers", "peft")
    assert chosen_dtype(LlamaConfig(), MPS, None) == torch.bfloat16
