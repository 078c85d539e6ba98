"""A run at a URL: what is copied, in which order, through outages, and what another machine restores."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.registered import QUESTION

import art_nb as art
from art_nb.core.events import Bus, CheckpointSaved, Warned
from art_nb.core.files import atomic_write
from art_nb.core.types import BackendMissing, StoreError
from art_nb.runs.mirror import (
    MirrorLost,
    RemoteFolder,
    RunMirror,
    RunStorage,
    complete_steps,
    is_storage_url,
    local_directory,
    remote_folder,
    restore_run,
)
from art_nb.runs.store import RunStore, is_complete_checkpoint

ROOT = Path(__file__).parents[2]
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"


class RecordingFileSystem(MemoryFileSystem):
    """fsspec's file system in memory that records each write, and fails on request."""

    protocol = "recording"
    store, pseudo_dirs, log, down = {}, [""], [], threading.Event()
    fail_after = None  # number of writes after which everything fails
    held = None  # the end of a name, and the event for which its upload waits
    async_impl = True  # as object stores: each write replaces an object

    def _check(self, action=None):
        cls = type(self)
        if cls.fail_after is not None and action:
            cls.fail_after -= 1
            if cls.fail_after < 0:
                cls.down.set()
        if cls.down.is_set():
            raise PermissionError("the server does not answer")
        if action:
            cls.log.append(action)

    def pipe_file(self, path, value, **options):
        self._check(("write", path))
        return super().pipe_file(path, value, **options)

    def put_file(self, source, path, **options):
        content = Path(source).read_bytes()
        if self.held and path.endswith(self.held[0]):
            self.held[1].wait(60)
        self._check(("write", path))
        return super().pipe_file(path, content)

    def rm_file(self, path):
        self._check(("remove", path))
        return super().rm_file(path)

    def cat_file(self, path, **options):
        self._check()
        return super().cat_file(path, **options)

    def find(self, path, **options):
        self._check()
        return super().find(path, **options)


fsspec.register_implementation("recording", RecordingFileSystem, clobber=True)


@pytest.fixture
def remote():
    """The class of the recording file system, empty and working."""
    cls = RecordingFileSystem
    cls.store.clear()
    cls.log.clear()
    cls.down.clear()
    cls.fail_after = cls.held = None
    return cls


@pytest.fixture
def store(tmp_path):
    """The run directory of one machine."""
    return RunStore(tmp_path / "machine-1" / "p" / "models" / "run")


def save_step(store, step, content=b"{}", **training):
    """Write what a step writes, in the same order."""
    atomic_write(store.path / "trajectories" / "train" / f"{step:04d}.parquet", f"rollouts of {step}".encode())
    files = {"adapter_config.json": content, "adapter_model.safetensors": NO_TENSORS}
    files["training.json"] = json.dumps({"step": step, **training}).encode()
    for name, data in files.items():
        atomic_write(store.path / "checkpoints" / f"{step:04d}" / name, data)
    store.append_history({"step": step, "train/reward": float(step)})
    store.write_state({"step": step})


def storage(tmp_path, machine=1, url="recording://bucket/runs", patience_s=0.2):
    return RunStorage(url, tmp_path / f"machine-{machine}", patience_s=patience_s, interval_s=0.05)


def opened(tmp_path, store, machine=1, **options):
    warnings = []
    root = tmp_path / f"machine-{machine}"
    path = root / store.path.relative_to(tmp_path / "machine-1")
    path.mkdir(parents=True, exist_ok=True)
    mirror = storage(tmp_path, machine, **options).open(path, lambda key, message: warnings.append((key, message)))
    return mirror, warnings


