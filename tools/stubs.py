"""Write the stub of every package, so that editors know the names that are loaded at their first use.

`python tools/stubs.py` writes them, `python tools/stubs.py --check` compares them.
"""

import ast
import sys
from pathlib import Path

import art_nb
from art_nb.compat.import_paths import ART_PATHS

ROOT = Path(__file__).parents[1] / "art_nb"
HEAD = "# Written by tools/stubs.py. Do not edit.\n"


def lazy_names(package: Path) -> dict[str, list[str]]:
    """Return the names of a package by module, as its `__init__.py` passes them to `lazy_loader.attach`."""
    for node in ast.walk(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "submod_attrs":
            return ast.literal_eval(node.value)
    return {}


def imports(names: dict[str, list[str]]) -> str:
    """Return one import per name. `X as X` marks a name as public in a stub."""
    return "".join(f"from .{module} import {name} as {name}\n" for module in names for name in sorted(names[module]))


def stubs() -> dict[Path, str]:
    """Return the text of every stub by its path."""
    names = {module: listed.split() for module, listed in art_nb._NAMES.items()}
    packages = "".join(f"from . import {package} as {package}\n" for package in art_nb._PACKAGES)
    constants = "SPINNING: dict[str, str]\n__version__: str\n__all__: list[str]\n"
    modules = ("environments", "langgraph", "trl")  # import paths whose names are in other modules
    aliases = "".join(f"from . import {name} as {name}\n" for name in modules) + "from .compat import dev as dev\n"
    top = f"{packages}{aliases}{imports(names)}\n{constants}"
    texts = {package: imports(lazy_names(ROOT / package)) for package in art_nb._PACKAGES}
    paths = {
        ROOT / f"{name}.pyi": HEAD + imports({module: listed.split() for module, listed in ART_PATHS[name].items()})
        for name in modules
    }
    packages = {ROOT / package / "__init__.pyi": HEAD + text for package, text in texts.items() if text}
    return {ROOT / "__init__.pyi": HEAD + top} | paths | packages


def main(check: bool) -> int:
    expected = stubs()
    found = {path: path.read_text(encoding="utf-8") for path in ROOT.rglob("*.pyi")}
    stale = sorted(str(path) for path in expected.keys() | found.keys() if expected.get(path) != found.get(path))
    if not check:
        for path in found.keys() - expected.keys():
            path.unlink()
        for path, text in expected.items():
            path.write_text(text, encoding="utf-8")
    elif stale:
        print("run `make export`; these stubs differ from the packages:", *stale)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
