"""ART's cells of 2048 with `weave.init`: what Weave's own client sends, and what its own storage server has then."""

import collections
import json
import os
import subprocess
import sys
import time

import httpx
import pytest
from support.observed_run import ROOT, server, wait_until
from support.weave_wire import PROJECT, Wire

pytest.importorskip("gql", reason="make test-observers installs weave")  # not weave itself, which changes the process
pytestmark = pytest.mark.timeout(600)


def has_warned(result, log):
    return result.exists() and "Training continues" in log.read_text()


def run_cells(wire, folder, n_rollouts, opening, *options):
    """Run the program, and return its result and what it printed."""
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "examples" / "2048"))),
        "WANDB_API_KEY": "0" * 40,
        "WANDB_ENTITY": "tests",
        "WANDB_BASE_URL": wire.url,
        "WF_TRACE_SERVER_URL": wire.url,
        "WANDB_ERROR_REPORTING": "false",
        "WEAVE_USE_SERVER_CACHE": "false",
        "WEAVE_PRINT_CALL_LINK": "false",
        "WEAVE_RETRY_MAX_ATTEMPTS": "1",
    }
    command = [sys.executable, ROOT / "tests/support/weave_cells.py", folder / "result.json", n_rollouts, opening]
    command += options
    log, result = folder / "log.txt", folder / "result.json"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*map(str, command)], env=os.environ | variables, cwd=folder, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: process.poll() is not None or ("fails" in options and has_warned(result, log)), 500)
        time.sleep(10 if "fails" in options else 0)  # in which there might be further warnings
    finally:
        process.kill()  # without its server, Weave does not let the process end for minutes
        process.wait()
    assert "fails" in options or process.returncode == 0, log.read_text()[-3000:]
    return json.loads(result.read_text()), log.read_text()


def name_of(call):
    return call["op_name"].rpartition("/")[2].partition(":")[0]


def check_trees(calls, rows):
    """One tree for each rollout, with our token counts and the attributes of the rollout."""
    trees = collections.defaultdict(list)
    for call in calls:
        trees[call["trace_id"]].append(call)
    by_call = {row["call"]: row for row in rows}
    roots = [call for call in calls if call["parent_id"] is None and name_of(call) == "rollout"]
    assert {root["id"] for root in roots} == by_call.keys() and len(roots) == len(rows)
    for root in roots:
        row, (child,) = by_call[root["id"]], [call for call in trees[root["trace_id"]] if call is not root]
        assert name_of(child) == "chat" and child["parent_id"] == root["id"]
        (usage,) = root["summary"]["usage"].values()
        counts = {"requests": row["turns"]} | {name: row[name] for name in ("prompt_tokens", "completion_tokens")}
        assert {name: usage[name] for name in counts} == counts
        art = root["attributes"]["art"]
        assert (art["rollout"], art["group"]) == (row["rollout"], row["group"]) and art["step"] in (1, 2)
        messages = child["inputs"]["messages"]
        assert len(messages) == 2 * row["turns"] and messages[1]["content"] == row["text"]
        assert row["url"].endswith(f"/call/{root['id']}")
    return roots


def check_feedback(feedback, rows):
    """The rewards, and the judgments of step 2 with their explanations."""
    found = {(each["weave_ref"].rpartition("/")[2], each["feedback_type"]): each["payload"] for each in feedback}
    assert len(found) == len(feedback)
    rewards = {call: payload["value"] for (call, kind), payload in found.items() if kind == "art.reward"}
    assert rewards == {row["call"]: row["reward"] for row in rows}
    judged = {call: payload["explanation"] for (call, kind), payload in found.items() if kind == "art.judgment"}
    assert judged == {row["call"]: row["explanation"] for row in rows if row["explanation"]} and judged


def check_evaluation(calls, rows):
    """Step 2 is an evaluation with a line for each rollout."""
    (evaluation,) = [call for call in calls if name_of(call) == "Evaluation.evaluate"]
    lines = [call["output"] for call in calls if name_of(call) == "Evaluation.predict_and_score"]
    judged = [row for row in rows if row["explanation"]]
    assert {line["output"]["call"] for line in lines} == {row["url"] for row in judged}
    assert sorted(line["scores"]["judgment"] for line in lines) == sorted(row["reward"] for row in judged)
    assert evaluation["attributes"]["art"] == {"model": "agent-001", "step": 2}


def check_responses(calls):
    """Only the request outside of the rollouts is a call. Its reply has its text."""
    (call,) = [call for call in calls if "responses" in name_of(call)]
    assert call["parent_id"] is None and call["output"]["output"][0]["content"][0]["text"]


def check_content(text, key):
    for word in ("prompt_token_ids", "token_ids", '"logprobs"', '"art_nb": {', '"art_nb":{', key):
        assert word not in text


def test_the_client_of_weave_sends_one_small_tree_for_each_rollout(tmp_path):
    with Wire() as wire:
        result, _ = run_cells(wire, tmp_path, 20, opening=40)
        calls, rows = wire.calls(), result["rows"]
        check_trees(calls, rows)
        check_feedback(wire.feedback(), rows)
        check_evaluation(calls, rows)
        check_responses(calls)
        check_content(b"".join(body for _, body in wire.requests).decode(errors="replace"), result["key"])
        print(f"{wire.n_bytes()} bytes for {len(rows)} rollouts")
        assert wire.n_bytes() < 10_000 * len(rows)


@pytest.mark.full
def test_a_server_that_fails_does_not_end_the_run(tmp_path):
    with Wire() as wire:
        wire.fails_after = 12
        result, printed = run_cells(wire, tmp_path, 8, 42, "fails")
    assert len(result["rows"]) == 8 and len(wire.requests) > 12
    assert printed.count("Training continues") == 1
    marks = ("Error sending", "Task failed", "retry_failed", "Traceback")
    others = [line for line in printed.splitlines() if "Training continues" not in line]
    assert [line for line in others if any(mark in line for mark in marks)] == []


@pytest.mark.full
def test_weaves_own_storage_has_the_same(tmp_path):
    database = tmp_path / "weave.db"
    command = ["python", ROOT / "tests" / "support" / "weave_server.py", database, "PORT"]
    with server("weave-server", command, {}, "/server_info") as url, Wire(url) as wire:
        result, _ = run_cells(wire, tmp_path, 100, opening=25)
        reply = httpx.post(f"{url}/calls/stream_query", json={"project_id": PROJECT}, timeout=60)
        calls, rows = [json.loads(line) for line in reply.text.splitlines()], result["rows"]
        check_trees(calls, rows)
        feedback = httpx.post(f"{url}/feedback/query", json={"project_id": PROJECT}, timeout=60).json()["result"]
        check_feedback(feedback, rows)
        check_evaluation(calls, rows)
        check_content(reply.text, result["key"])
        stored = database.stat().st_size + sum(path.stat().st_size for path in tmp_path.glob("weave.db-*"))
        print(f"{wire.n_bytes()} bytes sent, {stored} bytes stored for {len(rows)} rollouts")
        assert len(rows) == 100 and wire.n_bytes() < 1_000_000
