"""The tutorial of MCP, shortened, as a user runs it."""

import shutil

import pytest
from support.jupyter_kernels import run_notebook, shorten_tutorial

pytest.importorskip("mcp_server_time", reason="make test-agents installs the server")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_runs_from_top_to_bottom(root, tmp_path, smollm2_dir, monkeypatch):
    monkeypatch.setenv("EXAMPLE_STEPS", "1")
    folder = shutil.copytree(root / "examples" / "mcp", tmp_path / "mcp", ignore=shutil.ignore_patterns(".art"))
    run_notebook(shorten_tutorial(folder / "mcp.ipynb"), folder)
    assert (folder / ".art" / "mcp" / "models" / "caller-001" / "checkpoints" / "0001").is_dir()
