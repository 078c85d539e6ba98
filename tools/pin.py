"""Write the hashes of all pinned packages: `python tools/pin.py [PACKAGE ...]`.

This needs uv (in the dev extra).
Versions do not change, except those of the packages that you name. The hashes cover the files of every platform for
Python 3.11 and newer. The Makefile selects torch, so torch and its CUDA packages are not listed.
"""

import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = [
    sys.executable,
    "-m",
    "uv",
    "pip",
    "compile",
    "-q",
    "--no-config",
    "--default-index",
    "https://pypi.org/simple",
    "--universal",
    "--python-version",
    "3.11",
    "--generate-hashes",
    "--no-annotate",
    "--no-header",
]
CHOSEN_ELSEWHERE = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
ENTRY = re.compile(r"^([A-Za-z0-9][\w.-]*)==(?:.*\\\n)*.*\n", re.MULTILINE)


def compile_pins(requirements, *options):
    """Return the lines that uv writes for `requirements`, with hashes."""
    command = [*UV, "-", *options]
    return subprocess.run(command, input="\n".join(requirements), capture_output=True, text=True, check=True).stdout


def comments(path):
    """Return the comment lines at the head of a file."""
    return "".join(re.findall(r"^#.*\n", path.read_text(), re.MULTILINE))


def pins(path, released=()):
    """Return the requirements of a file without their hashes and without the packages in `released`."""
    lines = re.findall(r"^[A-Za-z0-9][^\\\n]*", path.read_text(), re.MULTILINE)
    return [line.strip() for line in lines if re.split("[=; ]", line)[0].lower() not in released]


def pin_ours(released):
    """Write constraints.txt: what the local and dev extras need."""
    settings = ConfigParser(delimiters=["="])
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    facts, path = settings["DEFAULT"], ROOT / "constraints.txt"
    kept_versions = path.with_suffix(".in")
    kept_versions.write_text("\n".join(pins(path, released)))
    names = ("requirements", "local_requirements", "dev_requirements")
    try:
        requirements = [name_and_version for name in names for name_and_version in facts[name].split()]
        compiled = compile_pins(requirements, "--constraints", str(kept_versions))
    finally:
        kept_versions.unlink()
    entries = [match[0] for match in ENTRY.finditer(compiled) if not CHOSEN_ELSEWHERE.fullmatch(match[1])]
    path.write_text(comments(path) + "".join(entries))


def pin_others():
    """Write the hashes of the files of the peers and of the documentation, whose versions are edited by hand."""
    for path in (*sorted((ROOT / "benchmarks" / "peers").rglob("*.txt")), ROOT / "docs" / "site" / "requirements.txt"):
        path.write_text(comments(path) + compile_pins(pins(path), "--no-deps"))


if __name__ == "__main__":
    pin_ours({name.lower() for name in sys.argv[1:]})
    pin_others()
