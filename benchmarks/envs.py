"""A virtual environment per peer, created once and kept in the user's cache."""

import shutil
import subprocess
import sys
from pathlib import Path

from talk import HERE, Failed

from art_nb.models.weights import cache_directory

VERSIONS = {"trl": "1.16.0", "vllm": "0.32.0", "art": "0.5.18"}
TORCH = "torch==2.13.0"
CACHE = cache_directory() / "bench"


def python_of(peer: str) -> Path:
    """Return the interpreter of a peer's environment, which is created if necessary. Raise `Failed` if this fails."""
    directory, requirements = CACHE / f"{peer}-{VERSIONS[peer]}", HERE / "peers" / f"{peer}.txt"
    stamp, python = directory / "installed.txt", directory / "bin" / "python"
    if stamp.exists() and stamp.read_text() == requirements.read_text():
        return python
    print(
        f"Creating the environment of {peer} {VERSIONS[peer]} in {directory}. This takes some minutes.",
        file=sys.stderr,
        flush=True,
    )
    shutil.rmtree(directory, ignore_errors=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(directory)],
        [*pip, TORCH],
        [*pip, "--require-hashes", "--no-deps", "-r", str(requirements)],
    ):
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            last = " | ".join(process.stderr.splitlines()[-2:])[-400:]
            raise Failed(f"Could not create the environment of {peer}: {last}")
    shutil.copy(requirements, stamp)
    return python
