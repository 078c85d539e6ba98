"""Two devices: the sampler and the learner have one each, agree, and work at the same time."""

import asyncio
import random
import threading
from types import SimpleNamespace

import pytest
import torch
from support import fake_gpu
from support.gpu_parts import groups_of, reply

import art_nb as art
from art_nb.backends import loading, planning
from art_nb.backends.engines import SAMPLERS, Engines
from art_nb.backends.loading import describe_runtime
from art_nb.backends.planning import plan_model, plan_two_devices
from art_nb.core.events import AdapterServed, GradientStep
from art_nb.core.types import BackendMissing, TrainError
from art_nb.panels.live_cell import machine_state
from art_nb.rollouts.scenarios import scenarios_of_step

CARDS = {"sampler_device": "fakegpu:1", "learner_device": "fakegpu:0"}
WAIT_S = 60


@pytest.fixture
def backend(tmp_path):
    """A backend on two fake GPUs. Gradients need the first one."""
    return art.LocalBackend(path=tmp_path / "runs", **CARDS, dtype="float32", verbose=False)


def logprobs(choice):
    """Return the logprobs of a reply."""
    return [entry.logprob for entry in choice.logprobs.content]


async def test_no_operation_mixes_the_devices_and_both_agree(backend, named, tmp_path):
    model = named()
    async with backend:
        await model.register(backend)
        runtime = backend.runtime(model)
        own = runtime.sampler_device
        assert (str(runtime.policy.device), str(own.policy.device)) == ("fakegpu:0", "fakegpu:1")
        assert runtime.worker.call(fake_gpu.current_device) == 0
        assert own.worker.call(fake_gpu.current_device) == 1
        untrained = await reply(model, 7)
        for step in (1, 2):
            choices = await asyncio.gather(*(reply(model, 12 * step + i) for i in range(9)))
            result = await backend.train(model, groups_of(choices), learning_rate=1e-2)
            assert result.step == step
            assert result.metrics["offpolicy/logprob_diff_max"] < 1e-4
            assert {"profile/sampler_decode_s", "profile/forward_s"} <= result.metrics.keys()
            assert "profile/decode_s" not in result.metrics
        # The newest adapter extends the frozen weights of the sampler, which saves a product in every layer.
        _, weights = runtime.sampler._adapters[runtime.key(2)]
        assert weights is own.policy.working
        weights = [fused.weight.device for fused in own.policy.working]
        parts = [part.device for product in own.policy.working.values() for part in (product.A, product.B)]
        assert {*map(str, [*weights, *parts])} == {"fakegpu:1"}
        trained = await reply(model, 7)
        first = await reply(model, 7, model.get_inference_name(0))
        assert (
            machine_state(SimpleNamespace(model=model, backend=backend, is_here=True))["device"]
            == "fakegpu:0 (sampler: fakegpu:1)"
        )
        assert first.message.content == untrained.message.content
        assert logprobs(first) == pytest.approx(logprobs(untrained), abs=1e-5)
    assert trained.message.content != untrained.message.content or logprobs(trained) != logprobs(untrained)
    again = named()
    async with art.LocalBackend(path=tmp_path / "runs", device="cpu", dtype="float32", verbose=False) as on_cpu:
        await again.register(on_cpu)
        same = await reply(again, 7)
        assert same.message.content == trained.message.content
        assert logprobs(same) == pytest.approx(logprobs(trained), abs=1e-4)


@pytest.fixture
def step_log(backend):
    """A list of what happens. The first micro-batch of step 1 waits until something was sampled during the step."""
    seen, sampled = [], threading.Event()

    def wait_for_the_sampler(event):
        if event.micro_batch == 1:
            seen.append(f"step {event.step} trains")
        if event.micro_batch == 1 and event.step == 1:
            assert sampled.wait(WAIT_S), "nothing was sampled during the training step"

    def note(what):
        seen.append(what)
        sampled.set()

    backend.bus.subscribe(wait_for_the_sampler, GradientStep)
    backend.bus.subscribe(lambda event: seen.append(f"step {event.step} is served"), AdapterServed)
    return seen, note


async def test_replies_are_sampled_during_a_step(backend, named, step_log):
    """On one device, the request would wait for the end of the step."""
    (seen, note), model = step_log, named()
    async with backend:
        await model.register(backend)
        choices = await asyncio.gather(*(reply(model, i) for i in range(6)))
        training = asyncio.ensure_future(backend.train(model, groups_of(choices), learning_rate=1e-2))
        while not seen:
            await asyncio.sleep(0.01)
        note((await reply(model, 30)).finish_reason)
        await training
    assert seen == ["step 1 trains", "length", "step 1 is served"]


