"""A full device, for real: the address space of a process ends a little above what it has."""
import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, resource, sys, tempfile, threading
import art_nb as art
from art_nb.policy import adapter, fingerprint
from art_nb.types import TrainError

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
        policy = backend.home(model).policy
        before = fingerprint(adapter(policy))
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (30 << 20), resource.RLIM_INFINITY))
        try: await backend.train(model, [group], learning_rate=1e-3, tokens_per_batch=100_000)
        except TrainError as error: print(error)
        else: print("there was room enough")
        await ask(1)
        print("as before" if fingerprint(adapter(policy)) == before else "moved")
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
