"""Remove widget state from the notebooks, because GitHub cannot show a notebook that has it. Static outputs stay."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDGET = "application/vnd.jupyter.widget-view+json"


def clean(notebook: dict) -> dict:
    """Return the notebook without widget state."""
    notebook["metadata"].pop("widgets", None)
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if output.get("data", {}).pop(WIDGET, None) and output["data"].keys() == {"text/plain"}:
                output["data"] = {}  # a widget without a static form, such as a progress bar
            output.get("metadata", {}).pop("art_nb", None)  # ID of the live panel of this output
        if "outputs" in cell:
            cell["outputs"] = [output for output in cell["outputs"] if output.get("data", True)]
    return notebook


if __name__ == "__main__":
    for path in [path for folder in ("nbs", "examples") for path in (ROOT / folder).rglob("*.ipynb")]:
        before = path.read_text(encoding="utf-8")
        after = json.dumps(clean(json.loads(before)), indent=1, ensure_ascii=False) + "\n"
        if after != before and ".ipynb_checkpoints" not in path.parts:
            path.write_text(after, encoding="utf-8")
            print(f"cleaned {path.relative_to(ROOT)}")
