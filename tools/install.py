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
    """Start an installation of entries of a requirements file, and return its process, its log and its errors."""
    requirements, log, errors = (directory / f"{name}.{ending}" for ending in ("txt", "log", "err"))
    requirements.write_text("".join(entries))
    command = [*PIP, "--require-hashes", "--no-deps", "-r", requirements]
    with log.open("w") as file, errors.open("w") as error_file:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, stdout=file, stderr=error_file, env=environment)
    return process, log, errors


def installed_packages():
    """Return the names and versions of the packages in this environment."""
    return {path.name for path in Path(sysconfig.get_path("purelib")).glob("*.dist-info")}


def line_count(logs, start):
    """Return the number of lines in the logs that begin with a regular expression."""
    return sum(len(re.findall(f"^{start}", log.read_text(), re.MULTILINE)) for log in logs)


def print_new_kinds(files, kinds):
    """Print the lines of pip's errors. Of lines that differ only in quoted text, print the first one."""
    for line in [line for file in files for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]:
        kind = re.sub("'.*?'", "", line)
        if kind not in kinds:
            kinds.add(kind)
            print(f"\r{line}" if sys.stderr.isatty() else line, end="", file=sys.stderr, flush=True)


def show_until_end(processes, logs, errors, total):
    """Print the progress until all processes have ended: in a terminal on one line, elsewhere every few seconds.

    Return the number of packages for this machine: pip ignores those for other systems and Python versions.
    """
    in_terminal, next_line_s, before = sys.stdout.isatty(), time.monotonic() + LINE_INTERVAL_S, installed_packages()
    is_running, kinds, last_text = True, set(), ""
    while is_running:
        time.sleep(0.5)
        is_running = any(process.poll() is None for process in processes)
        print_new_kinds(errors, kinds)
        needed, downloaded = total - line_count(logs, "Ignoring "), line_count(logs, "(Collecting|Processing) ")
        text = f"{needed} packages: {downloaded} downloaded, {len(installed_packages() - before)} installed"
        if in_terminal:
            print(f"\r{text}", end="", flush=True)
        elif time.monotonic() >= next_line_s and text != last_text:
            next_line_s, last_text = time.monotonic() + LINE_INTERVAL_S, text
            print(text, flush=True)
    print("\r" if in_terminal else "", end="", flush=True)
    return needed


def main():
    """Install the packages of a requirements file with hashes."""
    entries = ENTRY.findall(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as directory:
        halves = [start_pip(entries[i::2], Path(directory), str(i)) for i in range(2)]
        processes, logs, errors = [list(values) for values in zip(*halves, strict=True)]
        try:
            count = show_until_end(processes, logs, errors, len(entries))
        finally:
            for process in processes:
                process.terminate()
                process.wait()
        for process, log in zip(processes, logs, strict=True):
            if process.returncode:
                sys.exit(f"{log.read_text()[-2000:]}\npip failed with exit code {process.returncode}.")
    print(f"{count} packages are installed.", flush=True)


if __name__ == "__main__":
    main()
