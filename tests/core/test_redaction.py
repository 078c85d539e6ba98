"""What is redacted, and what must stay as it is."""

import time

import pytest

from art_nb.core.redaction import REDACTED, redact, redact_text, redact_url, secrets_in
from art_nb.runs.store import RunStore


@pytest.mark.parametrize(
    "name",
    [
        "sketch-writer-135m",
        "/data/sky-models-llama-7b-instruct-v2",
        "hf-internal-testing/tiny-random-llama-2-layers",
        "skip_special_tokens_123456789012",
        "rk4-integrator-step-000012345",
        "pkg-resources-2024-compatibility-1",
    ],
)
def test_names_are_not_taken_for_keys(name):
    assert redact_text(name) == name
    assert redact({"name": name}) == {"name": name}


@pytest.mark.parametrize(
    "key",
    [
        "sk-proj-4f9a8b7c6d5e4f3a2b1c",
        "hf_AbCdEf0123456789AbCdEf",
        "AKIA0123456789ABCDEF",
        "ghp_0123456789abcdef0123",
        "xoxb-0123456789-abcdef",
    ],
)
def test_keys_are_redacted_in_any_text(key):
    assert redact_text(f"failed with {key}.").startswith(f"failed with {REDACTED}")


@pytest.mark.parametrize("part", ["a", "key", "sk-", "a-", "token "])
def test_long_texts_are_redacted_in_linear_time(part):
    start_s = time.process_time()
    redact_text(part * (20_000 // len(part)))
    assert time.process_time() - start_s < 1  # a quadratic pattern takes several seconds


def test_a_model_record_keeps_its_names(tmp_path):
    store = RunStore(tmp_path)
    names = {"name": "sk-learner-0123456789abcdef", "project": "p", "base_model": "/models/sk-abcdefgh0123456789"}
    store.write_model(names | {"config": {"api_key": "abc", "steps": 3}})
    assert store.read_model() == names | {"config": {"api_key": REDACTED, "steps": 3}}


def test_an_address_that_cannot_be_parsed_is_no_error():
    assert secrets_in({"url": "http://[bad/x"}) == []
    assert redact_text("http://[bad/x") == "http://[bad/x"


def test_the_fragment_of_an_address_is_kept_without_its_secrets():
    page = "See https://u:p@host.example/docs?a=1#section-2."
    assert redact_text(page) == "See https://host.example/docs?a=1#section-2."
    assert redact_url("https://host/callback#state=1&access_token=abc") == (
        "https://host/callback#state=1&access_token=[redacted]"
    )
    assert redact_url("https://host/docs?a=1#section-2", query=False) == "https://host/docs"
