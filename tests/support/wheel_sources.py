"""Python files out of the wheels of a package index, without installing or downloading whole wheels.

pip can read parts of a remote wheel (`--use-feature=fast-deps`). It uses the index, proxies and certificates of its own
configuration. The files are kept in the cache of art_nb, which you can move with `ART_NB_CACHE`.
"""

import json
import subprocess
import sys
import zipfile

import pytest

READ_S = 60  # timeout of reading from one wheel
PIP_OPTIONS = [
    "--quiet",
    "--retries=1",
    "--timeout=15",
    "--no-deps",
    "--only-binary=:all:",
    "--platform=manylinux_2_28_x86_64",
    "--python-version=3.12",
    "--dest=.",
]


def sources(package: str, version: str, paths: tuple[str, ...]) -> dict[str, str]:
    """Return the text of the files that a wheel contains, by path. Skip the test if no index has the wheel.

    The key "" has the names of all files of the wheel, one per line.
    """
    from art_nb.models.weights import cache_directory

    folder = cache_directory() / "rehearsal" / f"{package}-{version}"
    index = folder / "files.json"
    known = json.loads(index.read_text()) if index.exists() else {}
    if not {"", *paths} <= known.keys():
        command = [sys.executable, __file__, package, version, *paths]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=READ_S, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"reading {package} {version} took more than {READ_S} seconds")
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            pytest.skip(f"{package} {version} cannot be read from a package index: {lines[-1][:200]}")
        known |= json.loads(done.stdout)
        folder.mkdir(parents=True, exist_ok=True)
        part = index.with_suffix(".part")
        part.write_text(json.dumps(known))
        part.replace(index)
    return {path: known[path] for path in ("", *paths) if known[path] is not None}


def read_wheel(package: str, version: str, paths: list[str]) -> dict[str, str | None]:
    """Return the files of a wheel with pip's own functions, which are private."""
    from pip._internal.cli.cmdoptions import make_target_python
    from pip._internal.commands import create_command
    from pip._internal.network.lazy_wheel import LazyZipOverHTTP
    from pip._vendor.packaging.specifiers import SpecifierSet

    command = create_command("download")
    options, _ = command.parse_args(PIP_OPTIONS)
    with command.main_context():
        session = command.get_default_session(options)
        target = make_target_python(options)
        finder = command._build_package_finder(options, session, target_python=target, ignore_requires_python=True)
        found = finder.find_best_candidate(package, SpecifierSet(f"=={version}")).best_candidate
        if found is None:
            raise SystemExit("the index has no such wheel, or cannot be reached")
        with LazyZipOverHTTP(found.link.url_without_fragment, session) as remote, zipfile.ZipFile(remote) as wheel:
            names = wheel.namelist()
            texts = {path: wheel.read(path).decode() if path in names else None for path in paths}
    return texts | {"": "\n".join(names)}


if __name__ == "__main__":
    print(json.dumps(read_wheel(sys.argv[1], sys.argv[2], sys.argv[3:])))
