"""A run directory has one writer: the second process is refused, the lock of a dead one is taken over."""

import json
import multiprocessing
import os
import subprocess
import sys

import pytest
from support.registered import a_group, at_home

import art_nb as art
from art_nb.core.machine import machine_tag, process_start, temporary_path
from art_nb.core.types import ServeError, StoreError
from art_nb.learners import checkpoints
from art_nb.runs.locks import LOCK_NAME, acquire_lock, read_lock

HOLD = """
import sys
from art_nb.runs.locks import acquire_lock
lock = acquire_lock(sys.argv[1], print)
print("held", flush=True)
sys.stdin.read()
"""


async def rollout(model, scenario):
    """It is never called."""


def silent(key, message):
    """Nobody listens."""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of `tmp_path / "run"`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def files(path):
    """Names and contents of everything below a directory but the lock."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_the_second_process_is_refused_and_the_owner_is_named(tmp_path, holder):
    advice = "Only one process can open a run: .*give this model another name or run_name"
    with pytest.raises(StoreError, match=rf"process {holder.pid} on .*{advice}"):
        acquire_lock(tmp_path / "run", silent)
    assert read_lock(tmp_path / "run" / LOCK_NAME)["pid"] == holder.pid


def test_a_lock_ends_with_its_process(tmp_path, holder):
    holder.communicate("")  # it ends as a script does
    assert not (tmp_path / "run" / LOCK_NAME).exists()


def test_a_killed_owner_locks_nobody_out_even_as_a_zombie(tmp_path, holder):
    holder.kill()  # nobody has waited for it: its number is still in use
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    acquire_lock(tmp_path / "run", pytest.fail).release()
    assert not (tmp_path / "run" / LOCK_NAME).exists()


def test_a_number_that_another_process_has_by_now_is_not_the_owner(tmp_path, holder):
    path = tmp_path / "run" / LOCK_NAME
    owner = json.loads(path.read_text())
    if not owner["start"]:
        pytest.skip("this system does not show when processes started")
    path.write_text(json.dumps(owner | {"start": owner["start"] - 1}))
    acquire_lock(tmp_path / "run", pytest.fail).release()


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"pid": "x"}'])
def test_a_damaged_lock_counts_as_stale(tmp_path, damaged):
    (tmp_path / LOCK_NAME).write_bytes(damaged)
    acquire_lock(tmp_path, silent, patience_s=0.05).release()


def test_another_machine_is_alive_if_the_lock_changes(tmp_path, holder):
    path, heard = tmp_path / "run" / LOCK_NAME, []
    owner = json.loads(path.read_text()) | {"machine": "00000000", "host": "elsewhere"}

    def touch(key, message):
        heard.append(message)
        os.utime(path, (1, 1))  # whatever its clock says

    path.write_text(json.dumps(owner))
    with pytest.raises(StoreError, match=rf"process {holder.pid} on elsewhere"):
        acquire_lock(tmp_path / "run", touch, patience_s=30.0)
    assert "Waiting up to 30 s" in heard[0]
    holder.kill()
    holder.wait()
    lock = acquire_lock(tmp_path / "run", silent, patience_s=0.05)
    path.write_text(json.dumps(owner))  # it comes back
    with pytest.raises(StoreError, match="taken over by process"):
        lock.check()
    lock.release()
    assert read_lock(path)["host"] == "elsewhere", "a lock that was lost is not removed"


def _child(path, pipe):
    try:
        acquire_lock(path, silent)
        pipe.send("taken")
    except StoreError as error:
        pipe.send(str(error))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_neither_shares_nor_releases_the_lock(tmp_path):
    lock = acquire_lock(tmp_path, silent)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_child, args=(tmp_path, theirs))
    child.start()
    assert f"process {os.getpid()} on" in ours.recv()
    child.join()
    assert read_lock(lock.path)["pid"] == os.getpid()
    lock.release()


async def test_a_run_that_another_process_trains_is_left_as_it_is(tmp_path, tiny_model_dir):
    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        await backend.train(model, [await a_group(model)])
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(model.store.path)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == "held\n"
        before = files(model.store.path)
        second = art.TrainableModel(name="tiny", project="tests", base_model=str(tiny_model_dir), report_metrics=[])
        async with art.LocalBackend(path=tmp_path, verbose=False) as backend:
            with pytest.raises(StoreError, match=f"process {process.pid} on"):
                await second.register(backend)
            with pytest.raises(ValueError, match="has no backend yet"):
                art.train(second, rollout, [0])
            with pytest.raises(StoreError, match=f"process {process.pid} on"):
                await backend._experimental_fork_checkpoint(second, from_model="tiny", not_after_step=0)
        assert files(model.store.path) == before
        assert art.open_run(model.store.path).steps_saved() == [0, 1]
        assert art.Run.attach(model.store.path).step == 0, "reading needs no lock"
        process.kill()
        process.wait()
        async with art.LocalBackend(path=tmp_path, verbose=False) as backend:
            await second.register(backend)
            assert await second.get_step() == 1
    finally:
        process.kill()
        process.communicate()
    assert not (model.store.path / LOCK_NAME).exists()


async def test_a_second_backend_of_the_same_process_takes_the_run_over(tmp_path, tiny_model_dir):
    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        groups = [await a_group(model)]
        await backend.train(model, groups)
        async with at_home(tiny_model_dir, tmp_path) as (again, second):
            assert (await second.train(again, groups)).step == 2
            with pytest.raises(ServeError, match="not registered with this backend"):
                await backend.train(model, groups)
        assert model.store.steps_saved() == [0, 1, 2]


def test_leftovers_of_any_name_are_handled(tmp_path):
    dead, target = 2**22 + 1, tmp_path / "target"
    target.mkdir()
    left = [
        f".a.{'9' * 20}.tmp",
        f".a.{'9' * 4000}"[:200] + ".tmp",
        f".a.b.{dead}.01234567.tmp",
        f".c.{machine_tag()}-{dead}-{process_start(os.getpid())}-01234567.tmp",
        f".c.{machine_tag()}-{'9' * 30}-0-01234567.tmp",
    ]
    for name in left:
        (tmp_path / name).write_text("")
    for number, name in enumerate((f".link.{dead}.tmp", f".link.{dead}.old")):
        (tmp_path / name).symlink_to(target if number else tmp_path / "nowhere")
    (tmp_path / f".folder.{dead}.tmp" / "inside").mkdir(parents=True)
    kept = [
        f"...{dead}.old",
        f"....{dead}.old",
        ".hidden",
        ".a.tmp",
        ".c.00000000-7-7-01234567.tmp",
        temporary_path(tmp_path / "live").name,
    ]
    for name in kept:
        (tmp_path / name).write_text("")
    gone = checkpoints.remove_leftovers(tmp_path)
    assert sorted(gone) == sorted([*left, f".link.{dead}.tmp", f".link.{dead}.old", f".folder.{dead}.tmp"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "target"])
    os.utime(tmp_path / kept[4], (1, 1))
    assert checkpoints.remove_leftovers(tmp_path) == [kept[4]], "another machine's, long after its last change"
