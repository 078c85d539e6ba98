"""A full device, for real: the address space of a process ends a little above what it has."""

import os
import subprocess
import sys
from contextlib import contextmanager
from itertools import count

import openai
import pytest
import torch

import art_nb as art
from art_nb.core.types import ServeError, TrainError, TrainSFTConfig
from art_nb.policy import loading
from art_nb.policy.adapters import copy_adapter, fingerprint
from art_nb.policy.device import is_out_of_memory

SCRIPT = """
import asyncio, resource, sys, tempfile, threading
import art_nb as art
from art_nb.policy.adapters import copy_adapter, fingerprint
from art_nb.core.types import TrainError

async def main(path):
    model = art.TrainableModel(name="full", project="tests", base_model=path)
    async with art.LocalBackend(path=tempfile.mkdtemp(), device="cpu", verbose=False) as backend:
        await model.register(backend)
        ask = lambda seed: model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=[{"role": "user", "content": "A1"}], seed=seed, max_tokens=400,
            logprobs=True, extra_body={"ignore_eos": True})
        choices = [answer.choices[0] for answer in await asyncio.gather(*map(ask, range(48)))]
        group = art.TrajectoryGroup([art.Trajectory(messages_and_choices=[{"role": "user", "content": "A1"}, c],
                                                    reward=float(i % 3)) for i, c in enumerate(choices)])
        await backend.train(model, [group], learning_rate=1e-3, tokens_per_batch=512)
        policy = backend.runtime(model).policy
        before, home = fingerprint(copy_adapter(policy)), backend.runtime(model)
        home.worker.call(home.sampler.release)          # else the second try has 512 MB more, and takes minutes
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (30 << 20), resource.RLIM_INFINITY))
        try: await backend.train(model, [group], learning_rate=1e-3, tokens_per_batch=100_000)
        except TrainError as error: print(error)
        else: print("there was room enough")
        await ask(1)
        print("as before" if fingerprint(copy_adapter(policy)) == before else "moved")
        print((await backend.train(model, [group], learning_rate=1e-3, tokens_per_batch=512)).step)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of the address space is Linux's")
def test_a_step_that_does_not_fit_says_what_to_lower_and_leaves_the_kernel_usable(tiny_model_dir):
    done = subprocess.run([sys.executable, "-c", SCRIPT, tiny_model_dir], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    said, *after = done.stdout.splitlines()
    assert said.startswith("The learner ran out of memory")
    assert "lower tokens_per_batch (now 100000)" in said
    assert after == ["as before", "2"]


TIGHT = """
import asyncio, resource, sys, tempfile, time
import art_nb as art

async def main(path):
    model = art.TrainableModel(name="full", project="tests", base_model=path)
    async with art.LocalBackend(path=tempfile.mkdtemp(), device="cpu", verbose=False) as backend:
        await model.register(backend)
        client = model.openai_client().with_options(max_retries=0)
        ask = lambda seed, n: client.chat.completions.create(
            model=model.get_inference_name(), messages=[{"role": "user", "content": "A1"}], seed=seed, n=n,
            max_tokens=400, extra_body={"ignore_eos": True})
        await ask(0, 1)
        await asyncio.gather(*[asyncio.to_thread(time.sleep, 0.2) for _ in range(8)])  # a thread needs 8 MB
        sampler = backend.runtime(model).sampler
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        before = sampler._prefixes.max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), resource.RLIM_INFINITY))  # 4 MB for Python
        print(len((await ask(1, 64)).choices), sampler._prefixes.max_bytes < before)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(len((await ask(2, 8)).choices))

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of the address space is Linux's")
def test_a_sampler_without_memory_releases_its_caches_and_continues(tiny_model_dir):
    """Before, 64 replies failed with 500 although 512 MB of cached prefixes could be released."""
    done = subprocess.run(
        [sys.executable, "-c", TIGHT, tiny_model_dir],
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
    )  # other arenas are room beyond the limit
    assert done.returncode == 0, done.stderr[:4000]
    assert done.stdout.splitlines() == ["64 True", "8"]


TEXTS = [
    "could not create a primitive",
    "could not create a primitive descriptor for a matmul primitive",
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
    "std::bad_alloc",
]


@pytest.mark.parametrize("error", [*map(RuntimeError, TEXTS), MemoryError(), torch.OutOfMemoryError("CUDA")], ids=str)
def test_failed_allocations_are_recognized(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes differ"),
        ValueError("out of memory"),
        TrainError("The learner ran out of memory: x. Lower y."),
    ],
    ids=str,
)
def test_other_errors_are_not_failed_allocations(error):
    assert not is_out_of_memory(error)