def at_url(mirror):
    return {name: mirror.folder.read(name) for name in mirror.folder.sizes()}


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_urls():
    assert is_storage_url("s3://bucket/runs")
    assert not any(map(is_storage_url, (".art", "/runs", r"C:\runs", "C:/runs", None, Path("s3://bucket"))))
    environment = {"ART_NB_CACHE": "/cache"}
    assert local_directory("s3://b/x", environment) != local_directory("gs://b/x", environment)
    assert local_directory("s3://key:secret@b/x", environment) == local_directory("s3://b/x", environment)
    for url in ("file:///nas/runs", "file:///../../etc", "memory://x", "s3://b/../../../x", "s3://b//x"):
        path = local_directory(url, environment)
        assert path.is_relative_to("/cache/runs")
        assert path == Path(os.path.normpath(path))


def test_a_url_in_a_pathlib_path_is_an_error():
    for url in ("s3://bucket/runs", "file:///nas/runs", "gs://b"):
        with pytest.raises(ValueError, match="Pass a string"):
            art.LocalBackend(path=Path(url))


def test_a_missing_package_is_named():
    with pytest.raises(BackendMissing, match="pip install"):
        art.LocalBackend(path="nothing://bucket/runs")


def test_order_of_a_pass(tmp_path, store, remote):
    for step in (0, 1, 2):
        save_step(store, step)
    mirror, _ = opened(tmp_path, store)
    remote.log.clear()
    mirror.copy()
    written = [path.removeprefix(f"{mirror.folder.root}/") for action, path in remote.log if action == "write"]
    assert len([name for name in written if name != "mirror.json"]) == len({*written} - {"mirror.json"})
    for step in (0, 1, 2):
        files = [name for name in written if name.startswith(f"checkpoints/{step:04d}/")]
        assert files[-1].endswith("training.json")
        assert written.index(f"trajectories/train/{step:04d}.parquet") < written.index(files[0])
    assert written[-3:] == ["state.json", "history.jsonl", "mirror.json"]


def test_a_state_that_is_written_during_a_pass_is_left_to_the_next_one(tmp_path, store, remote):
    class StepDuringPass(RunMirror):
        def _snapshot(self, name):
            save_step(store, 1)
            return super()._snapshot(name)

    store.append_history({"step": 0})
    mirror = StepDuringPass(store.path, remote_folder("recording://bucket/run"), print)
    mirror.copy()
    assert "checkpoints/0001/training.json" in mirror.folder.sizes()
    assert "state.json" not in mirror.folder.sizes()
    mirror.copy()
    assert "state.json" in mirror.folder.sizes()


def test_only_changes_are_copied(tmp_path, store, remote):
    save_step(store, 0)
    opened(tmp_path, store)[0].copy()
    save_step(store, 1)
    remote.log.clear()
    mirror, _ = opened(tmp_path, store)  # another process of the same machine
    mirror.copy()
    names = {path.removeprefix(f"{mirror.folder.root}/") for action, path in remote.log}
    assert not [name for name in names if name.startswith(("checkpoints/0000", "trajectories/train/0000"))]
    assert {"history.jsonl", "checkpoints/0001/training.json"} <= names


@pytest.mark.parametrize("writes", range(24))
def test_an_interruption_at_any_write_leaves_a_consistent_copy(tmp_path, store, remote, writes):
    """The history names no step without a complete checkpoint, and complete checkpoints have all their files."""
    save_step(store, 0)
    mirror, _ = opened(tmp_path, store)
    mirror.copy()
    for step in (1, 2):
        save_step(store, step)
    save_step(store, 0, content=b'{"again": 1}')  # replaced
    remote.fail_after = writes
    if not mirror.attempt():
        assert writes < 20
    remote.fail_after = None
    remote.down.clear()
    copied = RunStore(tmp_path / "machine-2" / "run")
    names = mirror.folder.sizes()
    newest = restore_run(copied.path, mirror.folder, lambda key, message: pytest.fail(message))
    assert newest == max(complete_steps(names), default=None)
    for step in complete_steps(names):
        directory = store.checkpoint_dir(step)
        for file in directory.iterdir():
            assert mirror.folder.read(f"checkpoints/{step:04d}/{file.name}") in (file.read_bytes(), b"{}")
        configs = {mirror.folder.read(f"checkpoints/{step:04d}/adapter_config.json")}
        assert len(configs) == 1
    logged = {row["step"] for row in copied.history()}
    assert logged <= {*complete_steps(names), 0}
    assert {*complete_steps(names)} - logged <= {*copied.steps_saved()}  # their rows can be written again
    assert mirror.attempt()  # later, everything arrives
    assert at_url(mirror).keys() >= {f"checkpoints/{step:04d}/training.json" for step in (0, 1, 2)}
    assert mirror.folder.read("history.jsonl") == (store.path / "history.jsonl").read_bytes()


