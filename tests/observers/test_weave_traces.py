"""Runs in the storage of Weave, over OpenTelemetry."""

import json
from datetime import datetime

import httpx
import pytest
from support.observed_run import SECRET, START_S, overrule, write_run

import art_nb as art

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
PROJECT = "tests/observed"


@pytest.fixture(scope="module")
def weave_url(weave_server):
    return weave_server.url


@pytest.fixture(scope="module")
def exported(weave_url, tmp_path_factory):
    store = write_run(tmp_path_factory.mktemp("runs") / "weather-001")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", "0" * 40)
        patch.setenv("WANDB_ENTITY", "tests")
        for _ in range(2):
            report = art.export_traces(store, f"weave@{weave_url}")
        overrule(store)
        art.export_traces(store, f"weave@{weave_url}")
    assert (report.traces, report.spans, report.scores) == (4, 12, 4)
    return store


def calls_of(url):
    reply = httpx.post(f"{url}/calls/stream_query", json={"project_id": PROJECT}, timeout=60)
    return [json.loads(line) for line in reply.text.splitlines()]


def test_calls_are_there_once_with_inputs_outputs_and_usage(weave_url, exported):
    calls = calls_of(weave_url)
    assert len(calls) == len({call["id"] for call in calls}) == 12
    text = json.dumps(calls, ensure_ascii=False)
    assert "It is 18 °C in Rome." in text and SECRET not in text and "token_ids" not in text
    chat = [call for call in calls if "chat" in call["op_name"]]
    usage = [next(iter(call["summary"]["usage"].values())) for call in chat]
    assert sorted((u["input_tokens"], u["output_tokens"]) for u in usage) == [(40, 12), (40, 12), (70, 9), (70, 9)]
    assert min(datetime.fromisoformat(call["started_at"]).timestamp() for call in calls) <= START_S + 60


def test_a_person_replaces_the_feedback_of_the_judge(weave_url, exported):
    query = {"$expr": {"$eq": [{"$getField": "feedback_type"}, {"$literal": "art.judgment"}]}}
    body = {"project_id": PROJECT, "query": query}
    rows = httpx.post(f"{weave_url}/feedback/query", json=body, timeout=60).json()["result"]
    payloads = {row["weave_ref"].rpartition("/")[2]: row["payload"] for row in rows}
    assert len(rows) == len(payloads) == 2
    person = next(payload for payload in payloads.values() if payload["kind"] == "HUMAN")
    assert (person["value"], person["explanation"], person["judge"]) == (0.75, "The answer is right.", "Ada")
    assert person["judge_score"] == 0.0