@contextmanager
def failing(monkeypatch, owner, name, calls):
    """Let the given calls of a function of torch or transformers fail as oneDNN does; the first is number 0."""
    whole, number = getattr(owner, name), count()

    def call(*args, **options):
        if next(number) in calls:
            raise RuntimeError("could not create a primitive")
        return whole(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, call)
        yield


async def replies(model, n=3):
    asked = {"model": model.get_inference_name(), "messages": [{"role": "user", "content": "A1 B2"}], "logprobs": True}
    client = model.openai_client().with_options(max_retries=0)
    done = await client.chat.completions.create(**asked, n=n, seed=3, max_tokens=12, extra_body={"ignore_eos": True})
    return done.choices


@pytest.mark.parametrize("call", [0, 5], ids=["prefill", "decode"])
async def test_sampling_tries_once_more(named, local, monkeypatch, call):
    model = named()
    await model.register(local)
    before = [choice.message.content for choice in await replies(model)]
    policy = local.runtime(model).policy
    with failing(monkeypatch, policy, "hidden", {call}):
        assert [choice.message.content for choice in await replies(model)] == before
    with failing(monkeypatch, policy, "hidden", {call, call + 1}):
        with pytest.raises(openai.InternalServerError, match="sampler ran out of memory: could not create a prim"):
            await replies(model)
    assert [choice.message.content for choice in await replies(model)] == before


def group_of(choices):
    return art.TrajectoryGroup(
        [
            art.Trajectory(messages_and_choices=[{"role": "user", "content": "A1 B2"}, choice], reward=float(i))
            for i, choice in enumerate(choices)
        ]
    )


@pytest.mark.parametrize("how", ["train", "sft"])
async def test_a_step_tries_once_more_and_is_the_same_step(named, local, monkeypatch, how):
    plain, model = named("plain"), named("full")
    for one in (plain, model):
        await one.register(local)
    group = group_of(await replies(plain))
    messages = [{"role": "user", "content": "A1"}, {"role": "assistant", "content": "B"}]
    told = [art.Trajectory(messages_and_choices=messages)]

    async def step(model):
        if how == "sft":
            return await local._train_sft(model, told, TrainSFTConfig(learning_rate=1e-3))
        return await local.train(model, [group], learning_rate=1e-3)

    adapter_of = lambda model: fingerprint(copy_adapter(local.runtime(model).policy))
    await step(plain)
    inner, before = local.runtime(model).policy.model.model, adapter_of(model)
    with failing(monkeypatch, inner, "forward", {0, 1}):
        with pytest.raises(TrainError, match="learner ran out of memory: could not create a primitive. The"):
            await step(model)
    assert adapter_of(model) == before
    with failing(monkeypatch, inner, "forward", {0}):
        await step(model)
    assert adapter_of(model) == adapter_of(plain)
    assert len(await replies(model)) == 3


async def test_an_adapter_is_merged_again_if_memory_was_full(named, local, monkeypatch):
    model = named()
    await model.register(local)
    await local.train(model, [group_of(await replies(model))], learning_rate=1e-2)
    newest = [choice.message.content for choice in await replies(model)]
    base = model.openai_client().chat.completions.create
    await base(model=str(model.base_model), messages=[{"role": "user", "content": "A1"}], max_tokens=2)
    with failing(monkeypatch, torch, "addmm", {3}):
        assert [choice.message.content for choice in await replies(model)] == newest


async def test_loading_a_model_tries_once_more(named, local, monkeypatch):
    model = named()
    with failing(monkeypatch, loading, "load_file", {0}):
        await model.register(local)
    assert len(await replies(model)) == 3
    other = named("other")
    with failing(monkeypatch, loading, "load_file", {0, 1}):
        with pytest.raises(ServeError, match="Loading the model ran out of memory"):
            await other.register(local)
    assert len(await replies(model)) == 3


ENDLESS_WORK = """
import threading

import torch

from art_nb.policy.device import DeviceThread

worker, matrix, began = DeviceThread(), torch.ones(1500, 1500), threading.Event()


def multiply():
    began.set()
    matrix @ matrix
    return True


def job():
    while multiply():
        worker.check()


if {is_job}:
    worker.submit(job)
else:
    worker.idle_work(multiply)
    worker.wake()
began.wait()
"""


@pytest.mark.parametrize("is_job", [True, False])
def test_a_program_can_end_while_the_thread_computes(is_job):
    command = [sys.executable, "-c", ENDLESS_WORK.format(is_job=is_job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
