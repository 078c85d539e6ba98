"""Which sampler and learner work: what is asked for and cannot be had is told before anything is loaded."""

from importlib import metadata

import pytest

import art_nb as art
from art_nb.backends.engines import choose_learner, choose_sampler
from art_nb.backends.options import init_options
from art_nb.core.events import Bus
from art_nb.core.types import BackendMissing
from art_nb.policy import isolation as guests
from art_nb.samplers.vllm import vllm_version


class Package:
    """A distribution as importlib.metadata describes it."""

    def __init__(self, version, requires=()):
        self.version, self.requires = version, list(requires)


@pytest.fixture
def packages(monkeypatch):
    """What is installed, by name."""
    have = {"torch": Package(metadata.version("torch"))}

    def distribution(name):
        if name not in have:
            raise metadata.PackageNotFoundError(name)
        return have[name]

    monkeypatch.setattr(guests.metadata, "distribution", distribution)
    return have


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({"sampler": "vllm"}, r'vllm is not installed: pip install "art_nb\[vllm\]"'),
        ({"learner": "unsloth"}, r'unsloth is not installed: pip install "art_nb\[unsloth\]"'),
        ({"sampler": "vlm"}, "Invalid `sampler='vlm'`: expected one of auto, transformers, vllm"),
        ({"learner": "slow"}, "Invalid `learner='slow'`: expected one of auto, peft, unsloth"),
    ],
    ids=str,
)
async def test_what_is_missing_is_told_before_weights_are_fetched(packages, tmp_path, options, extra):
    model = art.TrainableModel(name="ttt", project="tests", base_model="there/is-no-such-model")
    async with art.LocalBackend(path=tmp_path, verbose=False, **options) as backend:
        with pytest.raises(BackendMissing, match=extra):
            await model.register(backend)


@pytest.mark.parametrize(
    ("package", "said"),
    [
        (Package("0.19.1"), "vllm 0.19.1 is installed, and art_nb needs 0.32 or newer"),
        (Package("0.32.1", ["torch==2.9.9"]), "vllm 0.32.1 requires torch==2.9.9, and torch 2"),
        (Package("0.32.1", ['torch==2.9.9; python_version < "3"', "torch>=2"]), "vllm 0.32.1"),
    ],
    ids=lambda p: "",
)
def test_versions_found_and_wanted_are_named(packages, package, said):
    packages["vllm"] = package
    try:
        found = vllm_version()
    except BackendMissing as error:
        found = str(error)
    assert found.startswith(said)


@pytest.mark.parametrize(
    ("settings", "instead"),
    [
        ({"vllm_runtime": {"mode": "external", "server_url": "http://gpu:8000"}}, 'LocalBackend(sampler="vllm")'),
        ({"rollout_weight_update_mode": "in_flight_lora"}, "max_staleness"),
        ({"trainer_gpu_ids": [0], "inference_gpu_ids": [1]}, "sampler_device"),
        ({"rollout_weight_update_mode": "step_lora", "tinker_args": None}, None),
    ],
    ids=lambda case: "",
)
def test_settings_of_other_machines_name_what_there_is_here(settings, instead):
    bus, said = Bus(), []
    bus.subscribe(lambda event: said.append(event.message))
    model = art.TrainableModel(
        name="ttt", project="tests", base_model="b", _internal_config=art.dev.InternalModelConfig(**settings)
    )
    assert init_options(model, bus) == {}
    assert [message.count(instead) for message in said] == [1] * bool(instead)
    assert all(name in message for message in said for name in settings)


def test_auto_takes_what_the_machine_has(packages):
    said = []
    assert choose_learner("auto") == ("peft", "LoRA")
    assert choose_sampler("auto", "cpu", lambda *_: said.append(_)) == ("transformers", "transformers")
    assert not said
    assert choose_sampler("auto", "cuda", lambda *_: said.append(_)) == ("transformers", "transformers")
    ((_, why),) = said
    assert "slower than vLLM on a GPU. vllm is not installed: pip install" in why
