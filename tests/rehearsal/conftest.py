"""The rehearsal of the GPU path runs in a process of its own, with a fake GPU: `make rehearse`."""

import sys
from importlib import import_module

import pytest
from support import fake_gpu
from support.engine_stubs import UNSLOTH, UNSLOTH_ZOO, VLLM, forget_modules, write_package

fake_gpu.install()  # before any test imports art_nb
for module, devices in (("policy.kernels", "FLASH_DEVICES"), ("learners.unsloth", "FAST_DEVICES")):
    getattr(import_module(f"art_nb.{module}"), devices).add(fake_gpu.NAME)

TABLES: dict[str, list[str]] = {}


@pytest.fixture
def report():
    """A function that adds a line to a table, which is printed at the end."""
    return lambda table, line: TABLES.setdefault(table, []).append(line)


@pytest.fixture
def vllm_stub(tmp_path, monkeypatch):
    """Make the stub of vLLM importable."""
    site = tmp_path / "site"
    site.mkdir()
    forget_modules(monkeypatch, "vllm")
    monkeypatch.syspath_prepend(site)
    write_package(site, "vllm", "0.32.0", VLLM, ("torch>=2",))
    yield
    for name in [m for m in sys.modules if m.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture
def unsloth_stub(vllm_stub, tmp_path, monkeypatch):
    """Make the stubs of Unsloth, vLLM and its plugin for weights in 4 bits importable, on the fake device."""
    forget_modules(monkeypatch, "unsloth", "unsloth_zoo", "vllm_bnb_plugin")
    site = tmp_path / "site"
    write_package(site, "unsloth", "2026.10.9", {"unsloth/__init__.py": UNSLOTH})
    write_package(site, "unsloth-zoo", "2026.10.9", {"unsloth_zoo/vllm_utils.py": UNSLOTH_ZOO})
    write_package(site, "vllm-bnb-plugin", "0.0.3", {"vllm_bnb_plugin/__init__.py": ""})
    import unsloth
    import vllm

    unsloth.DEVICE = vllm.DEVICE = fake_gpu.NAME
    yield unsloth
    for name in [m for m in sys.modules if m.partition(".")[0] in ("unsloth", "unsloth_zoo")]:
        del sys.modules[name]


def pytest_collection_finish(session):
    """Start what waits for the network, so that other tests run in the meantime."""
    if not session.config.option.collectonly:
        for module in {item.module for item in session.items}:
            getattr(module, "start_early", lambda: None)()


def pytest_terminal_summary(terminalreporter):
    """Print the measured numbers."""
    for table, lines in TABLES.items():
        terminalreporter.section(table)
        for line in lines:
            terminalreporter.write_line(line)
