"""Ctrl-C ends every command that waits: one line, no traceback, and no process that is left behind."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.remote_parts import MAIN

ROOT = Path(__file__).parents[2]
LINE = "art-nb: Stopped with Ctrl-C."
WAITS = "print('waiting', flush=True)\nimport time\ntime.sleep(600)\n"
pytestmark = pytest.mark.skipif(os.name != "posix", reason="a signal")


def start(folder, *words, **streams):
    """A process with a group of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=environment, start_new_session=True, **pipes | streams
    )


def interrupt(process, stream, mark):
    """Wait until the mark is printed, send SIGINT to the group as a terminal does, and return the rest of stderr."""
    while mark not in (line := stream.readline().decode()):
        assert line, f"{mark!r} was not printed"
    time.sleep(0.5)  # a signal between the mark and a blocking read would be seen only after the read
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=200)[1].decode()
    assert no_process_left(process.pid)
    assert "Traceback" not in said
    return said


def no_process_left(group):
    """Whether the group is empty. Its last process can need a moment to end."""
    for _ in range(600):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_doctor(tmp_path):
    process = start(tmp_path, "-c", MAIN, "doctor")
    assert interrupt(process, process.stderr, "imports").splitlines()[-1] == LINE
    assert process.returncode == 130


def test_train_while_the_script_is_read(tmp_path):
    (tmp_path / "slow.py").write_text(WAITS)
    process = start(tmp_path, "-c", MAIN, "train", "slow.py")
    assert interrupt(process, process.stdout, "waiting") == f"{LINE}\n"
    assert process.returncode == 130


def test_run(tmp_path):
    process = start(tmp_path, "-c", MAIN, "run", "--port", "0")
    said = interrupt(process, process.stdout, "Serving")
    assert (said, process.returncode) in (("", 0), (f"{LINE}\n", 130))  # after, or before uvicorn handles the signal


def test_run_tinker(tmp_path, tiny_model_dir):
    process = start(tmp_path, "-c", MAIN, "run", "--tinker", "--base-model", str(tiny_model_dir), "--port", "0")
    said = interrupt(process, process.stdout, "art-nb view")  # after the settings of the client
    assert (said, process.returncode) in (("", 0), (f"{LINE}\n", 130))


def test_a_question(tmp_path):
    terminal, other = pty.openpty()
    process = start(tmp_path, "-c", MAIN, "init", stdin=other)
    os.close(other)
    assert interrupt(process, process.stdout, "single") == f"{LINE}\n"
    assert process.returncode == 130
    assert not [*tmp_path.iterdir()]
    os.close(terminal)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["The untrained model plays", "In step 1 (warm-up)"])
def test_the_demo(tmp_path, smollm2_dir, phase):
    options = ["--steps", "1", "--groups", "1", "--games", "16", "--warm-up", "64"]
    process = start(tmp_path, str(ROOT / "examples" / "tic_tac_toe" / "demo.py"), *options)
    said = interrupt(process, process.stdout, phase)
    run = ".art/tic-tac-toe/models/ttt-001"
    assert said.splitlines()[-1].startswith("The demo was stopped with Ctrl-C. To view its finished steps: ")
    assert said.endswith(f" view {run}\n")
    assert "Traceback" not in said
    assert process.returncode == 1