async def test_the_rollouts_of_the_next_step_run_during_a_step(backend, named, step_log):
    (seen, note), model = step_log, named()
    [first] = scenarios_of_step(["A1", "A2"], 0, 1, 0)

    async def rollout(model, scenario):
        while scenario != first and not seen:  # rollouts of step 2 have started, and wait for step 1
            await asyncio.sleep(0.01)
        choice = await reply(model, len(seen))
        if scenario != first:
            note("a rollout of step 2 ends")
        entries = [{"role": "user", "content": scenario}, choice]
        return art.Trajectory(messages_and_choices=entries, reward=float(random.random()))

    async with backend:
        await model.register(backend)
        options = {"groups_per_step": 1, "rollouts_per_group": 4, "max_staleness": 1, "learning_rate": 1e-2}
        run = await art.train(model, rollout, ["A1", "A2"], steps=2, show=False, **options)
    assert seen[:2] == ["step 1 trains", "a rollout of step 2 ends"]
    assert seen.index("step 1 is served") < seen.index("step 2 trains") < seen.index("step 2 is served")
    assert [row["train/staleness_max"] for row in run.history] == [0, 1]


async def test_one_device_by_two_names_is_shared(named, tmp_path):
    for devices in ({"sampler_device": "cpu", "learner_device": "cpu"}, {"device": "cpu"}):
        model = named()
        async with art.LocalBackend(path=tmp_path / "runs", **devices, dtype="float32", verbose=False) as backend:
            await model.register(backend)
            runtime = backend.runtime(model)
            assert runtime.sampler.policy is runtime.policy
            assert runtime.sampler.worker is runtime.worker
            assert runtime.sampler_device is None


async def test_the_learner_may_be_on_a_gpu_and_the_sampler_on_the_cpu(named, tmp_path):
    model, devices = named(), {"device": "fakegpu:0", "sampler_device": "cpu"}
    async with art.LocalBackend(path=tmp_path / "runs", **devices, dtype="float32", verbose=False) as backend:
        await model.register(backend)
        assert "on fakegpu:0 in float32, sampled by the embedded sampler on cpu," in describe_runtime(
            backend.runtime(model), Engines()
        )
        choices = await asyncio.gather(*(reply(model, i) for i in range(6)))
        result = await backend.train(model, groups_of(choices), learning_rate=1e-2)
        assert result.metrics["offpolicy/logprob_diff_max"] < 1e-4
        await reply(model, 1)


async def test_nothing_is_left_of_a_model_that_cannot_be_loaded_or_was_closed(backend, named, monkeypatch):
    def sampler_threads():
        return [thread.name for thread in threading.enumerate() if thread.name.endswith("-sampler")]

    async with backend:
        with monkeypatch.context() as broken:
            broken.setitem(SAMPLERS, "transformers", lambda *args, **options: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await named().register(backend)
        assert sampler_threads() == []
        model = named()
        await model.register(backend)
        assert sampler_threads() == ["art-nb-ttt-sampler"]
    assert sampler_threads() == []


async def test_the_caches_of_the_sampler_are_freed_for_itself_only(backend, named, monkeypatch):
    """A step cannot use the memory of the other device. An adapter that does not fit there can."""
    model, released, full = named(), [], [MemoryError("CUDA out of memory")]
    async with backend:
        await model.register(backend)
        runtime = backend.runtime(model)
        release, load = runtime.sampler.release, runtime.sampler.load
        noted = lambda: released.append(threading.current_thread().name) or release()
        monkeypatch.setattr(runtime.sampler, "release", noted)
        monkeypatch.setattr(runtime.sampler, "clear_caches", lambda: pytest.fail("the prefixes were dropped"))
        groups = groups_of(await asyncio.gather(*(reply(model, i) for i in range(6))))
        with monkeypatch.context() as patch:
            patch.setattr(runtime.learner, "step", raising(MemoryError("CUDA out of memory")))
            with pytest.raises(TrainError, match="The learner ran out of memory"):
                await backend.train(model, groups)
        assert released == []
        monkeypatch.setattr(runtime.sampler, "load", lambda *args: raising(full.pop())() if full else load(*args))
        assert (await backend.train(model, groups)).step == 1
        assert released == ["art-nb-ttt-sampler"]


def raising(error):
    """Return a function that raises an error."""

    def fail(*args, **options):
        raise error

    return fail


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda:0", "The device 'cuda:0' is not available: torch .* finds no CUDA device on this machine"),
        ("mps", "The device 'mps' is not available"),
        ("gpu", "Invalid device 'gpu': expected a device of torch"),
    ],
)
@pytest.mark.parametrize("option", ["device", "sampler_device", "learner_device"])
def test_a_device_that_does_not_exist_is_an_error_before_anything_is_loaded(option, name, message):
    with pytest.raises(BackendMissing, match=message):
        art.LocalBackend(**{option: name})


