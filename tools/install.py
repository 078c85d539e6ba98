"""Install pinned packages with two pip processes at a time, and show the progress: `python install.py FILE`."""

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ENTRY = re.compile(r"^[A-Za-z0-9](?:.*\\\n)*.*\n", re.MULTILINE)  # a package with its hashes
# Python compiles a module when it is first imported. pip would compile all modules, which takes a third of its time.
PIP = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off", "--no-color"]
PIP += ["--no-compile"]
LINE_INTERVAL_S = 15


def start_pip(entries, directory, name):
    """Start an installation of entries of a requirements file, and return its process and its log."""
    requirements, log = directory / f"{name}.txt", directory / f"{name}.log"
    requirements.write_text("".join(entries))
    command = [*PIP, "--require-hashes", "--no-deps", "-r", requirements]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    return process, log


def installed_count():
    """Return the number of packages in this environment."""
    return len([*Path(sysconfig.get_path("purelib")).glob("*.dist-info")])


def show_until_end(processes, logs, total):
    """Print the progress until all processes have ended: in a terminal on one line, elsewhere every few seconds."""
    in_terminal, next_line_s, before = sys.stdout.isatty(), time.monotonic() + LINE_INTERVAL_S, installed_count()
    while any(process.poll() is None for process in processes):
        time.sleep(0.5)
        downloaded = sum(len(re.findall("^Collecting ", log.read_text(), re.MULTILINE)) for log in logs)
        text = f"{total} packages: {downloaded} downloaded, {max(0, installed_count() - before)} installed"
        if in_terminal:
            print(f"\r{text}", end="", flush=True)
        elif time.monotonic() >= next_line_s:
            next_line_s += LINE_INTERVAL_S
            print(text, flush=True)
    print("\r" if in_terminal else "", end="", flush=True)


def main():
    """Install the packages of a requirements file with hashes."""
    entries = ENTRY.findall(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as directory:
        halves = [start_pip(entries[i::2], Path(directory), str(i)) for i in range(2)]
        processes, logs = [list(values) for values in zip(*halves, strict=True)]
        try:
            show_until_end(processes, logs, len(entries))
        finally:
            for process in processes:
                process.terminate()
                process.wait()
        for process, log in zip(processes, logs, strict=True):
            if process.returncode:
                sys.exit(f"{log.read_text()[-2000:]}\npip failed with exit code {process.returncode}.")
    print(f"{len(entries)} packages are installed.", flush=True)


if __name__ == "__main__":
    main()
