"""Settings of the Jupyter server that `make lab` starts: opening a committed notebook does not change it."""

import json
import logging
import warnings
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


# Jupyter sets this hook again for each extension that it loads, and warns each time.
warnings.filterwarnings("ignore", r"Overriding existing pre_save_hook \(keep_kernel_metadata\)")
# jupyter_server's timeout is in milliseconds, and Tornado takes it for seconds. The warning has no consequences:
# https://github.com/jupyter-server/jupyter_server/issues/1612
logging.getLogger("tornado.general").addFilter(lambda record: "websocket_ping_timeout" not in record.getMessage())

c.ContentsManager.pre_save_hook = keep_kernel_metadata  # noqa: F821 (Jupyter defines c)
