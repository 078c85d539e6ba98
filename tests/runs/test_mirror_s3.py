"""A run in S3: with a server of moto and the client s3fs, which are optional packages."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

server = pytest.importorskip("moto.server", reason="moto is not installed")
s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")

import fsspec  # noqa: E402
from test_mirror import rollout, train, wait_until  # noqa: E402

import art_nb as art  # noqa: E402
from art_nb.core.events import StepDone, Warned  # noqa: E402
from art_nb.core.types import StoreError  # noqa: E402
from art_nb.runs.mirror import RunStorage, complete_steps, remote_folder  # noqa: E402

ROOT = Path(__file__).parents[2]
URL = "s3://bucket/runs"


class S3Server:
    """A server that can be stopped and started again with its content."""

    def __init__(self):
        self.server = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
        self.server.start()
        self.port = self.server.get_host_and_port()[1]

    @property
    def options(self):
        retries = {"connect_timeout": 1, "read_timeout": 5, "retries": {"max_attempts": 1}}
        return {
            "key": "key",
            "secret": "secret",
            "endpoint_url": f"http://127.0.0.1:{self.port}",
            "config_kwargs": retries,
        }

    def stop(self):
        self.server.stop()

    def start(self):
        self.server = server.ThreadedMotoServer(ip_address="127.0.0.1", port=self.port)
        self.server.start()


@pytest.fixture
def s3(monkeypatch):
    """A running server with an empty bucket, which is the default of fsspec."""
    running = S3Server()
    monkeypatch.setitem(fsspec.config.conf, "s3", running.options)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    files = s3fs.S3FileSystem(**running.options, skip_instance_cache=True)
    files.mkdir("bucket")
    yield running
    running.start() if running.server._thread is None else None
    files.rm("bucket", recursive=True)
    running.stop()


def remote():
    return remote_folder(f"{URL}/p/models/run")


async def test_training_continues_on_another_machine(tmp_path, monkeypatch, tiny_model_dir, s3):
    monkeypatch.setenv("ART_NB_CACHE", str(tmp_path / "machine-1"))
    _, first = await train(URL, tiny_model_dir, 2)
    files = {file.name: file.read_bytes() for file in first.checkpoint_dir(2).iterdir()}
    shutil.rmtree(tmp_path / "machine-1")
    monkeypatch.setenv("ART_NB_CACHE", str(tmp_path / "machine-2"))
    begun, second = await train(URL, tiny_model_dir, 3)
    assert begun == 2
    assert {file.name: file.read_bytes() for file in second.checkpoint_dir(2).iterdir()} == files
    assert [row["step"] for row in second.history() if "train/reward" in row] == [1, 2, 3]
    assert complete_steps(remote().sizes()) == [0, 1, 2, 3]


async def test_the_server_is_down_for_a_while(tmp_path, monkeypatch, tiny_model_dir, s3):
    monkeypatch.setenv("ART_NB_CACHE", str(tmp_path / "machine-1"))
    model = art.TrainableModel(name="run", project="p", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path=URL, verbose=False) as backend:
        backend.storage = RunStorage(URL, backend.path, patience_s=0.2, interval_s=0.2)
        warned, done = [], []
        backend.bus.subscribe(warned.append, Warned)
        backend.bus.subscribe(done.append, StepDone)
        await model.register(backend)
        await asyncio.to_thread(wait_until, lambda: complete_steps(remote().sizes()) == [0])
        await asyncio.to_thread(s3.stop)
        await art.train(model, rollout, [0, 1], steps=3, groups_per_step=2, rollouts_per_group=3, show=False)
        assert len(done) == 3
        outage = lambda: [event for event in warned if "Could not copy" in event.message]
        await asyncio.to_thread(wait_until, outage)
        await asyncio.to_thread(time.sleep, 1.0)
        assert len(outage()) == 1
        await asyncio.to_thread(s3.start)
    assert complete_steps(remote().sizes()) == [0, 1, 2, 3]
    assert remote().read("history.jsonl") == (model.store.path / "history.jsonl").read_bytes()


async def test_a_bucket_that_does_not_exist(tmp_path, monkeypatch, tiny_model_dir, s3):
    monkeypatch.setenv("ART_NB_CACHE", str(tmp_path / "machine-1"))
    model = art.TrainableModel(name="run", project="p", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path="s3://missing/runs", verbose=False) as backend:
        with pytest.raises(StoreError, match="missing"):
            await model.register(backend)


PROGRAM = """
import asyncio, json, sys
import fsspec
sys.path.insert(0, "tests/runs")
fsspec.config.conf["s3"] = json.loads(sys.argv[3])
import art_nb as art
from art_nb.runs.mirror import RunStorage
from test_mirror import rollout

async def main():
    model = art.TrainableModel(name="run", project="p", base_model=sys.argv[2])
    backend = art.LocalBackend(path=sys.argv[1], verbose=False)
    await model.register(backend)
    await art.train(model, rollout, [0, 1], steps=2, groups_per_step=2, rollouts_per_group=3, show=False)
    print("trained", flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_program_that_ends_without_close_has_copied_everything(tmp_path, tiny_model_dir, s3):
    environment = os.environ | {"ART_NB_CACHE": str(tmp_path / "machine-1"), "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    command = [sys.executable, "-c", PROGRAM, URL, str(tiny_model_dir), json.dumps(s3.options)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert complete_steps(remote().sizes()) == [0, 1, 2]
    assert json.loads(remote().read("mirror.json"))["closed"], done.stderr


@pytest.mark.slow
def test_after_a_kill_the_newest_complete_checkpoint_is_there(tmp_path, monkeypatch, tiny_model_dir, s3):
    environment = os.environ | {"ART_NB_CACHE": str(tmp_path / "machine-1"), "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    program = PROGRAM.replace("steps=2", "steps=1000")
    command = [sys.executable, "-c", program, URL, str(tiny_model_dir), json.dumps(s3.options)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        wait_until(lambda: len(complete_steps(remote().sizes())) > 2, seconds=120)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    newest = max(complete_steps(remote().sizes()))
    monkeypatch.setenv("ART_NB_CACHE", str(tmp_path / "machine-2"))
    begun, store = asyncio.run(train(URL, tiny_model_dir, newest + 1))
    assert begun == newest
    assert [row["step"] for row in store.history() if "train/reward" in row] == [*range(1, newest + 2)]
