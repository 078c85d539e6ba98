"""Runs in real servers, live and replayed: equal to the run directory field by field, and complete after failures."""

import asyncio
import json
import re
import time
import warnings

import httpx
import pytest
from support.live_parts import say
from support.observed_run import SECRET, overrule, wait_until, write_group
from support.registered import until
from support.trace_tools import Proxy

import art_nb as art
from art_nb.rewards.journal import Journal
from art_nb.rewards.judges import group_id

pytestmark = pytest.mark.timeout(900)
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
TOOLS = ["phoenix", *(pytest.param(tool, marks=pytest.mark.full) for tool in ("mlflow", "weave"))]


@pytest.fixture(params=TOOLS)
def running(request, monkeypatch, tmp_path):
    """The server of a tool."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_ENTITY", "tests")
    monkeypatch.chdir(tmp_path)
    return request.getfixturevalue(f"{request.param}_server")


# What the servers have: for each rollout its turns, tool calls and scores


def in_phoenix(url, project):
    spans, after = [], {}
    while after is not None:
        reply = httpx.get(f"{url}/v1/projects/{project}/spans", params={"limit": 1000, **after}, timeout=30)
        if reply.status_code == 404:  # Phoenix has not created the project yet
            return {}
        data = reply.raise_for_status().json()
        spans += data["data"]
        after = {"cursor": data["next_cursor"]} if data.get("next_cursor") else None
    roots = [span["context"]["span_id"] for span in spans if span["parent_id"] is None]
    if not roots:
        return {}
    path = f"{url}/v1/projects/{project}/span_annotations"
    reply = httpx.get(path, params={"span_ids": roots, "limit": 1000}, timeout=30)
    scores = {}
    for each in reply.raise_for_status().json()["data"]:
        result = each["result"]
        score = result["score"], result["explanation"] or "", each["metadata"]["source"], each["annotator_kind"]
        scores.setdefault(each["span_id"], {})[each["name"]] = score
    records = [
        (
            span["context"]["trace_id"],
            span["context"]["span_id"],
            span["start_time"],
            {name: from_json(value) for name, value in span["attributes"].items()},
        )
        for span in spans
    ]
    return by_rollout(records, scores)


def in_mlflow(url, project):
    place = f"{url}/api/2.0/mlflow/experiments/get-by-name"
    reply = httpx.get(place, params={"experiment_name": project}, timeout=60).json()
    if "experiment" not in reply:
        return {}
    place = {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": reply["experiment"]["experiment_id"]}}
    body = {"locations": [place], "max_results": 500}
    traces = httpx.post(f"{url}/api/3.0/mlflow/traces/search", json=body, timeout=60).json().get("traces", [])
    records, scores = [], {}
    for info in traces:
        reply = httpx.get(f"{url}/api/3.0/mlflow/traces/get", params={"trace_id": info["trace_id"]}, timeout=60).json()
        for span in reply["trace"]["spans"]:
            attributes = {each["key"]: from_json(from_otlp(each["value"])) for each in span["attributes"]}
            records.append((span["trace_id"], span["span_id"], span["start_time_unix_nano"], attributes))
            if not span.get("parent_span_id"):
                scores[span["span_id"]] = dict(map(mlflow_score, filter(is_valid, info.get("assessments", []))))
    return by_rollout(records, scores)


def is_valid(assessment):
    return assessment.get("valid", True)


def mlflow_score(assessment):
    source = assessment["source"]
    kind = {"LLM_JUDGE": "LLM"}.get(source["source_type"], source["source_type"])
    score = assessment["feedback"]["value"], assessment.get("rationale", ""), source["source_id"], kind
    return assessment["assessment_name"], score


def in_weave(url, project):
    body = {"project_id": f"tests/{project}"}
    reply = httpx.post(f"{url}/calls/stream_query", json=body, timeout=60)
    records = []
    for call in map(json.loads, reply.text.splitlines()):
        attributes = dict(flat(call["attributes"]["otel_span"]["attributes"]))
        for name, stored in (("input", call["inputs"]), ("output", call["output"] or {})):
            if f"gen_ai.{name}.messages" in stored:  # what Weave shows
                attributes[f"gen_ai.{name}.messages"] = stored[f"gen_ai.{name}.messages"]
        records.append((call["trace_id"], call["id"], call["started_at"], attributes))
    scores = {}
    for row in httpx.post(f"{url}/feedback/query", json=body, timeout=60).json()["result"]:
        data = row["payload"]
        score = data["value"], data["explanation"], data["judge"], data["kind"]
        name, span = row["feedback_type"].removeprefix("art."), row["weave_ref"].rpartition("/")[2]
        assert name not in scores.setdefault(span, {}), "a score is stored twice"
        scores[span][name] = score
    return by_rollout(records, scores)


READ = {"phoenix": in_phoenix, "mlflow": in_mlflow, "weave": in_weave}


def from_json(text):
    try:
        return json.loads(text) if isinstance(text, str) and text[:1] in "[{" else text
    except ValueError:
        return text


def from_otlp(value):
    """A value of MLflow's JSON, which has the form of protobuf."""
    ((kind, content),) = value.items()
    match kind:
        case "array_value":
            return [from_otlp(each) for each in content.get("values", [])]
        case "kvlist_value":
            return {each["key"]: from_otlp(each["value"]) for each in content.get("values", [])}
    return content


