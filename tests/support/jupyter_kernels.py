"""Real kernels: one that runs a whole notebook; and a front end that presses the live cell's buttons, by version."""

import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from support.warm import warm_kernel
from traitlets.config import Config

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "art_nb" / "ipykernel"


def sockets_in(folder: Path | str) -> dict[str, str]:
    """Options of a kernel manager that speaks over files: a port might be taken before the kernel binds it."""
    return {"transport": "ipc", "connection_file": f"{folder}/kernel.json"}


def run_notebook(notebook: nbformat.NotebookNode, folder: Path, timeout_s: float = 600, kernel: str = "") -> None:
    """Run a notebook in a folder, top to bottom, in a warm kernel unless another is named."""
    with tempfile.TemporaryDirectory() as made:
        config = Config(KernelManager=sockets_in(made))
        NotebookClient(
            notebook,
            config=config,
            timeout=timeout_s,
            kernel_name=kernel or warm_kernel(),
            shutdown_kernel="immediate",
            resources={"metadata": {"path": str(folder)}},
        ).execute()


def shorten_tutorial(path: Path) -> nbformat.NotebookNode:
    """Read a tutorial and give its steps two groups of four. `EXAMPLE_STEPS` is their number, and shortens the rest."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for name, size in {"groups_per_step": 2, "rollouts_per_group": 4}.items():
            cell.source = re.sub(rf"({name}\"?[=:] ?)\d+", rf"\g<1>{size}", cell.source)
    return notebook


def installed(version: str) -> Path:
    """The folder of an ipykernel version, fetched once a machine; skips where there is no network."""
    folder = CACHE / version
    if not (folder / "ipykernel").is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--no-deps",
            "--target",
            str(folder),
            f"ipykernel=={version}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            if os.environ.get("ART_NB_KERNELS") == "required":
                pytest.fail(f"ipykernel {version} could not be fetched: {done.stderr}")
            pytest.skip(f"ipykernel {version} could not be fetched")
    return folder


STACKS = """
def _stacks(loop, folder):
    import asyncio, io, sys, threading, time, traceback
    while True:
        time.sleep(0.5)
        if (folder / "asked").exists():
            (folder / "asked").unlink()
            out, names = io.StringIO(), {{one.ident: one.name for one in threading.enumerate()}}
            for ident, frame in sys._current_frames().items():
                print("thread", names.get(ident, ident), "".join(traceback.format_stack(frame)), file=out)
            for task in asyncio.all_tasks(loop):
                task.print_stack(file=out)
                print(task, file=out)
            (folder / "stacks").write_text(out.getvalue())

