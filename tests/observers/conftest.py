"""Traces are on in these tests, whatever the tests of agents have set. The servers run once for all tests."""

import pytest
from support.trace_tools import tool_server

from art_nb.integrations import live_traces


@pytest.fixture(scope="module", autouse=True)
def tracing_on():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OTEL_SDK_DISABLED", raising=False)
        yield


@pytest.fixture
def impatient(monkeypatch):
    """Live exports try again soon."""
    monkeypatch.setattr(live_traces, "FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(live_traces, "MAX_PAUSE_S", 0.5)
    monkeypatch.setattr(live_traces, "JOURNAL_POLL_S", 0.2)


@pytest.fixture(scope="session")
def phoenix_server(tmp_path_factory):
    with tool_server("phoenix", tmp_path_factory.mktemp("phoenix")) as running:
        yield running


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory):
    with tool_server("mlflow", tmp_path_factory.mktemp("mlflow")) as running:
        yield running


@pytest.fixture(scope="session")
def weave_server(tmp_path_factory):
    with tool_server("weave", tmp_path_factory.mktemp("weave")) as running:
        yield running