@pytest.fixture
def two_gpus(monkeypatch):
    """torch as on a machine with two GPUs, up to the point where weights would be loaded."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(loading, "load_policy", lambda *args, **options: pytest.fail("the weights were loaded"))


@pytest.mark.parametrize(
    ("devices", "engines", "message"),
    [
        (("cuda:1", "cuda:0"), {"sampler": "vllm"}, 'vLLM runs on the first CUDA device .* sampler_device="cuda:0"'),
        (("cuda:1", "cuda:1"), {"sampler": "vllm"}, "vLLM runs on the first CUDA device only"),
        (("cuda:0", "cuda:1"), {"sampler": "transformers", "learner": "unsloth"}, "Unsloth runs on the first CUDA"),
    ],
)
async def test_engines_that_need_the_first_gpu_say_it(two_gpus, named, tmp_path, devices, engines, message):
    names = dict(zip(("sampler_device", "learner_device"), devices))
    backend = art.LocalBackend(path=tmp_path, **names, verbose=False, **engines)
    with pytest.raises(BackendMissing, match=message):
        await named().register(backend)


def test_a_third_gpu_does_not_exist(two_gpus):
    with pytest.raises(BackendMissing, match="'cuda:2' is not available: this machine has 2 CUDA devices, counted"):
        art.LocalBackend(sampler_device="cuda:0", learner_device="cuda:2")


@pytest.mark.parametrize("full", [0, 1])
async def test_each_gpu_has_a_plan_of_its_own(two_gpus, named, tmp_path, monkeypatch, full):
    monkeypatch.setattr(planning, "free_memory", lambda device: 10**8 if device.index == full else 10**10)
    devices, dtype = {"sampler_device": "cuda:0", "learner_device": "cuda:1"}, "bfloat16"
    backend = art.LocalBackend(path=tmp_path, **devices, dtype=dtype, sampler="transformers", verbose=False)
    engine = ("transformers", "peft")[full]
    with pytest.raises(TrainError, match=rf"in bfloat16, {engine}, on cuda:{full} does not fit"):
        await named().register(backend)


async def test_the_engines_get_the_sizes_of_their_device(backend, named, monkeypatch, capsys):
    gpus = torch.device("cuda:0"), torch.device("cuda:1")
    options = {"dtype": torch.bfloat16, "name": "tiny"}
    model = named()
    plans = plan_two_devices(model.base_model, Engines(), gpus, memory=(2 * 10**9, 10**10), **options)
    monkeypatch.setattr(loading, "plan_registered", lambda *_: plans)
    backend.verbose = True
    async with backend:
        await model.register(backend)
        runtime = backend.runtime(model)
        assert (runtime.sampler_plan, runtime.plan) == plans
        assert runtime.sampler._slots.max_bytes == plans[0].kv_bytes > plans[1].kv_bytes == 0
    printed = capsys.readouterr().out
    assert "Memory plan of cuda:0: " in printed
    assert "Memory plan of cuda:1: " in printed


def test_the_parts_of_two_plans_are_those_of_one(named):
    """No part is lost: what one device would need for both engines is on one of the devices, or on both."""
    weights, gpu = named().base_model, torch.device("cuda")
    options = {"dtype": torch.bfloat16, "max_model_len": 256}
    one = plan_model(weights, Engines(), gpu, memory=10**10, **options)
    sampler, learner = plan_two_devices(weights, Engines(), (gpu, gpu), memory=(10**10,) * 2, **options)
    assert sampler.parts["weights"] == learner.parts["weights"] == one.parts["weights"]
    assert (sampler.parts["KV cache"], learner.parts["KV cache"]) == (one.parts["KV cache"], 0)
    assert (sampler.parts["activations"], learner.parts["activations"]) == (0, one.parts["activations"])
    assert learner.parts["working memory"] == one.parts["working memory"]
    both = sampler.parts["adapter and optimizer"] + learner.parts["adapter and optimizer"]
    assert one.parts["adapter and optimizer"] < both < 2 * one.parts["adapter and optimizer"]
