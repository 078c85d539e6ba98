"""What every test shares: no hub, one thread, and two real models."""
import os

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")      # tiny models: a second thread only waits

from pathlib import Path

import pytest
from ui import bridge, browser, lab, lab_server, page_with  # noqa: F401


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> Path:
    """A random Llama (2 layers, hidden 64, 4 heads, 2 key-value heads, fp32) with a byte-level ChatML tokenizer."""
    from tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The embedded SmolLM2-135M-Instruct, fetched once a machine."""
    from art_nb.weights import fetch

    return fetch("smollm2-135m")
