"""The scripted judge of these tests."""

import threading

import pytest
from support.scripted_judge import Served

from art_nb.rewards import llm_judges


@pytest.fixture
def judge():
    """A chat API whose answers a test scripts."""
    server = Served()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    llm_judges._REFUSES_SCHEMA.clear()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
