"""A warm process that forks children (`crash_parts`), and what each said until its end."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from support.warm import ONE_THREAD

HERE = Path(__file__).parent


@dataclass
class Life:
    """What a child said until its end."""

    lines: list[list[str]]
    status: int
    times: list[float]

    def steps(self, kind):
        return [int(words[1]) for words in self.lines if words[0] == kind]

    def lasting(self):
        """For each kind of line, how long it was followed by nothing of another kind, at most."""
        kinds, found = [words[0] for words in self.lines], {}
        for i, kind in enumerate(kinds[:-1]):
            after = next((j for j in range(i + 1, len(kinds)) if kinds[j] != kind), i)
            found[kind] = max(found.get(kind, 0.0), self.times[after] - self.times[i])
        return found


class Nursery:
    """The warm process and the children it forks, one at a time."""

    def __init__(self, log):
        command = [sys.executable, str(HERE / "crash_parts.py")]
        env = os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])}
        self.process = subprocess.Popen(
            command, env=env, text=True, stderr=log, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._read()

    def _read(self):
        words = self.process.stdout.readline().split()
        assert words, "the warm process is dead"
        return words

    def live(self, job, kill_at=None, nth=1, delay_s=0.0, by=signal.SIGKILL):
        """Let a child do a job; kill it some time after it has said `kill_at` for the nth time."""
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        pid, lines, times, seen = int(self._read()[1]), [["child"]], [time.monotonic()], 0
        while lines[-1][0] != "ended":
            seen += lines[-1][0] == kill_at
            if lines[-1][0] == kill_at and seen == nth:
                time.sleep(delay_s)
                with suppress(ProcessLookupError):  # it may have ended meanwhile: its status tells
                    os.kill(pid, by)
            lines.append(self._read())
            times.append(time.monotonic())
        return Life(lines[:-1], int(lines[-1][1]), times)

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def the_job(do, name, path, base_model, **more):
    return {"do": do, "name": name, "path": str(path), "base_model": str(base_model), **more}