import asyncio, pathlib, threading
threading.Thread(target=_stacks, args=(asyncio.get_running_loop(), pathlib.Path({folder!r})), daemon=True).start()
"""


class Front:
    """A kernel, and the part of a notebook front end that a live cell needs."""

    def __init__(self, version: str, root: Path, subshells: bool):
        self.version, self.folder = version, tempfile.TemporaryDirectory()
        self.dump = Path(self.folder.name)
        self.manager = KernelManager(kernel_name=warm_kernel(ipykernel=False), **sockets_in(self.dump))
        path = [str(installed(version)), str(root), os.environ.get("PYTHONPATH", "")]
        self.manager.start_kernel(env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}, cwd=str(root))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)
        self.outputs: list[dict] = []  # of all cells, in order
        self.shown: dict[str, dict] = {}  # what stands in each output, by display id
        self.comms: dict[str, dict] = {}  # state by comm
        self.custom: list[dict] = []  # custom messages from the kernel
        self.times: list[float] = []  # the time at which the kernel sent each comm message
        self.idle, self.subshell, self.views, self.answers_pings = {}, None, 0, True
        self.doors: list = []
        self.run(STACKS.format(folder=str(self.dump)))
        if subshells:
            self.subshell = self._make_subshell()

    def _make_subshell(self) -> str | None:
        """As JupyterLab does: one for its comms, where the kernel knows subshells."""
        request, replies = self.client.kernel_info(), []
        assert self.until(lambda: request in self.idle), f"no reply to kernel_info_request\n{self.stacks()}"
        while not replies or replies[-1]["parent_header"]["msg_id"] != request:
            replies.append(self.client.get_shell_msg(timeout=120))
        if "kernel subshells" not in replies[-1]["content"].get("supported_features", []):
            return None
        message = self.client.session.msg("create_subshell_request", {})
        self.client.control_channel.send(message)
        return self.client.get_control_msg(timeout=120)["content"]["subshell_id"]

    def execute(self, code: str) -> str:
        """Run a cell without waiting for it; gives its message's id."""
        return self.client.execute(code, allow_stdin=False)

    def run(self, code: str, timeout_s: float = 120) -> list[dict]:
        """Run a cell to its end and give what it put out."""
        before, cell = len(self.outputs), self.execute(code)
        assert self.until(lambda: cell in self.idle, timeout_s), f"the cell did not end: {code}\n{self.stacks()}"
        errors = [out for out in self.outputs[before:] if out["type"] == "error"]
        assert not errors, "\n".join(errors[0]["content"]["traceback"])
        return self.outputs[before:]

    def stacks(self) -> str:
        """What the kernel's threads and the tasks of its loop are doing."""
        (self.dump / "asked").touch()
        time.sleep(2)
        alive = self.manager.is_alive()
        told = [path.read_text() for path in self.dump.glob("stacks")]
        return "\n".join([f"kernel alive: {alive}", *told])

    def text(self, code: str) -> str:
        """What a cell prints."""
        return "".join(
            out["content"]["text"]
            for out in self.run(code)
            if out["type"] == "stream" and out["content"]["name"] == "stdout"
        ).strip()

    def until(self, truth, timeout_s: float = 120) -> bool:
        """Take messages in until something is true."""
        end, knock = time.monotonic() + timeout_s, time.monotonic() + 3
        while not truth():
            if time.monotonic() > end:
                return False
            if time.monotonic() > knock:
                knock = time.monotonic() + 3
                self.knock()
            try:
                self._take(self.client.get_iopub_msg(timeout=0.05))
            except queue.Empty:
                continue
        return True

    def knock(self) -> None:
        """Connect once more: ipykernel 7.0 to 7.3 may overlook a request until then (ipython/ipykernel#1554)."""
        if self.version.startswith("7.3"):
            self.doors.append(self.manager.connect_shell())

    def _take(self, message: dict) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind.startswith("comm_"):
            self.times.append(message["header"]["date"].timestamp())
            getattr(self, f"_{kind}")(content, message)
        elif kind == "status" and content["execution_state"] == "idle":
            self.idle[message["parent_header"].get("msg_id", "")] = True
        elif kind in ("stream", "error", "display_data", "execute_result", "update_display_data"):
            self.outputs.append({"type": kind, "content": content})
            if "transient" in content and "display_id" in content["transient"]:
                self.shown[content["transient"]["display_id"]] = content["data"]
            self._view(content.get("data", {}))

    def _comm_open(self, content: dict, message: dict) -> None:
        self.comms[content["comm_id"]] = dict(content["data"].get("state", {}))

    def _comm_msg(self, content: dict, message: dict) -> None:
        data = content["data"]
        if data.get("method") == "update":
            self.comms[content["comm_id"]].update(data["state"])
        elif data.get("method") == "custom":
            self.custom.append(data["content"] | {"heard": time.monotonic()})
            if data["content"].get("ping") and self.answers_pings:
                self.send("pong")

    def _comm_close(self, content: dict, message: dict) -> None:
        self.comms.pop(content["comm_id"], None)

    def _view(self, data: dict) -> None:
        """A widget was displayed: its view reports, as the real one does."""
        view = data.get("application/vnd.jupyter.widget-view+json")
        if view and self.answers_pings and "columns" not in view:
            self.views += 1
            self.send("index", comm=view["model_id"])

    def cell(self) -> str:
        """The comm of the live cell."""
        return next((comm for comm, state in self.comms.items() if "phase" in state.get("tick", {})), "")

    def tick(self) -> dict:
        """The live cell's last tick."""
        nothing = {"rows": 0, "step": 0, "phase": "", "status": "", "micro": [0, 0]}
        return self.comms.get(self.cell(), {}).get("tick", nothing)

    def send(self, command: str, comm: str | None = None, **args) -> int:
        """Press a button; gives the number of the request."""
        number = uuid.uuid4().int % 10**9
        content = {"id": number, "client": "test", "command": command, "args": args}
        message = self.client.session.msg(
            "comm_msg", {"comm_id": comm or self.cell(), "data": {"method": "custom", "content": content}}
        )
        if self.subshell:
            message["header"]["subshell_id"] = self.subshell
        self.client.shell_channel.send(message)
        return number

    def answer(self, number: int, timeout_s: float = 120) -> dict | None:
        """The answer to a request; None where none comes."""
        found = lambda: next((one for one in self.custom if one.get("id") == number), None)
        self.until(found, timeout_s)
        return found()

    def close(self) -> None:
        """End the kernel."""
        for door in self.doors:
            door.close(linger=0)
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.folder.cleanup()

    def __repr__(self):
        return json.dumps({"outputs": len(self.outputs), "comms": len(self.comms)})
