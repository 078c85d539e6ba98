"""Traces are on in these tests, whatever the tests of agents have set."""

import pytest


@pytest.fixture(autouse=True)
def tracing_on(monkeypatch):
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)