def test_a_replaced_checkpoint_is_not_complete_meanwhile(tmp_path, store, remote):
    save_step(store, 0)
    save_step(store, 1)
    mirror, _ = opened(tmp_path, store)
    mirror.copy()
    atomic_write(store.checkpoint_dir(1) / "adapter_config.json", b'{"new": 1}')
    remote.log.clear()
    mirror.copy()
    actions = [(action, path.rpartition("checkpoints/")[2]) for action, path in remote.log if "checkpoints/" in path]
    assert actions == [
        ("remove", "0001/training.json"),
        ("write", "0001/adapter_config.json"),
        ("write", "0001/training.json"),
    ]


def test_old_checkpoints_are_removed_after_newer_ones_are_complete(tmp_path, store, remote):
    for step in (0, 1):
        save_step(store, step)
    mirror, _ = opened(tmp_path, store)
    mirror.copy()
    save_step(store, 2)
    shutil.rmtree(store.checkpoint_dir(0))
    remote.log.clear()
    mirror.copy()
    assert complete_steps(mirror.folder.sizes()) == [1, 2]
    paths = [(action, path.rpartition("checkpoints/")[2]) for action, path in remote.log]
    assert paths.index(("write", "0002/training.json")) < paths.index(("remove", "0000/training.json"))
    removed = [path for action, path in paths if action == "remove"]
    assert removed[0] == "0000/training.json"


def test_a_deleted_run_directory_does_not_delete_the_copy(tmp_path, store, remote):
    for step in (0, 1):
        save_step(store, step)
    mirror, _ = opened(tmp_path, store)
    mirror.copy()
    before = at_url(mirror)
    shutil.rmtree(store.path / "checkpoints")
    mirror.copy()
    shutil.rmtree(store.path)
    mirror.attempt()
    assert {name: data for name, data in at_url(mirror).items() if name != "mirror.json"} == {
        name: data for name, data in before.items() if name != "mirror.json"
    }
    again, warnings = opened(tmp_path, store)
    assert RunStore(again.path).steps_saved() == [1]
    assert RunStore(again.path).history() == [{"step": 0, "train/reward": 0.0}, {"step": 1, "train/reward": 1.0}]


def test_an_outage_warns_once_and_loses_nothing(tmp_path, store, remote):
    save_step(store, 0)
    mirror, warnings = opened(tmp_path, store)
    bus = Bus()
    mirror.start(bus, "run")
    try:
        wait_until(lambda: complete_steps(mirror.folder.sizes()) == [0])
        for outage in (1, 2):
            remote.down.set()
            save_step(store, outage)
            bus.emit(CheckpointSaved(run="run", step=outage, path=""))
            wait_until(lambda: mirror.failures >= 3)
            assert len(warnings) == outage
            assert "Training continues" in warnings[-1][1]
            remote.down.clear()
            wait_until(lambda: not mirror.failures)
    finally:
        assert mirror.close()
    assert complete_steps(mirror.folder.sizes()) == [0, 1, 2]
    assert json.loads(mirror.folder.read("mirror.json"))["closed"]
    assert len({key for key, _ in warnings}) == 2  # `Bus.warn_once` shows both


def test_closing_during_an_outage_keeps_the_files(tmp_path, store, remote):
    mirror, warnings = opened(tmp_path, store)
    save_step(store, 0)
    mirror.start(Bus(), "run")
    wait_until(lambda: complete_steps(mirror.folder.sizes()) == [0])
    remote.down.set()
    save_step(store, 1)
    assert not mirror.close(timeout_s=0.3)
    assert "Register the model again" in warnings[-1][1]
    remote.down.clear()
    mirror._thread.join(120)
    again, _ = opened(tmp_path, store)
    again.copy(closed=True)
    assert complete_steps(again.folder.sizes()) == [0, 1]


