"""Runs in a real Arize Phoenix server."""

import json
from datetime import datetime

import httpx
import pytest
from support.observed_run import SECRET, START_S, overrule, wait_until, write_run

import art_nb as art

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def phoenix(phoenix_server):
    return phoenix_server.url


@pytest.fixture(scope="module")
def exported(phoenix, tmp_path_factory):
    store = write_run(tmp_path_factory.mktemp("runs") / "weather-001")
    report = art.export_traces(store, f"phoenix@{phoenix}")
    assert (report.traces, report.spans, report.scores) == (4, 12, 4)
    wait_until(lambda: len(spans_of(phoenix)) == 12)
    return store


def spans_of(url):
    """The spans of the project, none while Phoenix has not created it (status 404, plain text)."""
    reply = httpx.get(f"{url}/v1/projects/observed/spans", params={"limit": 1000}, timeout=30)
    return [] if reply.status_code == 404 else reply.raise_for_status().json()["data"]


def scores_of(url):
    """The annotations of the first rollout by name."""
    root = next(span for span in spans_of(url) if span["attributes"].get("art.rollout") == "r1-0-0")
    ids = {"span_ids": root["context"]["span_id"]}
    reply = httpx.get(f"{url}/v1/projects/observed/span_annotations", params=ids, timeout=30).json()
    return {each["name"]: each for each in reply.get("data", [])}


def trace(url, rollout="r1-0-0"):
    """The spans of a rollout by name, those with the same name in order."""
    spans = spans_of(url)
    root = next(span for span in spans if span["attributes"].get("art.rollout") == rollout)
    own = [span for span in spans if span["context"]["trace_id"] == root["context"]["trace_id"]]
    return root, sorted(own, key=lambda span: (span["start_time"], span["name"]))


def test_kinds_and_tree(phoenix, exported):
    root, spans = trace(phoenix)
    assert [(s["name"], s["span_kind"]) for s in spans if s is not root] == [
        ("chat weather-001", "LLM"),
        ("execute_tool weather", "TOOL"),
        ("chat weather-001", "LLM"),
        ("evaluate gpt-4.1", "EVALUATOR"),
    ]
    assert {s["parent_id"] for s in spans if s is not root} == {root["context"]["span_id"]}
    assert root["span_kind"] == "AGENT" and root["parent_id"] is None


def test_messages_tools_and_tokens(phoenix, exported):
    first, last = (s["attributes"] for s in trace(phoenix)[1] if s["name"].startswith("chat"))
    assert first["llm.input_messages.0.message.content"] == "You know the weather."
    assert first["llm.input_messages.1.message.content"] == "How warm is it in Rome? My key is [redacted]."
    name = "llm.output_messages.0.message.tool_calls.0.tool_call.function"
    assert first[f"{name}.name"] == "weather"
    assert json.loads(first[f"{name}.arguments"]) == {"city": "Rome", "password": "[redacted]"}
    assert json.loads(first["llm.tools.0.tool.json_schema"])["function"]["name"] == "weather"
    assert (first["llm.token_count.prompt"], first["llm.token_count.completion"]) == (40, 12)
    assert (last["llm.token_count.prompt"], last["llm.token_count.completion"]) == (70, 9)
    assert last["llm.output_messages.0.message.content"] == "It is 18 °C in Rome."
    tool = next(s["attributes"] for s in trace(phoenix)[1] if s["span_kind"] == "TOOL")
    assert json.loads(tool["gen_ai.tool.call.result"]) == {"celsius": 18}


def test_times_reward_and_step(phoenix, exported):
    root, _ = trace(phoenix)
    times = [datetime.fromisoformat(root[name]).timestamp() - START_S - 60 for name in ("start_time", "end_time")]
    assert times == [0.0, 4.0]
    assert root["attributes"]["art.reward"] == 0.0 and root["attributes"]["art.group_id"] == "group-1-0"
    step = next(s for s in spans_of(phoenix) if s["name"] == "training_step 1")
    assert step["attributes"]["art.metric.loss/train"] == 0.25


def test_a_failed_rollout_is_an_error(phoenix, exported):
    (failed,) = [s for s in spans_of(phoenix) if s["status_code"] == "ERROR"]
    assert failed["status_message"] == "too slow" and failed["attributes"]["error.type"] == "TimeoutError"


def test_no_secrets_and_no_token_arrays(phoenix, exported):
    text = json.dumps(spans_of(phoenix))
    assert SECRET not in text and "token_ids" not in text and "logprobs" not in text


def test_a_second_export_and_an_override_change_the_scores_in_place(phoenix, exported):
    wait_until(lambda: len(scores_of(phoenix)) == 2)
    before = scores_of(phoenix)
    assert before["judgment"]["result"] == {"label": None, "score": 0.0, "explanation": "Rollout 0 is short."}
    assert (before["judgment"]["annotator_kind"], before["judgment"]["metadata"]["source"]) == ("LLM", "gpt-4.1")
    overrule(exported)
    art.export_traces(exported, f"phoenix@{phoenix}")
    wait_until(lambda: scores_of(phoenix)["judgment"]["result"]["score"] == 0.75)
    after = scores_of(phoenix)
    assert after.keys() == {"reward", "judgment"} and after["judgment"]["id"] == before["judgment"]["id"]
    assert after["judgment"]["annotator_kind"] == "HUMAN"
    assert after["judgment"]["result"]["explanation"] == "The answer is right."
    assert after["judgment"]["metadata"]["judge_score"] == 0.0
    assert len(spans_of(phoenix)) == 12
