"""Child processes that receive a line of JSON and answer with a line of JSON."""

import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent


class Talk:
    """The channel of a child process. Output of libraries goes to stderr, because stdout carries the replies."""

    def __init__(self):
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def receive(self) -> dict | None:
        """Return the next request, or `None` if stdin was closed."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def reply(self, **values) -> None:
        """Send a reply."""
        print(json.dumps(values), file=self._out, flush=True)


def serve(tasks: dict[str, Callable[..., dict | None]]) -> None:
    """Answer requests until stdin is closed. If a task fails, the reply is its error."""
    talk = Talk()
    while (request := talk.receive()) is not None:
        try:
            reply = tasks[request.pop("do")](**request) or {}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        talk.reply(**reply)


def peak_mb() -> float:
    """Return the peak memory of this process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


class Failed(RuntimeError):
    """A process did not reply, or replied with an error."""


class Child:
    """A child process and the pipe to it."""

    def __init__(self, python: Path | str, script: str, log: Path, **environ: str | None):
        self.name, self.log = script, log
        log.parent.mkdir(parents=True, exist_ok=True)
        defaults = {"PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        variables = {name: value for name, value in {**os.environ, **defaults, **environ}.items() if value is not None}
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [str(python), str(HERE / script)],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def ask(self, do: str, limit_s: float = 1800, **arguments) -> dict:
        """Send a request and return the reply. Raise `Failed` if there is none or if it is an error."""
        timer = threading.Timer(limit_s, self.process.kill)
        timer.start()
        try:
            print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        reply = json.loads(line) if line else {"error": self._exit_reason()}
        if "error" in reply:
            raise Failed(f"{self.name} {do}: {reply['error']}")
        return reply

    def _exit_reason(self) -> str:
        code = self.process.wait()
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"ended with {code}: {' | '.join(lines[-3:])[-400:]}"

    def cpu_s(self) -> float:
        """Return the CPU seconds that the process has used."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        if not stat.exists():
            return 0.0
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