def owner_of(mirror):
    return json.loads(mirror.folder.read("mirror.json"))


def test_a_long_upload_gives_signs_of_life(tmp_path, store, remote):
    save_step(store, 0)
    mirror, _ = opened(tmp_path, store)
    remote.held = "adapter_model.safetensors", threading.Event()
    mirror.start(Bus(), "run")
    beat = owner_of(mirror)["beat"]
    wait_until(lambda: owner_of(mirror)["beat"] > beat + 3)
    assert "checkpoints/0000/adapter_model.safetensors" not in mirror.folder.sizes()
    with pytest.raises(StoreError, match="in use by process"):
        opened(tmp_path, store, machine=2, patience_s=5)
    remote.held[1].set()
    assert mirror.close()
    assert complete_steps(mirror.folder.sizes()) == [0]
    assert owner_of(mirror)["closed"]


def test_a_writer_that_is_replaced_during_a_long_upload_stops(tmp_path, store, remote):
    save_step(store, 0)
    mirror, warnings = opened(tmp_path, store)
    remote.held = "adapter_model.safetensors", threading.Event()
    mirror.start(Bus(), "run")
    beat, other = owner_of(mirror)["beat"], {"token": "other", "host": "elsewhere"}
    wait_until(lambda: owner_of(mirror)["beat"] > beat)
    for _ in range(4):  # an update that is being written can still replace the first one
        mirror.folder.write("mirror.json", json.dumps(other).encode())
        time.sleep(0.1)
    remote.held[1].set()
    wait_until(lambda: mirror.lost)
    assert "elsewhere" in warnings[-1][1]
    assert owner_of(mirror) == other
    assert complete_steps(mirror.folder.sizes()) == []


def test_a_thread_that_outlives_its_mirror_writes_nothing_for_its_successor(tmp_path, store, remote):
    save_step(store, 0)
    first, warnings = opened(tmp_path, store)
    remote.held = "adapter_model.safetensors", threading.Event()
    first.start(Bus(), "run")
    wait_until(lambda: "checkpoints/0000/adapter_config.json" in first.folder.sizes())
    assert not first.close(timeout_s=0.1)
    held, remote.held = remote.held, None
    second, _ = opened(tmp_path, store)
    second.copy()
    owner, writes = owner_of(second), len(remote.log)
    held[1].set()
    first._thread.join(20)
    assert not first._thread.is_alive()
    assert owner_of(second) == owner and not owner["closed"]
    assert len(remote.log) <= writes + 1  # the upload that was in progress
    assert len(warnings) == 1  # by `close`
    assert not first.attempt(closed=True)  # also later
    assert owner_of(second) == owner
    second.copy(closed=True)
    assert owner_of(second)["closed"]


def test_a_url_that_cannot_be_read_is_an_error_at_the_start(tmp_path, store, remote):
    remote.down.set()
    with pytest.raises(StoreError, match="Could not read recording://bucket/runs"):
        opened(tmp_path, store)


def test_another_machine_continues(tmp_path, store, remote):
    for step in range(4):
        save_step(store, step, metrics={"sft/loss": 1.0} if step in (1, 2) else {}, parent=None)
    mirror, _ = opened(tmp_path, store)
    mirror.copy(closed=True)
    second, warnings = opened(tmp_path, store, machine=2)
    copied = RunStore(second.path)
    assert copied.steps_saved() == [2, 3]  # reinforcement learning started from step 2
    assert copied.history() == store.history()
    assert copied.read_state() == {"step": 3}
    assert "continues from step 3" in warnings[-1][1]
    remote.log.clear()
    second.copy()
    assert not [path for _, path in remote.log if "checkpoints" in path]  # nothing is copied back
    save_step(copied, 4)
    shutil.rmtree(copied.checkpoint_dir(3))
    second.copy(closed=True)
    assert complete_steps(second.folder.sizes()) == [0, 1, 2, 4]

    save_step(store, 9)  # the first machine returns with a step that nobody has seen
    first, warnings = opened(tmp_path, store)
    assert RunStore(first.path).steps_saved() == [2, 4]
    aside = store.path.with_name("run.before-1")
    assert RunStore(aside).steps_saved() == [0, 1, 2, 3, 9]
    assert str(aside) in warnings[0][1]