def flat(tree, prefix=""):
    """Nested attributes by their names with dots. Messages and arguments stay as they are."""
    for name, value in tree.items():
        if isinstance(value, dict) and f"{prefix}{name}" not in (
            "gen_ai.tool.call.arguments",
            "gen_ai.tool.call.result",
        ):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def by_rollout(records, scores):
    """Group spans: (trace, span, start, attributes). A span that is stored twice is an error."""
    assert len({span for _, span, *_ in records}) == len(records)
    roots = {trace: (span, a) for trace, span, _, a in records if "art.rollout" in a}
    result = {
        a["art.rollout"]: {
            "turns": [],
            "tools": [],
            "reward": a.get("art.reward"),
            "scores": scores.get(span, {}),
            "step": int(a["art.training_step"]),
        }
        for span, a in roots.values()
    }
    for trace, _, _, a in sorted(records, key=lambda record: record[2]):
        rollout = result.get(roots.get(trace, (0, {}))[1].get("art.rollout"))
        if a.get("gen_ai.operation.name") == "chat":
            tokens = [int(a[f"gen_ai.usage.{name}_tokens"]) for name in ("input", "output")]
            rollout["turns"].append((a["gen_ai.input.messages"], a["gen_ai.output.messages"], *tokens))
        elif a.get("gen_ai.operation.name") == "execute_tool":
            values = [a[f"gen_ai.tool.call.{name}"] for name in ("id", "arguments", "result")]
            rollout["tools"].append((a["gen_ai.tool.name"], *values))
    steps = {int(a["art.training_step"]): a for *_, a in records if "art.rollout" not in a and "art.run" in a}
    result["steps"] = {
        step: {n.removeprefix("art.metric."): float(v) for n, v in a.items() if n.startswith("art.metric.")}
        for step, a in steps.items()
    }
    return result


# What the run directory has


def part_form(message):
    """A message in the form of the conventions, without secrets."""
    message = message if isinstance(message, dict) else json.loads(message.message.model_dump_json())
    if message["role"] == "tool":
        answer = {"type": "tool_call_response", "id": message["tool_call_id"], "response": message["content"]}
        return {"role": "tool", "parts": [answer]}
    parts = [{"type": "reasoning", "content": message["reasoning_content"]}] if "reasoning_content" in message else []
    parts.append({"type": "text", "content": message["content"].replace(SECRET, "[redacted]")})
    for call in message.get("tool_calls") or []:
        arguments = json.loads(call["function"]["arguments"].replace(SECRET, "[redacted]"))
        parts.append({"type": "tool_call", "id": call["id"], "name": call["function"]["name"], "arguments": arguments})
    return {"role": message["role"], "parts": parts}


