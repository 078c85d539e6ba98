"""Runs in a real MLflow server."""

import json
from datetime import datetime

import httpx
import pytest
from support.observed_run import SECRET, START_S, overrule, write_run

import art_nb as art

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def mlflow(mlflow_server):
    return mlflow_server.url


@pytest.fixture(scope="module")
def exported(mlflow, tmp_path_factory):
    store = write_run(tmp_path_factory.mktemp("runs") / "weather-001")
    report = art.export_traces(store, f"mlflow@{mlflow}", timeout_s=120)
    assert (report.traces, report.spans, report.scores) == (4, 12, 4)
    return store


def traces_of(url):
    experiment = httpx.get(
        f"{url}/api/2.0/mlflow/experiments/get-by-name", params={"experiment_name": "observed"}, timeout=30
    ).json()["experiment"]["experiment_id"]
    place = {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": experiment}}
    body = {"locations": [place], "max_results": 100}
    return httpx.post(f"{url}/api/3.0/mlflow/traces/search", json=body, timeout=60).json()["traces"]


def rollout(url, name="r1-0-0"):
    """The trace of a rollout."""
    return next(t for t in traces_of(url) if session(t).endswith(name))


def session(trace):
    """The conversation ID; the trace of a step has none."""
    return trace.get("trace_metadata", {}).get("mlflow.trace.session", "")


def spans_of(url, trace_id):
    reply = httpx.get(f"{url}/api/3.0/mlflow/traces/get", params={"trace_id": trace_id}, timeout=60).json()
    spans = reply["trace"]["spans"]
    for span in spans:
        span["attributes"] = {a["key"]: decoded(next(iter(a["value"].values()))) for a in span["attributes"]}
    return spans


def decoded(text):
    """A value that is JSON, or a text."""
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def test_traces_tokens_and_times(mlflow, exported):
    assert len(traces_of(mlflow)) == 4
    trace = rollout(mlflow)
    usage = json.loads(trace["trace_metadata"]["mlflow.trace.tokenUsage"])
    assert usage == {"input_tokens": 110, "output_tokens": 21, "total_tokens": 131}
    assert datetime.fromisoformat(trace["request_time"]).timestamp() == START_S + 60
    (failed,) = [t for t in traces_of(mlflow) if t["state"] == "ERROR"]
    assert "failed" in session(failed)


def test_span_types_messages_and_tools(mlflow, exported):
    spans = spans_of(mlflow, rollout(mlflow)["trace_id"])
    kinds = sorted((s["name"], s["attributes"]["mlflow.spanType"]) for s in spans)
    assert kinds == [
        ("chat weather-001", "CHAT_MODEL"),
        ("chat weather-001", "CHAT_MODEL"),
        ("evaluate gpt-4.1", "EVALUATOR"),
        ("execute_tool weather", "TOOL"),
        ("invoke_agent weather-001", "AGENT"),
    ]
    text = json.dumps(spans, ensure_ascii=False)
    assert "My key is [redacted]." in text and "It is 18 °C in Rome." in text and SECRET not in text
    assert "token_ids" not in text
    (tool,) = [s["attributes"] for s in spans if s["attributes"]["mlflow.spanType"] == "TOOL"]
    assert tool["gen_ai.tool.call.id"] == "call-r1-0-0"


def test_a_second_export_and_an_override(mlflow, exported):
    scores = {a["assessment_name"]: a for a in rollout(mlflow)["assessments"]}
    assert scores["judgment"]["feedback"] == {"value": 0.0}
    assert scores["judgment"]["source"] == {"source_type": "LLM_JUDGE", "source_id": "gpt-4.1"}
    assert scores["judgment"]["rationale"] == "Rollout 0 is short."
    overrule(exported)
    for _ in range(2):
        art.export_traces(exported, f"mlflow@{mlflow}", timeout_s=120)
    assert len(traces_of(mlflow)) == 4
    assessments = rollout(mlflow)["assessments"]
    (current,) = [a for a in assessments if a["assessment_name"] == "judgment" and a["valid"]]
    assert current["feedback"] == {"value": 0.75} and current["rationale"] == "The answer is right."
    assert current["source"] == {"source_type": "HUMAN", "source_id": "Ada"}
    assert current["overrides"] == scores["judgment"]["assessment_id"]
    assert len(assessments) == 3, "the judge's score stays as history, and the reward is there once"
    overrule(exported, score=0.5, reason="I looked again.")
    art.export_traces(exported, f"mlflow@{mlflow}", timeout_s=120)
    (updated,) = [a for a in rollout(mlflow)["assessments"] if a["assessment_name"] == "judgment" and a["valid"]]
    assert (updated["assessment_id"], updated["feedback"]) == (current["assessment_id"], {"value": 0.5})