def test_a_writer_that_was_replaced_stops(tmp_path, store, remote):
    save_step(store, 0)
    mirror, warnings = opened(tmp_path, store)
    mirror.start(Bus(), "run")
    wait_until(lambda: complete_steps(mirror.folder.sizes()) == [0])
    owner = json.loads(mirror.folder.read("mirror.json"))
    mirror.folder.write("mirror.json", json.dumps(owner | {"token": "other", "host": "elsewhere"}).encode())
    wait_until(lambda: mirror.lost)
    save_step(store, 1)
    assert not mirror.close()
    assert "elsewhere" in warnings[-1][1]
    assert complete_steps(mirror.folder.sizes()) == [0]
    assert json.loads(mirror.folder.read("mirror.json"))["token"] == "other"


def test_a_missing_owner_ends_the_copies(tmp_path, store, remote):
    save_step(store, 0)
    mirror, _ = opened(tmp_path, store)
    mirror.copy()
    mirror.folder.remove("mirror.json")
    with pytest.raises(MirrorLost, match=r"has no valid mirror.json any more"):
        mirror.claim(now=True)


def test_two_writers(tmp_path, store, remote):
    save_step(store, 0)
    mirror, _ = opened(tmp_path, store)
    mirror.start(Bus(), "run")
    wait_until(lambda: complete_steps(mirror.folder.sizes()) == [0])
    with pytest.raises(StoreError, match="in use by process"):
        opened(tmp_path, store, machine=2, patience_s=5)
    mirror.close()
    assert RunStore(opened(tmp_path, store, machine=2)[0].path).steps_saved() == [0]


def test_a_killed_writer_is_replaced_after_a_wait(tmp_path, store, remote):
    save_step(store, 0)
    opened(tmp_path, store)[0].copy()  # never closed
    second, warnings = opened(tmp_path, store, machine=2)
    assert "did not close it" in warnings[0][1]
    assert RunStore(second.path).steps_saved() == [0]


def test_a_damaged_copy_is_not_used(tmp_path, store, remote):
    for step in (0, 1):
        save_step(store, step)
    mirror, _ = opened(tmp_path, store)
    mirror.copy(closed=True)
    mirror.folder.write("checkpoints/0001/adapter_model.safetensors", NO_TENSORS[:-1])
    second, warnings = opened(tmp_path, store, machine=2)
    assert RunStore(second.path).steps_saved() == [0]
    assert "step 1" in warnings[0][1]
    assert "damaged" in warnings[0][1]


def test_names_at_the_url_stay_inside_the_run(tmp_path, store, remote):
    save_step(store, 0)
    mirror, _ = opened(tmp_path, store)
    mirror.copy(closed=True)
    remote.store[f"{mirror.folder.root}/../../../escaped"] = remote.store[f"{mirror.folder.root}/history.jsonl"]
    second, _ = opened(tmp_path, store, machine=2)
    assert not [*tmp_path.rglob("escaped")]
    assert RunStore(second.path).steps_saved() == [0]


def test_an_interrupted_restore_leaves_the_run_directory_unchanged(tmp_path, store, remote, monkeypatch):
    save_step(store, 0)
    mirror, _ = opened(tmp_path, store)
    mirror.copy(closed=True)
    download = RemoteFolder.download

    def fail(self, name, target):
        if name.startswith("checkpoints/"):
            raise ConnectionError("broken")
        download(self, name, target)

    monkeypatch.setattr(RemoteFolder, "download", fail)
    with pytest.raises(StoreError, match="broken"):
        opened(tmp_path, store, machine=2)
    assert [*(tmp_path / "machine-2" / "p" / "models").rglob("*")] == [tmp_path / "machine-2/p/models/run"]
    monkeypatch.undo()
    assert RunStore(opened(tmp_path, store, machine=2)[0].path).steps_saved() == [0]


