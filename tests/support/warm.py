"""A Python that has imported the large packages already: a process of its own, forked in place of a new start.

`warm_python()` returns an executable that takes `-c`, `-m` or a script, like `python`. The first call starts a server,
which imports torch, transformers and other large packages (nothing of art_nb) and forks a child for each run of the
executable: with its arguments, environment, working directory and standard streams. A signal to the executable reaches
the child; the child dies with it. Tests of what an import loads or costs use `sys.executable`.

`warm_kernel()` does the same for Jupyter kernels. Its server is a child of the first one that has also imported
ipykernel and what most notebooks use."""

import atexit
import gc
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

PACKAGES = [
    "torch",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama",
    "tokenizers",
    "safetensors.torch",
    "openai",
    "pyarrow.parquet",
    "pyarrow.compute",
    "httpx",
    "starlette",
]
KERNEL_PACKAGES = [
    "ipykernel.kernelapp",
    "ipykernel.ipkernel",
    "ipykernel.zmqshell",
    "IPython.core.completer",
    "anywidget",
    "peft",
]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1") | {
    "JE_ARROW_MALLOC_CONF": "background_thread:false"
}  # a process that forks must not have other threads
FORWARDED = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]


@cache
def warm_python() -> str:
    """The path of the executable of this process's own server."""
    return start_server(sys.executable, PACKAGES)


def start_server(python: str, packages: list[str]) -> str:
    """Start a server that has imported some packages. Return the path of its executable."""
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    address, command = f"{folder.name}/socket", Path(folder.name, "python")
    server = subprocess.Popen(
        [python, __file__, "serve", address, *packages],
        env=os.environ | ONE_THREAD,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout.read(1) == b"1", "the server of warm processes did not start"

    def end():
        server.stdin.close()
        server.wait()
        server.stdout.close()
        folder.cleanup()

    atexit.register(end)
    words = [sys.executable, "-I", "-S", __file__, "run", address]
    command.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    command.chmod(0o755)
    return str(command)


@cache
def warm_kernel(ipykernel: bool = True) -> str:
    """The name of a warm Jupyter kernel, known to this process and to those that it starts.

    Without `ipykernel`, the kernel imports the ipykernel that it finds on its path.
    """
    python = start_server(warm_python(), KERNEL_PACKAGES) if ipykernel else warm_python()
    folder, name = Path(python).parent, "warm" if ipykernel else "warm-any"
    spec = folder / "kernels" / name / "kernel.json"
    spec.parent.mkdir(parents=True)
    line = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.write_text(
        json.dumps({"argv": line, "display_name": "Python 3", "language": "python", "metadata": {"debugger": True}})
    )
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("JUPYTER_PATH")]))
    return name


def run(address: str, words: list[str]) -> int:
    """Be the executable: ask for a child, forward signals to it, and end with its status."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    socket.send_fds(connection, [len(request).to_bytes(4, "big")], [0, 1, 2])
    connection.sendall(request)
    replies = connection.makefile("r")
    pid = int(replies.readline())
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    status = int(replies.readline())
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


class Server:
    """Forks a child for each connection; a connection that ends takes its child with it."""

    def __init__(self, address: str):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen(64)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        self.selector.register(sys.stdin, selectors.EVENT_READ, None)
        self.children = {}
        self.ended, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self.ended, selectors.EVENT_READ, self.reap)

    def serve(self):
        """Serve until standard input ends. In a child, return its command line."""
        os.write(1, b"1")
        while True:
            for key, _ in self.selector.select():
                if key.data is None:
                    for pid in self.children:
                        os.kill(pid, signal.SIGKILL)
                    return
                if (child := key.data()) is not None:
                    return child

    def accept(self):
        connection, _ = self.listener.accept()
        length, streams, _, _ = socket.recv_fds(connection, 4, 3)
        request, left = b"", int.from_bytes(length, "big")
        while len(request) < left:
            request += connection.recv(left - len(request))
        pid = os.fork()
        if pid == 0:
            return self.prepare_child(streams, *json.loads(request))
        for stream in streams:
            os.close(stream)
        self.children[pid] = connection
        connection.sendall(f"{pid}\n".encode())
        self.selector.register(connection, selectors.EVENT_READ, lambda: self.drop(pid))
        return None

    def drop(self, pid: int):
        """Kill the child of an executable that was killed."""
        if pid in self.children:
            self.selector.unregister(self.children[pid])
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def reap(self):
        """Tell the executables of ended children how they ended."""
        os.read(self.ended, 4096)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                connection = self.children.pop(ended[0])
                with suppress(KeyError):
                    self.selector.unregister(connection)
                with suppress(OSError):
                    connection.sendall(f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())
                connection.close()

    def prepare_child(self, streams, words, folder, environment):
        """Set the streams, directory and environment of the child; return its command line."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, stream in enumerate(streams):
            os.dup2(stream, number, inheritable=True)
            os.close(stream)
        self.selector.close()
        self.listener.close()
        for connection in self.children.values():
            connection.close()
        os.chdir(folder)
        if "JPY_PARENT_PID" in environment:  # a kernel ends when its parent is another process
            environment["JPY_PARENT_PID"] = str(os.getppid())
        os.environ.clear()
        os.environ.update(environment)
        return words


def execute(words: list[str]) -> None:
    """Run a command line as `python` does."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # as in a new process
        number = getattr(sys, f"__{name}__").fileno()
        lines = mode == "w" and (name == "stderr" or os.isatty(number) or "PYTHONUNBUFFERED" in os.environ)
        stream = open(number, mode, closefd=False, encoding="utf-8")
        stream.reconfigure(line_buffering=True) if lines else None
        setattr(sys, name, stream)
    first, *others = words
    search = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    folder = {"-c": "", "-m": os.getcwd()}.get(first, str(Path(first).resolve().parent))
    sys.path[:] = [folder, *search, *(path for path in sys.path if path not in search)]
    if first == "-c":
        main = sys.modules["__main__"] = ModuleType("__main__")
        sys.argv = ["-c", *others[1:]]
        exec(compile(others[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(first, run_name="__main__")


def check_threads() -> None:
    """Raise an error if this process has other threads: a lock that one of them holds is never released in a child."""
    names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]
    assert len(names) <= 1, f"threads before a fork: {names}"


def serve(address: str, packages: list[str]) -> None:
    """Import the packages and serve; in each child, run its command line."""
    sys.path.remove(str(Path(__file__).parent))
    for package in packages:
        import_module(package)
    check_threads()
    gc.collect()
    gc.freeze()  # a collection in a child must not copy the pages of these objects
    if (words := Server(address).serve()) is not None:
        execute(words)


if __name__ == "__main__":
    role, address, *words = sys.argv[1:]
    sys.exit(serve(address, words) if role == "serve" else run(address, words))
