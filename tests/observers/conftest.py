"""Traces are on in these tests, whatever the tests of agents have set."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def tracing_on():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OTEL_SDK_DISABLED", raising=False)
        yield