def test_files_are_renamed_on_other_file_systems(tmp_path, store):
    save_step(store, 0)
    url = f"file://{tmp_path}/nas"
    mirror, _ = opened(tmp_path, store, url=url)
    mirror.copy(closed=True)
    run = tmp_path / "nas" / "p" / "models" / "run"
    assert is_complete_checkpoint(run / "checkpoints" / "0000")
    assert not [*run.rglob("*.new")]
    assert RunStore(opened(tmp_path, store, machine=2, url=url)[0].path).history() == store.history()


async def rollout(model, scenario):
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=QUESTION, max_tokens=6, logprobs=True
    )
    choice = reply.choices[0]
    return art.Trajectory(messages_and_choices=[*QUESTION, choice], reward=choice.model_extra["token_ids"][0] % 5)


async def train(url, base_model, steps, name="run"):
    """Train to a step as on a new machine: with a cache of its own."""
    model = art.TrainableModel(name=name, project="p", base_model=str(base_model))
    async with art.LocalBackend(path=url, verbose=False) as backend:
        backend.storage = RunStorage(url, backend.path, patience_s=0.2, interval_s=0.2)
        await model.register(backend)
        begun = await model.get_step()
        options = {"steps": steps, "groups_per_step": 2, "rollouts_per_group": 3, "learning_rate": 1e-2, "show": False}
        await art.train(model, rollout, [0, 1], **options)
        return begun, model.store


async def test_training_continues_on_another_machine(tmp_path, monkeypatch, tiny_model_dir, remote):
    monkeypatch.setenv("ART_NB_CACHE", str(tmp_path / "machine-1"))
    begun, first = await train("recording://bucket/runs", tiny_model_dir, 2)
    weights = (first.checkpoint_dir(2) / "adapter_model.safetensors").read_bytes()
    optimizer = (first.checkpoint_dir(2) / "optimizer.safetensors").read_bytes()
    history = first.history()
    shutil.rmtree(tmp_path / "machine-1")
    monkeypatch.setenv("ART_NB_CACHE", str(tmp_path / "machine-2"))
    begun, second = await train("recording://bucket/runs", tiny_model_dir, 3)
    assert begun == 2
    assert (second.checkpoint_dir(2) / "adapter_model.safetensors").read_bytes() == weights
    assert (second.checkpoint_dir(2) / "optimizer.safetensors").read_bytes() == optimizer
    assert [row["step"] for row in second.history() if "train/reward" in row] == [1, 2, 3]
    assert second.history()[: len(history)] == history
    assert complete_steps(remote_folder("recording://bucket/runs/p/models/run").sizes()) == [0, 1, 2, 3]


async def test_a_step_is_not_delayed_by_an_outage(tmp_path, monkeypatch, tiny_model_dir, remote):
    monkeypatch.setenv("ART_NB_CACHE", str(tmp_path / "machine-1"))
    model = art.TrainableModel(name="run", project="p", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path="recording://bucket/runs", verbose=False) as backend:
        warned = []
        backend.bus.subscribe(warned.append, Warned)
        backend.storage = RunStorage("recording://bucket/runs", backend.path, patience_s=0.2, interval_s=0.2)
        await model.register(backend)
        remote.down.set()
        await art.train(model, rollout, [0, 1], steps=2, groups_per_step=2, rollouts_per_group=3, show=False)
        assert await model.get_step() == 2
        assert len([event for event in warned if "Could not copy" in event.message]) == 1
        remote.down.clear()
    assert complete_steps(remote_folder("recording://bucket/runs/p/models/run").sizes()) == [0, 1, 2]