def in_run(store):
    """The same fields as in the servers, from the run directory."""
    result, journal = {}, Journal(store.path)
    for step in store.steps("train"):
        for group in store.read_groups("train", step):
            judged = journal.current(group, step)
            for i, trajectory in enumerate(group):
                result[trajectory.metadata["rollout_id"]] = fields(trajectory, judged[i], step)
            for n in range(len(group.exceptions)):
                result[f"failed {n} {group_id(group)}"] = {
                    "turns": [],
                    "tools": [],
                    "reward": None,
                    "scores": {},
                    "step": step,
                }
    metrics = {}
    for row in store.history():
        metrics.setdefault(row["step"], {}).update(row)
    kept = {step: {n: v for n, v in row.items() if n not in ("step", "recorded_at")} for step, row in metrics.items()}
    return result | {"steps": kept}


def fields(trajectory, judgment, step):
    entries, turns, tools = trajectory.messages_and_choices, [], []
    for i, entry in enumerate(entries):
        if isinstance(entry, dict):
            continue
        output = part_form(entry) | {"finish_reason": entry.finish_reason}
        tokens = len(entry.prompt_token_ids), len(entry.token_ids)
        turns.append(([part_form(each) for each in entries[:i]], [output], *tokens))
        for call in entry.message.tool_calls or []:
            arguments = json.loads(call.function.arguments.replace(SECRET, "[redacted]"))
            answers = [e["content"] for e in entries[i + 1 :] if isinstance(e, dict) and e["tool_call_id"] == call.id]
            tools.append((call.function.name, call.id, arguments, json.loads(answers[0])))
    person = judgment.by == "human"
    score = judgment.score, judgment.reason if person else judgment.explanation, judgment.judge
    scores = {"reward": (trajectory.reward, "", "art_nb", "CODE"), "judgment": (*score, "HUMAN" if person else "LLM")}
    return {"turns": turns, "tools": tools, "reward": trajectory.reward, "scores": scores, "step": step}


def without_hashes(rollouts):
    """The names of failed rollouts end with a hash of the message."""
    return {re.sub(r"^(failed .*) [0-9a-f]{8}$", r"\1", name): value for name, value in rollouts.items()}


def wait_for(tool, url, project, expected):
    """Read the project until it is as expected, and compare."""
    read = lambda: without_hashes(READ[tool](url, project))
    try:
        wait_until(lambda: read() == expected, 20)
    except AssertionError:
        assert read() == expected
    return read()


async def write_live(model, n_steps=2):
    """Log steps with tool calls, failures and judgments, as a training loop does. A person scores a rollout later."""
    for step in range(1, n_steps + 1):
        groups = [write_group(model.store, Journal(model.store.path), step, g, 2) for g in range(2)]
        await model.log(groups, split="train", step=step, metrics={"loss/train": 0.25 * step})
        await model.log(metrics={"accuracy": 0.5 * step}, split="val", step=step)
    (queue,) = model._reports.queues
    assert await asyncio.to_thread(queue.drain, 60) and await asyncio.to_thread(queue.reporter.live.drain, 120)
    overrule(model.store)
    overrule(model.store, index=1, score=0.25, reason="No.", group="group-2-1", step=2)
    await model.end_reports(60)
    return queue.reporter.live.report


async def test_a_live_and_a_replayed_run_equal_the_run_directory(running, impatient):
    tool, to = running.tool, f"{running.tool}@{running.url}"
    model = art.Model(
        name="weather-001", project="live", report_to="none", report_traces=[{"to": to, "timeout_s": 120}]
    )
    report = await write_live(model)
    assert (report.traces, report.dropped) == (2 * 2 * 3 + 2, 0)
    expected = in_run(model.store)
    assert len(expected) == 2 * 2 * 3 + 1 and expected["r1-0-0"]["scores"]["judgment"][1] == "The answer is right."
    assert {len(rollout["turns"]) for name, rollout in expected.items() if name.startswith("r")} == {2}
    wait_for(tool, running.url, "live", expected)
    art.export_traces(model.store, to, timeout_s=120)
    wait_for(tool, running.url, "live", expected)
    model.store.write_model(model.store.read_model() | {"project": "replayed"})
    for _ in range(2):
        art.export_traces(model.store, to, timeout_s=120)
        wait_for(tool, running.url, "replayed", expected)


