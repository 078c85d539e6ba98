"""What every test shares: no hub, one thread, and two real models."""
import os

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")      # tiny models: a second thread only waits

from pathlib import Path

import pytest
from ui import bridge, browser, lab, lab_server, page_with  # noqa: F401

if sampler := os.environ.get("ART_NB_TEST_SAMPLER"):        # `make test-vllm` runs these tests over vLLM
    from art_nb import LocalBackend

    LocalBackend.__init__.__kwdefaults__["sampler"] = sampler


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> Path:
    """A random Llama (2 layers, hidden 64, 2 heads, 1 key-value head, fp32) with a byte-level ChatML tokenizer."""
    from tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The embedded SmolLM2-135M-Instruct, fetched once a machine."""
    from art_nb.weights import fetch

    return fetch("smollm2-135m")