PROGRAM = """
import asyncio, sys
sys.path.insert(0, "tests/runs")
from test_mirror import train
asyncio.run(train(sys.argv[1], sys.argv[2], 1000))
"""


@pytest.mark.slow
async def test_after_a_kill_another_machine_continues_from_a_finished_step(tmp_path, monkeypatch, tiny_model_dir):
    url = f"file://{tmp_path}/bucket"
    environment = os.environ | {"ART_NB_CACHE": str(tmp_path / "machine-1"), "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    command = [sys.executable, "-c", PROGRAM, url, str(tiny_model_dir)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    folder = remote_folder(f"{url}/p/models/run")
    try:
        wait_until(lambda: len(complete_steps(folder.sizes())) > 2, seconds=120)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    newest = max(complete_steps(folder.sizes()))
    weights = folder.read(f"checkpoints/{newest:04d}/adapter_model.safetensors")
    shutil.rmtree(tmp_path / "machine-1")
    monkeypatch.setenv("ART_NB_CACHE", str(tmp_path / "machine-2"))
    begun, store = await train(url, tiny_model_dir, newest + 1)
    assert begun == newest
    assert (store.checkpoint_dir(newest) / "adapter_model.safetensors").read_bytes() == weights
    steps = [row["step"] for row in store.history() if "train/reward" in row]
    assert steps == [*range(1, newest + 2)]


async def test_a_fork_of_a_run_at_the_url(tmp_path, monkeypatch, tiny_model_dir, remote):
    monkeypatch.setenv("ART_NB_CACHE", str(tmp_path / "machine-1"))
    _, first = await train("recording://bucket/runs", tiny_model_dir, 1)
    weights = (first.checkpoint_dir(1) / "adapter_model.safetensors").read_bytes()
    monkeypatch.setenv("ART_NB_CACHE", str(tmp_path / "machine-2"))
    other = art.TrainableModel(name="fork", project="p", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path="recording://bucket/runs", verbose=False) as backend:
        await backend._experimental_fork_checkpoint(other, from_model="run")
        await other.register(backend)
        assert await other.get_step() == 1
    folder = remote_folder("recording://bucket/runs/p/models/fork")
    assert folder.read("checkpoints/0001/adapter_model.safetensors") == weights


def test_an_older_state_of_a_run_that_is_forked(tmp_path, store, remote):
    save_step(store, 0)
    opened(tmp_path, store)[0].copy(closed=True)
    second, _ = opened(tmp_path, store, machine=2)
    save_step(RunStore(second.path), 1)
    second.copy(closed=True)
    warnings = []
    warn = lambda key, message: warnings.append(message)
    storage(tmp_path, 2).fetch(second.path, warn)
    assert not warnings
    storage(tmp_path).fetch(store.path, warn)
    assert "newer state of this run, with step 1" in warnings[0]
    assert store.steps_saved() == [0]


async def test_a_registration_that_is_canceled_while_it_waits_for_another_writer(
    tmp_path, monkeypatch, tiny_model_dir, remote
):
    monkeypatch.setenv("ART_NB_CACHE", str(tmp_path / "machine-1"))
    folder = remote_folder("recording://bucket/runs/p/models/run")
    folder.write("mirror.json", json.dumps({"token": "other", "closed": False}).encode())
    model = art.TrainableModel(name="run", project="p", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path="recording://bucket/runs", verbose=False) as backend:
        waiting = asyncio.Event()
        loop = asyncio.get_running_loop()
        backend.bus.subscribe(lambda event: loop.call_soon_threadsafe(waiting.set), Warned)
        backend.storage = RunStorage("recording://bucket/runs", backend.path, patience_s=1.0)
        registration = asyncio.create_task(model.register(backend))
        await asyncio.wait_for(waiting.wait(), 120)
        registration.cancel()
        with pytest.raises(asyncio.CancelledError):
            await registration
    owner = json.loads(folder.read("mirror.json"))
    assert owner["token"] != "other"
    assert owner["closed"]
    assert not (model.store.path / "run.lock").exists()