async def test_a_later_row_changes_the_span_of_its_step(running, impatient):
    to = f"{running.tool}@{running.url}"
    model = art.Model(name="late-001", project="late", report_to="none", report_traces=[{"to": to, "timeout_s": 120}])
    read = lambda: READ[running.tool](running.url, "late").get("steps", {}).get(1, {})
    for step in (1, 2):
        await model.log(metrics={"x": step}, split="train", step=step)
    await until(read, 120)
    await model.log(metrics={"late": 0.5}, split="val", step=1)
    await model.end_reports(60)
    if running.tool == "weave":  # keeps the first version
        assert "val/late" not in read()
    else:
        await until(lambda: read().get("val/late") == 0.5, 60)
        assert read()["train/x"] == 1.0


# Failures of the server during a training

PROBLEMS = [pytest.param("killed", marks=pytest.mark.full), "slow", 500]
FIGURES = (
    "{} {}: training {:.1f} s, without {:.1f} s; end of the reports {:.1f} s; {} of 12 rollouts not sent at the end"
)


@pytest.fixture
def proxy(running):
    proxy = Proxy(running.url)
    yield proxy
    proxy.close()


def rollouts_in(running, project):
    return {name for name in READ[running.tool](running.url, project) if name != "steps"}


async def train(model, backend, on_step=None):
    start_s = time.perf_counter()
    run = await art.train(
        model, say, range(4), steps=3, groups_per_step=1, rollouts_per_group=4, show=False, on_step=on_step
    )
    assert (run.status, run.step) == ("done", 3)
    return time.perf_counter() - start_s


@pytest.mark.parametrize("problem", PROBLEMS)
async def test_training_continues_without_the_server(named, local, running, proxy, impatient, problem, capsys):
    project, url = f"failing-{problem}", running.url if problem == "killed" else proxy.url
    plain = named("plain", report_to="none")
    await plain.register(local)
    without_s = await train(plain, local)
    target = {"to": f"{running.tool}@{url}", "timeout_s": 30}
    model = named(project=project, report_to="none", report_traces=[target])
    await model.register(local)

    async def fail(run):
        if run.step == 1:
            await until(lambda: len(rollouts_in(running, project)) == 4, 120)
            match problem:
                case "killed":
                    running.kill()
                case "slow":
                    proxy.delay_s = 5.0
                case status:
                    proxy.status = status
            fail.at_s = time.perf_counter()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await train(model, local, fail)
        with_s = time.perf_counter() - fail.at_s  # two steps with the problem
        live = model._reports.queues[0].reporter.live
        if problem != "slow":
            await until(lambda: live.error, 120)
            proxy.status = None
            if problem == "killed":
                await asyncio.to_thread(running.start)
            assert await asyncio.to_thread(live.drain, 120)
        start_s = time.perf_counter()
        await model.end_reports(60)
        end_s, dropped = time.perf_counter() - start_s, live.report.dropped
    messages = [str(each.message) for each in caught if running.tool in str(each.message)]
    assert len(messages) == 1, messages
    proxy.delay_s = 0.0
    if problem == "slow":
        assert with_s < without_s * 2 / 3 + 5, "training does not wait for the answers, 5 s each"
        assert "too slow" in messages[0] and "Send the rest later" in messages[0] and end_s < 30
        art.export_traces(model.store, f"{running.tool}@{proxy.url}", timeout_s=60)
    else:
        assert not dropped
    wait_until(lambda: len(rollouts_in(running, project)) == 12)
    with capsys.disabled():
        print("\n" + FIGURES.format(running.tool, problem, with_s, without_s * 2 / 3, end_s, dropped))
