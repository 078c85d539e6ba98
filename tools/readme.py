"""Write README.md from nbs/index.ipynb; with --check, only report whether it is current."""

import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]
DIRECTIVE = re.compile(r"^#\|.*\n?", re.MULTILINE)
HIDE = re.compile(r"^#\| *hide", re.MULTILINE)


def outputs(cell) -> list[str]:
    """Return the outputs of a cell as plain text."""
    texts = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.get("outputs", [])]
    return [f"```\n{text.rstrip()}\n```" for text in texts if text.strip()]


def blocks(cell) -> list[str]:
    """Return a cell as Markdown: its text, or its code and outputs."""
    if cell.cell_type == "markdown":
        text = DIRECTIVE.sub("", cell.source).strip()
        return [text.replace("](../", "](")]  # links relative to the root of the repository
    if cell.cell_type != "code" or HIDE.search(cell.source):
        return []
    code = DIRECTIVE.sub("", cell.source).strip()
    return [f"```python\n{code}\n```", *outputs(cell)] if code else []


def readme(notebook: Path) -> str:
    """Return the README for a notebook."""
    cells = nbformat.read(notebook, as_version=4).cells
    return "\n\n".join(block for cell in cells for block in blocks(cell)) + "\n"


def main(arguments: list[str]) -> int:
    """Write the file, or with --check compare it."""
    text, target = readme(ROOT / "nbs" / "index.ipynb"), ROOT / "README.md"
    if "--check" in arguments:
        return int(target.read_text(encoding="utf-8") != text)
    target.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
