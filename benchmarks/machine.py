"""The machine: processor, package versions, and the load of other processes."""

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

from envs import VERSIONS
from talk import HERE

from art_nb.core.machine import usable_cores
from art_nb.runs.sessions import processor_name

CORES = usable_cores()
QUIET = 0.3  # load average above which the machine counts as busy
PACKAGES = ("art_nb", "torch", "transformers", "peft", "numpy")


def machine(threads: int) -> dict:
    """Return the description of the machine, which is the first line of the output."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    load = os.getloadavg()[0]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True).stdout
    return {
        "cpu": processor_name(),
        "bf16": [flag for flag in flags if "bf16" in flag],
        "cores": CORES,
        "threads": threads,
        "load_before": round(load, 2),
        "idle": load <= QUIET,
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": commit.strip(),
        "when": time.strftime("%Y-%m-%d %H:%M"),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "peers": VERSIONS,
    }


def busy_s() -> float | None:
    """Return the busy seconds of all cores since boot, or `None` if the system does not report them."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _, _, irq, soft, steal = map(int, stat.read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


class Watch:
    """A measurement of the CPU share of other processes between `start` and `others`."""

    def __init__(self, own_s):
        self.own_s = own_s  # seconds of CPU that the processes of the bench have used
        self.start()

    def start(self) -> None:
        """Start the measurement."""
        self.began, self.busy, self.own = time.perf_counter(), busy_s(), self.own_s()

    def others(self) -> float | None:
        """Return the share of all cores that other processes used, 0 to 1."""
        if self.busy is None:
            return None
        rest = busy_s() - self.busy - (self.own_s() - self.own)
        return round(max(0.0, rest / CORES / max(time.perf_counter() - self.began, 1e-9)), 3)
