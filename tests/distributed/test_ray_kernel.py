"""A killed notebook process: its actors end, and the next process continues the run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from art_nb.runs.mirror import complete_steps, remote_folder

CHILD = """
import asyncio, json, sys
import art_nb as art
from art_nb.runs.mirror import RunStorage

path, base, steps, wait = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "wait"

async def rollout(model, scenario):
    client, messages = model.openai_client(), [{"role": "user", "content": "A1"}]
    reply = await client.chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=8, logprobs=True
    )
    choice = reply.choices[0]
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=len(choice.message.content or ""))

async def main():
    backend = art.RayBackend(samplers=1, learners=1, path=path, address="local", device="cpu", verbose=False)
    if backend.storage is not None:
        backend.storage = RunStorage(path, backend.path, patience_s=1.0)
    model = art.TrainableModel(name="killed", project="tests", base_model=base)
    await model.register(backend)
    runtime = backend.runtime(model)
    places = [runtime.sampler.facts["place"], runtime.learner.facts[0]["place"]]
    pids = [*(place.pid for place in places), backend._connection.local.guard.pid]
    print(json.dumps({"step": await model.get_step(), "pids": pids}), flush=True)
    await art.train(model, rollout, [{"id": 0}], steps=steps, groups_per_step=2, rollouts_per_group=4, show=False)
    print(json.dumps({"step": await model.get_step()}), flush=True)
    if wait:
        await asyncio.sleep(600)
    await backend.close()

asyncio.run(main())
"""


def start(path, base, steps, wait, cache):
    command = [sys.executable, "-c", CHILD, str(path), str(base), str(steps), "wait" if wait else "end"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"ART_NB_CACHE": str(cache)})


def next_line(child):
    return json.loads(next(line for line in child.stdout if line.startswith("{")))


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def kill_and_wait(child, pids):
    """Kill the process of the notebook, and wait until its actors and its cluster have ended."""
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    killed = time.monotonic()
    while any(map(is_running, pids[:2])):
        assert time.monotonic() - killed < 10
        time.sleep(0.05)
    while is_running(pids[2]):
        assert time.monotonic() - killed < 60  # the cluster itself has ended, too
        time.sleep(0.1)


def weights_of(directory, step):
    return (directory / "checkpoints" / f"{step:04d}" / "adapter_model.safetensors").read_bytes()


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_after_kill_9_of_the_kernel_no_actor_remains_and_the_run_continues(tmp_path, tiny_model_dir):
    child = start(tmp_path, tiny_model_dir, 2, wait=True, cache=tmp_path / "cache")
    pids = next_line(child)["pids"]
    assert next_line(child)["step"] == 2
    assert all(map(is_running, pids))
    kill_and_wait(child, pids)
    child = start(tmp_path, tiny_model_dir, 3, wait=False, cache=tmp_path / "cache")
    assert next_line(child)["step"] == 2  # from the last checkpoint
    assert next_line(child)["step"] == 3
    assert child.wait(timeout=120) == 0


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_after_kill_9_and_the_loss_of_the_disk_another_machine_continues_from_the_url(tmp_path, tiny_model_dir):
    url, first, second = f"file://{tmp_path}/bucket", tmp_path / "machine-1", tmp_path / "machine-2"
    run = Path("runs", "file", *(tmp_path / "bucket").parts[1:], "tests", "models", "killed")
    child = start(url, tiny_model_dir, 2, wait=True, cache=first)
    pids = next_line(child)["pids"]
    assert next_line(child)["step"] == 2
    end = time.monotonic() + 60
    while complete_steps(remote_folder(f"{url}/tests/models/killed").sizes()) != [0, 1, 2]:
        assert time.monotonic() < end
        time.sleep(0.1)
    kill_and_wait(child, pids)
    weights = weights_of(first / run, 2)
    shutil.rmtree(first)
    child = start(url, tiny_model_dir, 3, wait=False, cache=second)
    assert next_line(child)["step"] == 2
    assert next_line(child)["step"] == 3
    assert child.wait(timeout=120) == 0
    assert weights_of(second / run, 2) == weights
    assert weights_of(second / run, 3) != weights
    assert complete_steps(remote_folder(f"{url}/tests/models/killed").sizes()) == [0, 1, 2, 3]
