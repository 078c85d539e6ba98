"""Settings of the Jupyter server that `make lab` starts: opening a committed notebook does not change it."""

import json
from pathlib import Path
from typing import Any


def keep_kernel_metadata(model: dict[str, Any], path: str, contents_manager: Any, **_: Any) -> None:
    """Before a save: keep the kernel's metadata of a clean notebook.

    JupyterLab writes the kernel's display name and its `language_info` into each notebook that it opens. `make export`
    removes them (nbdev-clean), so git would report a change after a notebook was only opened.
    """
    file = Path(contents_manager.root_dir, path.strip("/"))
    if model["type"] != "notebook" or not file.is_file():
        return
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))["metadata"]
    except (ValueError, KeyError, TypeError):
        return  # a damaged file, which this save replaces
    if isinstance(saved, dict) and "kernelspec" in saved and "language_info" not in saved:
        model["content"]["metadata"].pop("language_info", None)
        if model["content"]["metadata"].get("kernelspec", {}).get("name") == saved["kernelspec"].get("name"):
            model["content"]["metadata"]["kernelspec"] = saved["kernelspec"]


c.ContentsManager.pre_save_hook = keep_kernel_metadata  # noqa: F821 (Jupyter defines c)
