"""Exports to endpoints that fail, hang or come back, live runs, memory, and runs of ART."""

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from support.live_parts import say
from support.observed_run import SECRET, overrule, sampled, write_run
from support.registered import until

import art_nb as art
from art_nb.core.jsonable import text_digest
from art_nb.core.types import BackendMissing, ServeError
from art_nb.integrations import live_traces
from art_nb.integrations.run_spans import RunReader, StepSpans
from art_nb.integrations.spans import (
    MAX_SPAN_TEXT_CHARS,
    RolloutPlace,
    SpanOptions,
    SpanRecord,
    agent_span_id,
    span_text,
)
from art_nb.integrations.trace_targets import call_api, phoenix_target
from art_nb.integrations.traces import SpanSender, StepProgress, TraceReport, send_step
from art_nb.rewards.journal import Journal
from art_nb.rewards.judges import Judgment
from art_nb.rollouts.trajectories import PydanticException
from art_nb.runs.store import RunStore

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ASKED = {"steps": 2, "groups_per_step": 1, "rollouts_per_group": 4, "show": False}


class Endpoint:
    """An OpenTelemetry endpoint that keeps the spans, and annotations in Phoenix's form."""

    def __init__(self, port=0, keep=True):
        self.status, self.spans, self.requests, self.annotations, self.headers = 200, [], 0, [], []
        self.text, self.max_bytes, self.refused_spans = "", 1 << 40, set()  # IDs of spans whose scores are refused
        self.page = b""  # the reply to GET
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                endpoint.requests += 1
                endpoint.headers.append(dict(self.headers))
                status = 413 if len(body) > endpoint.max_bytes else endpoint.status
                if status == 200 and self.path.endswith("/span_annotations"):
                    status = endpoint.take_scores(json.loads(body)["data"])
                elif status == 200 and keep:
                    message = ExportTraceServiceRequest.FromString(body)
                    endpoint.spans += [s for r in message.resource_spans for c in r.scope_spans for s in c.spans]
                self.send_response(status)
                self.end_headers()
                self.wfile.write(endpoint.text.encode() if status != 200 else b"")

            def do_GET(self):  # Phoenix: the spans of a project
                self.send_response(200 if endpoint.page else 404)
                self.end_headers()
                self.wfile.write(endpoint.page)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    def take_scores(self, data):
        if any(each["span_id"] in self.refused_spans for each in data):
            return 422
        self.annotations += data
        return 200

    def names(self):
        return [span.name for span in self.spans]

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture(autouse=True)
def runs_in(tmp_path, monkeypatch):
    """Models without a backend write into the directory of the test."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def endpoint():
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


def live_export(model):
    """The export of a model with one target."""
    (queue,) = model._reports.queues
    assert queue.drain(30)
    return queue.reporter.live


async def closed_report(model):
    live = live_export(model)
    await model.end_reports()
    return live.report


async def test_a_live_run_and_its_replay_give_the_same_spans(named, local, endpoint):
    model = named(report_traces=[endpoint.url])
    await model.register(local)
    await art.train(model, say, range(4), **ASKED)
    assert not (await closed_report(model)).dropped
    live = {span.span_id: span.SerializeToString() for span in endpoint.spans}
    assert len(endpoint.spans) == len(live) == 2 * (4 * 2 + 1), "each span once"
    endpoint.spans.clear()
    art.export_traces(model.store.path, endpoint.url)
    assert {span.span_id: span.SerializeToString() for span in endpoint.spans} == live


async def test_the_loops_of_art_are_reported_too(named, local, endpoint):
    model = named(report_traces=[endpoint.url])
    await model.register(local)
    group = art.TrajectoryGroup([await say(model, i) for i in range(2)])
    await model.log([group], split="val")
    await until(lambda: len(endpoint.spans) == 4)
    assert not (await closed_report(model)).dropped
    assert endpoint.names()[4:] == ["training_step 0"]


@pytest.mark.parametrize("problem", ["closed", "silent", 500, 401])
async def test_a_target_that_fails_gives_one_warning_and_does_not_delay_training(
    named, local, endpoint, impatient, problem
):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = {"closed": 9, "silent": silent.getsockname()[1]}.get(problem, endpoint.port)
        endpoint.status = problem if isinstance(problem, int) else 200
        model = named(report_traces=[{"to": f"http://127.0.0.1:{port}", "timeout_s": 0.5}])
        await model.register(local)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = await art.train(model, say, range(4), **ASKED)
            live = live_export(model)
            await until(lambda: live.error)
            await until(lambda: any("did not take" in str(each.message) for each in caught))
            time.sleep(1.5)
        assert run.status == "done" and run.step == 2
        assert len([each for each in caught if "did not take" in str(each.message)]) == 1
        assert not live.drain(0.1)
        assert (await closed_report(model)).dropped == 8, "the rollouts of both steps"
        endpoint.status = 200
        assert art.export_traces(model.store, endpoint.url).traces == 10


async def test_the_rest_arrives_when_the_target_works_again(named, local, endpoint, impatient, capsys):
    endpoint.status = 503
    model = named(report_traces=[{"to": endpoint.url, "timeout_s": 0.5}])
    await model.register(local)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        await art.train(model, say, range(4), **ASKED)
        live = live_export(model)
        await until(lambda: live.error)
    endpoint.status = 200
    assert live.drain(30)
    assert not (await closed_report(model)).dropped
    assert len({span.span_id for span in endpoint.spans}) == len(endpoint.spans) == 18
    assert "Send the rest later" not in capsys.readouterr().out


async def test_an_override_is_sent_while_the_model_is_trained(named, local, endpoint, impatient):
    model = named(report_traces=[f"phoenix@{endpoint.url}"])
    await model.register(local)
    group = art.TrajectoryGroup([await say(model, i) for i in range(2)], metadata={"group_id": "group-1-0"})
    await model.log([group], split="val", step=1)
    await until(lambda: len(endpoint.annotations) == 2)
    overrule(model.store, index=1, score=0.25)
    await until(lambda: len(endpoint.annotations) == 4)
    reward, judgment = endpoint.annotations[2:]
    assert reward["span_id"] == judgment["span_id"] == endpoint.annotations[1]["span_id"], "only the changed rollout"
    assert (judgment["annotator_kind"], judgment["result"]["score"]) == ("HUMAN", 0.25)
    overrule(model.store, index=0, score=0.5)
    await model.end_reports()
    assert [each["result"]["score"] for each in endpoint.annotations[4:]][1:] == [0.5], "also just before the end"


async def test_invalid_targets_are_errors_before_anything_is_loaded(named, local):
    with pytest.raises(ServeError, match="Did you mean 'phoenix'"):
        await named(report_traces=["phoenx"]).register(local)


async def test_a_missing_opentelemetry_is_an_error_at_registration(named, local, endpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(BackendMissing, match=r'pip install "art_nb\[otel\]"'):
        await named(report_traces=[endpoint.url]).register(local)


async def test_only_the_metrics_of_a_row_without_groups_are_sent(named, endpoint):
    model = named(report_traces=[endpoint.url])
    await model.log([art.TrajectoryGroup([art.Trajectory(reward=1.0)])], split="val", step=1)
    await until(lambda: endpoint.names() == ["invoke_agent ttt"])
    await model.log(metrics={"x": 1.0}, split="val", step=2)
    await until(lambda: len(endpoint.spans) == 2)
    await model.end_reports()
    assert endpoint.names()[1:] == ["training_step 1", "training_step 2"]
    assert any("x" in attribute.key for attribute in endpoint.spans[2].attributes)


def metrics_of(span):
    return {a.key.removeprefix("art.metric."): a.value.double_value for a in span.attributes if "metric" in a.key}


async def test_the_span_of_a_step_has_the_metrics_of_all_its_rows(named, endpoint, impatient):
    model = named(report_traces=[endpoint.url])
    group = art.TrajectoryGroup([art.Trajectory(reward=1.0), art.Trajectory(reward=0.0)])
    await model.log([group], metrics={"loss/train": 0.5}, split="train", step=1)
    await model.log([group], split="val", step=1)
    await until(lambda: endpoint.names().count("invoke_agent ttt") == 4)
    time.sleep(0.5)
    assert "training_step 1" not in endpoint.names(), "further rows of the step may follow"
    await model.log([group], split="train", step=2)
    await until(lambda: "training_step 1" in endpoint.names())
    await model.log(metrics={"late": 0.25}, split="val", step=1)
    await until(lambda: endpoint.names().count("training_step 1") == 2)
    await model.end_reports()
    first, late = (metrics_of(span) for span in endpoint.spans if span.name == "training_step 1")
    assert first == {k: v for k, v in late.items() if k != "val/late"} and late["val/late"] == 0.25
    assert (first["loss/train"], first["train/reward"], first["val/reward"]) == (0.5, 0.5, 0.5)
    assert len({span.span_id for span in endpoint.spans if span.name == "training_step 1"}) == 1
    late_spans = {span.span_id: span.SerializeToString() for span in endpoint.spans}
    endpoint.spans.clear()
    art.export_traces(model.store, endpoint.url)
    assert {span.span_id: span.SerializeToString() for span in endpoint.spans} == late_spans


async def test_metrics_are_sent_when_no_row_follows(named, endpoint, impatient, monkeypatch):
    monkeypatch.setattr(live_traces, "METRICS_WAIT_S", 0.3)
    model = named(report_traces=[endpoint.url])
    await model.log(metrics={"x": 1.0}, split="val", step=1)
    await until(lambda: endpoint.names() == ["training_step 1"])
    await model.end_reports()
    assert len(endpoint.spans) == 1


def rollout(n_chars):
    return art.Trajectory(messages_and_choices=[{"role": "user", "content": "x" * n_chars}], reward=1.0)


async def caught_during(work):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await work
    return [str(each.message) for each in caught if each.category is UserWarning]


async def test_a_request_that_is_too_large_is_split_and_the_rest_is_dropped(named, endpoint, impatient):
    endpoint.max_bytes, endpoint.text = 30_000, "limit is 30 kB"
    model = named(report_traces=[f"phoenix@{endpoint.url}"])

    async def log():
        sizes = [10_000] * 5 + [50_000] + [10_000] * 2
        await model.log([art.TrajectoryGroup(map(rollout, sizes))], split="val", step=1)
        await model.log([art.TrajectoryGroup(map(rollout, [100, 50_000]))], split="val", step=2)
        await model.end_reports()

    messages = await caught_during(log())
    assert endpoint.names().count("invoke_agent ttt") == 8 and endpoint.names()[-1] == "training_step 2"
    (message,) = messages
    assert "limit is 30 kB" in message and "(413)" in message
    assert len(endpoint.annotations) == 8, "no scores of rollouts that Phoenix does not have"
    with pytest.warns(UserWarning, match="2 rollouts not sent.*limit is 30 kB"):
        report = art.export_traces(model.store, f"phoenix@{endpoint.url}")
    assert (report.dropped, report.traces) == (2, 10), "8 rollouts and 2 steps"
    assert (report.scores, report.dropped_scores) == (8, 2), "the scores of refused rollouts are counted"


async def test_a_step_that_is_refused_does_not_block_the_next_ones(named, endpoint, impatient):
    model = named(report_traces=[endpoint.url])

    async def log():
        for step, status in ((1, 400), (2, 422), (3, 200)):
            endpoint.status, endpoint.text = status, f"no spans, {status}"
            await model.log([art.TrajectoryGroup(map(rollout, (1, 2)))], split="val", step=step)
            assert await asyncio.to_thread(live_export(model).drain, 30)
        log.report = await closed_report(model)

    (message,) = await caught_during(log())
    assert "no spans, 400" in message and "did not take 2 spans (400)" in message
    assert log.report.dropped == 4 and endpoint.names().count("invoke_agent ttt") == 2
    assert endpoint.names()[-1] == "training_step 3"
    endpoint.status, endpoint.text = 400, "no spans at all"
    with pytest.raises(ServeError, match="no spans at all"):
        art.export_traces(model.store, endpoint.url)


async def test_a_refused_score_does_not_block_the_others(named, endpoint, impatient):
    model = named(report_traces=[f"phoenix@{endpoint.url}"])
    group = art.TrajectoryGroup(map(rollout, range(8)))
    for i, trajectory in enumerate(group):
        trajectory.metadata["rollout_id"] = f"r{i}"
    place = RolloutPlace(model.project, "ttt", "val", 1, 0, 3, "r3")
    endpoint.refused_spans, endpoint.text = {f"{agent_span_id(place):016x}"}, "unknown span"

    async def log():
        await model.log([group], split="val", step=1)
        log.report = await closed_report(model)

    (message,) = await caught_during(log())
    assert "unknown span" in message
    assert (log.report.dropped, log.report.scores, log.report.dropped_scores) == (0, 7, 1)
    assert len(endpoint.annotations) == 7


def test_a_request_above_the_limit_of_the_exporter_is_split(endpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("opentelemetry.exporter.otlp.proto.http.trace_exporter._DEFAULT_MAX_REQUEST_SIZE", 30_000)
    store = art.RunStore(tmp_path / "run")
    store.write_model({"name": "run", "project": "p"})
    store.write_groups("val", 1, [art.TrajectoryGroup(map(rollout, [20_000] * 3))])
    report = art.export_traces(store, endpoint.url)
    assert (report.traces, report.dropped) == (3, 0)
    store.write_groups("val", 2, [art.TrajectoryGroup(map(rollout, [40_000]))])
    with pytest.warns(UserWarning, match="1 rollouts not sent"):
        assert art.export_traces(store, endpoint.url).dropped == 1


async def test_a_damaged_file_of_a_step_does_not_block_the_next_ones(named, endpoint, impatient):
    model = named(report_traces=[endpoint.url])
    endpoint.status = 503
    for step in (1, 2):
        await model.log([art.TrajectoryGroup(map(rollout, (1, 2)))], split="val", step=step)
    (path,) = (model.store.path / "trajectories" / "val").glob("0001.parquet")
    path.write_bytes(b"damaged")
    endpoint.status = 200
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert live_export(model).drain(30)
        await model.end_reports()
    assert endpoint.names()[-1] == "training_step 2" and endpoint.names().count("invoke_agent ttt") in (2, 4)


async def test_the_rollouts_of_a_damaged_step_are_counted_and_the_connection_is_closed(named, endpoint, impatient):
    endpoint.status = 503
    model = named(report_traces=[endpoint.url])

    async def log():
        for step in (1, 2):
            await model.log([art.TrajectoryGroup(map(rollout, (1, 2)))], split="val", step=step)
        log.live = live_export(model)
        await until(lambda: log.live.error)
        for path in (model.store.path / "trajectories" / "val").glob("*.parquet"):
            path.write_bytes(b"damaged")
        await model.end_reports()

    messages = await caught_during(log())
    assert log.live.sender.client.is_closed and log.live.report.dropped_steps == 2, messages


def odd_rollout(problem):
    """A rollout with data that a model or a function can produce, but no converter expects."""
    arguments, name, metrics, content = "{}", "weather", {}, "Hello"
    match problem:
        case "arguments":
            arguments = "[" * 3_000
        case "duration":
            metrics = {"duration": float("nan")}
        case "image":
            content = [{"type": "image_url", "image_url": "http://127.0.0.1/cat.png"}]
        case "name":
            name = "wea\ud800ther"
    function = {"name": name, "arguments": arguments}
    message = {"role": "assistant", "content": "Hm", "tool_calls": [{"id": "c", "type": "function"}]}
    message["tool_calls"][0]["function"] = function
    entries = [{"role": "user", "content": content}, sampled(message, "tool_calls", [1], [2])]
    return art.Trajectory(messages_and_choices=entries, reward=1.0, metrics=metrics)


@pytest.mark.parametrize("problem", ["arguments", "duration", "image", "name"])
def test_odd_data_of_a_rollout_is_sent(endpoint, tmp_path, problem):
    store = art.RunStore(tmp_path / "run")
    store.write_model({"name": "run", "project": "p"})
    (group,) = groups = [art.TrajectoryGroup([odd_rollout(problem), rollout(1)])]
    store.read_groups = lambda split, step, tokens=True: groups  # as if all formats stored such data
    store.write_groups("val", 1, [art.TrajectoryGroup(map(rollout, (1, 2)))])
    report = art.export_traces(store, endpoint.url)
    assert (report.traces, report.dropped, report.reason) == (2, 0, "")
    assert "execute_tool wea" in " ".join(endpoint.names())
    uri = any("cat.png" in a.value.string_value for span in endpoint.spans for a in span.attributes)
    assert uri == (problem == "image")


async def test_a_step_that_cannot_be_converted_does_not_block_the_next_ones(named, endpoint, impatient, monkeypatch):
    read = RunReader.step

    def fail(self, split, step):
        if step == 1:
            raise TypeError("an unknown kind of message")
        return read(self, split, step)

    monkeypatch.setattr(RunReader, "step", fail)
    model = named(report_traces=[endpoint.url])

    async def log():
        for step in (1, 2):
            await model.log([art.TrajectoryGroup(map(rollout, (1, 2)))], split="val", step=step)
        log.report = await closed_report(model)

    (message,) = await caught_during(log())
    assert "an unknown kind of message" in message and log.report.dropped == 2
    assert endpoint.names().count("invoke_agent ttt") == 2


def test_a_retry_sends_each_rollout_although_batches_changed(endpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("art_nb.integrations.traces.MAX_BATCH_SPANS", 10)
    store = write_run(tmp_path / "run", rollouts=6)
    reader, progress = RunReader(store), StepProgress()
    sender = SpanSender(phoenix_target(endpoint.url, "observed"), "observed")
    report = TraceReport("phoenix")
    reader.refresh()
    next(send_step(sender, reader.step("train", 1), report, progress))
    monkeypatch.setattr("art_nb.integrations.traces.MAX_BATCH_SPANS", 25)
    for _ in send_step(sender, reader.step("train", 1), report, progress):
        pass
    sender.close()
    assert endpoint.names().count("invoke_agent weather-001") == report.traces == 7
    assert len({span.span_id for span in endpoint.spans}) == len(endpoint.spans)


def test_a_span_that_cannot_be_encoded_is_left_out_alone(endpoint):
    sender, report = SpanSender(phoenix_target(endpoint.url, "p"), "p"), TraceReport("phoenix")
    step = StepSpans([[SpanRecord(name, i, 1, None, 0, 1)] for i, name in enumerate(["a", "\ud800", "b"], 1)])
    assert [*send_step(sender, step, report, StepProgress())] == [1]
    sender.close()
    assert (endpoint.names(), report.traces, report.dropped) == (["a", "b"], 2, 1) and "encode" in report.reason


async def test_messages_do_not_contain_the_password_of_a_target(named, impatient, capsys):
    model = named(report_traces=[{"to": "http://user:hunter2secret@127.0.0.1:9/v1/traces", "timeout_s": 0.5}])

    async def log():
        await model.log([art.TrajectoryGroup([rollout(1)])], split="val", step=1)
        live = live_export(model)
        await until(lambda: live.error)
        await model.end_reports()

    (message,) = await caught_during(log())
    assert "to='http://127.0.0.1:9/v1/traces'" in message and "hunter2" not in message
    shown = capsys.readouterr().out
    assert "to='http://127.0.0.1:9/v1/traces'" in shown and "hunter2" not in shown
    for to in ("phoenx@http://user:hunter2secret@host", "mlflow@postgresql://user:hunter2secret@host/db"):
        with pytest.raises(ServeError) as raised:
            art.export_traces(model.store, to)
        assert "hunter2" not in str(raised.value)


def test_errors_of_a_target_contain_no_key_and_a_page_is_an_error(endpoint):
    target = phoenix_target(endpoint.url, "p")
    target.headers["x-team"] = "correct-horse-battery"
    with httpx.Client() as client:
        endpoint.status, endpoint.text = 401, "unknown key correct-horse-battery of the team"
        with pytest.raises(ServeError, match=r"unknown key \[redacted\] of the team"):
            call_api(client, target, "POST", "/v1/span_annotations", {})
        endpoint.page = b"<html>Log in</html>"
        with pytest.raises(ServeError, match="did not answer GET /v1/projects with JSON. Check the address"):
            call_api(client, target, "GET", "/v1/projects")


def test_other_credential_providers_keep_the_session(endpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_CREDENTIAL_PROVIDER", "x")
    endpoint.status, endpoint.text = 400, "the reason in the body"
    with pytest.raises(ServeError, match="the reason in the body"):
        art.export_traces(write_run(tmp_path / "run"), endpoint.url)


def test_large_arguments_and_metadata_are_cut(endpoint, tmp_path):
    store = art.RunStore(tmp_path / "run")
    store.write_model({"name": "run", "project": "p"})
    large = odd_rollout("")
    large.metadata["page"] = "x" * 500_000
    large.messages_and_choices[1].message.tool_calls[0].function.arguments = json.dumps({"page": "y" * 500_000})
    store.write_groups("val", 1, [art.TrajectoryGroup([large])])
    art.export_traces(store, endpoint.url)
    texts = [a.value.string_value for span in endpoint.spans for a in span.attributes]
    assert MAX_SPAN_TEXT_CHARS < max(map(len, texts)) < MAX_SPAN_TEXT_CHARS + 1_000
    assert sum("more characters)" in text for text in texts) == 4, "metadata, arguments, two messages with them"


async def test_only_the_step_of_a_new_judgment_is_read_again(named, endpoint, impatient, monkeypatch):
    model = named(report_traces=[f"phoenix@{endpoint.url}"])
    for step in range(1, 6):
        group = art.TrajectoryGroup(map(rollout, range(3)), metadata={"group_id": f"group-{step}-0"})
        await model.log([group], split="val", step=step)
    assert live_export(model).drain(30)
    await until(lambda: len(endpoint.annotations) == 15)
    read, steps = RunStore.read_groups, []
    monkeypatch.setattr(RunStore, "read_groups", lambda self, *a, **k: steps.append(a) or read(self, *a, **k))
    overrule(model.store, index=1, group="group-2-0", step=2)
    overrule(model.store, index=2, group="group-4-0", step=4)
    await until(lambda: len(endpoint.annotations) == 15 + 4)
    await model.end_reports()
    assert sorted({place for place in steps}) == [("val", 2), ("val", 4)]


async def test_scores_of_a_damaged_step_do_not_block_the_others(named, endpoint, impatient):
    model = named(report_traces=[f"phoenix@{endpoint.url}"])

    async def log():
        for step in (1, 2):
            group = art.TrajectoryGroup(map(rollout, range(2)), metadata={"group_id": f"group-{step}-0"})
            await model.log([group], split="val", step=step)
        assert live_export(model).drain(30)
        await until(lambda: len(endpoint.annotations) == 4)
        (path,) = (model.store.path / "trajectories" / "val").glob("0001.parquet")
        path.write_bytes(b"damaged")
        for step in (1, 2):
            overrule(model.store, index=0, group=f"group-{step}-0", step=step)
        await until(lambda: len(endpoint.annotations) == 6)
        await model.end_reports()

    messages = await caught_during(log())
    assert sum("Step 1 could not be sent" in message for message in messages) == 1, messages


async def test_two_targets_and_a_function_share_a_run_that_is_opened_again(named, endpoint):
    rows, targets = [], [endpoint.url, {"to": endpoint.url, "sample": 0.0}]
    model = named(report_traces=targets, report_to=rows.append)
    for step in (1, 2):
        await model.log([art.TrajectoryGroup([art.Trajectory(reward=1.0)])], split="val", step=step)
        await model.end_reports()
        assert model._reports.queues == []
    assert [row["step"] for row in rows] == [1, 2]
    names = [span.name for span in endpoint.spans]
    assert len([name for name in names if name.startswith("invoke_agent")]) == 2, "by the first target only"
    assert len(names) == 2 + 4, "and each step by both targets"


def test_the_end_of_a_process_sends_the_steps(endpoint, tmp_path):
    program = f"""
import asyncio, art_nb as art

model = art.Model(name="a", project="p", report_to="none", report_traces=[{endpoint.url!r}])
asyncio.run(model.log([art.TrajectoryGroup([art.Trajectory(reward=1.0)])], split="val", step=1))
"""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(endpoint.spans) == 2


def test_a_run_of_art_without_times_and_ids(endpoint, tmp_path):
    messages = [{"role": "user", "content": "Move"}, {"role": "assistant", "content": "b2"}]
    logs, metrics = ["RULER explanation: good"], {"ruler_score": 0.8}
    group = {"trajectories": [{"messages_and_choices": messages, "reward": 1.0, "metrics": metrics, "logs": logs}]}
    run = tmp_path / "art-run"
    (run / "trajectories" / "train").mkdir(parents=True)
    (run / "trajectories" / "train" / "0001.jsonl").write_text(json.dumps(group) + "\n")
    row = {"step": 1, "train/reward": 1.0, "time/step_wall_s": 30.0, "recorded_at": "2026-11-18T11:00:00"}
    (run / "history.jsonl").write_text(json.dumps(row) + "\n")
    for _ in range(2):
        art.export_traces(str(run), endpoint.url)
    spans = [span.SerializeToString() for span in endpoint.spans]
    assert len(spans) == 6 and spans[:3] == spans[3:]
    root = next(span for span in endpoint.spans if span.name == "invoke_agent art-run")
    assert root.end_time_unix_nano - root.start_time_unix_nano == 30e9, "as long as the step"
    event = {a.key: a.value for a in root.events[1].attributes}
    assert event["gen_ai.evaluation.explanation"].string_value == "good"


def test_sampling_headers_tokens_and_content(endpoint, tmp_path, monkeypatch):
    store = write_run(tmp_path / "run", groups=4, rollouts=25)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=games")
    report = art.export_traces(store, sample=0.3)
    assert 15 < report.traces < 50 and endpoint.headers[-1]["x-team"] == "games"
    names = {span.trace_id for span in endpoint.spans}
    endpoint.spans.clear()
    art.export_traces(store, endpoint.url, {"x-key": "k"}, sample=0.3, content=False)
    assert {span.trace_id for span in endpoint.spans} == names and endpoint.headers[-1]["x-key"] == "k"
    text = "".join(span.SerializeToString().decode("latin-1") for span in endpoint.spans)
    assert "Rome" not in text and "celsius" not in text and "complete" not in text and SECRET not in text
    endpoint.spans.clear()
    art.export_traces(store, endpoint.url, tokens=True, sample=0.1)
    assert any(a.key == "art.token_ids" for span in endpoint.spans for a in span.attributes)


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """A run with judgments that contain a value of the environment, one overruled, and a reward that is no number."""
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    store = art.RunStore(tmp_path / "run")
    store.write_model({"name": "run", "project": "p"})
    explained = {"ruler_explanation": "Ann paid with correct-horse-battery."}
    first = art.Trajectory(reward=float("nan"), metrics={"ruler_score": 0.5}, metadata=explained)
    group = art.TrajectoryGroup([first, art.Trajectory(reward=1.0)], metadata={"group_id": "g"})
    group.exceptions = [PydanticException(type="ValueError", message="Ann is late", traceback="Ann's file")]
    store.write_groups("val", 1, [group])
    Journal(store.path).append([Judgment("g", 1, 0.4, 1, "Ann, correct-horse-battery", "gpt-4.1")])
    overrule(store, index=1, reason="Ann is right, see correct-horse-battery.", group="g")
    return store


def test_scores_contain_no_secrets_and_only_numbers(endpoint, judged):
    art.export_traces(judged, f"phoenix@{endpoint.url}")
    sent = {each["name"]: each for each in endpoint.annotations[1:]}
    assert len(endpoint.annotations) == 3 and sent["reward"]["result"]["score"] == 1.0, "a reward is NaN"
    assert endpoint.annotations[0]["result"]["explanation"] == "Ann paid with [redacted]."
    assert sent["judgment"]["result"]["explanation"] == "Ann is right, see [redacted]."
    assert sent["judgment"]["metadata"]["judge_explanation"] == "Ann, [redacted]"


def test_scores_and_errors_have_no_texts_without_content(endpoint, judged):
    art.export_traces(judged, f"phoenix@{endpoint.url}", content=False)
    assert len(endpoint.annotations) == 3 and "Ann" not in json.dumps(endpoint.annotations)
    assert "judge_explanation" not in json.dumps(endpoint.annotations)
    (failed,) = [span for span in endpoint.spans if span.status.message]
    assert failed.status.message == "ValueError" and b"Ann" not in failed.SerializeToString()


@pytest.mark.parametrize("content", [True, False])
def test_scenarios_and_judges_are_redacted(judged, content):
    (group,) = judged.read_groups("val", 1)
    group.metadata["scenario_id"] = "Ann asks for correct-horse-battery"
    judged.write_groups("val", 1, [group])
    Journal(judged.path).append([Judgment("g", 0, 0.4, 1, "short", "judge correct-horse-battery")])
    reader = RunReader(judged, SpanOptions(content, secrets=["correct-horse-battery"]))
    reader.refresh()
    step = reader.step("val", 1)
    assert "correct-horse" not in str(step) and "judge [redacted]" in str(step)
    scenario = step.traces[0][0].attributes["art.scenario_id"]
    assert scenario == ("Ann asks for [redacted]" if content else text_digest(group.metadata["scenario_id"])[:16])


def test_headers_of_the_environment_are_not_sent_to_another_target(endpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-other-team=a-key")
    art.export_traces(write_run(tmp_path / "run"), f"phoenix@{endpoint.url}")
    assert len(endpoint.spans) > 5 and not any("a-key" in str(sent) for sent in endpoint.headers)


def test_a_long_text_is_cut_without_a_part_of_a_secret():
    secret = "correct-horse-battery" * 20
    for size in (99_990, 103_990):
        text = span_text("x " * (size // 2) + secret + " y" * 10_000, [secret])
        assert "correct" not in text and 95_000 < len(text) < 100_100 and "more characters)" in text


def test_the_users_own_tracing_is_not_touched(endpoint, tmp_path):
    from opentelemetry import trace

    before = trace.get_tracer_provider()
    art.export_traces(write_run(tmp_path / "run"), endpoint.url)
    assert trace.get_tracer_provider() is before
    assert not trace.get_current_span().get_span_context().is_valid


@pytest.mark.slow
def test_a_thousand_rollouts_in_bounded_memory(tmp_path, capsys):
    endpoint = Endpoint(keep=False)
    store = write_run(tmp_path / "run", steps=10, groups=10, rollouts=10)
    art.export_traces(store, endpoint.url, steps=[1])
    peak_mb, start_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, time.thread_time()
    report = art.export_traces(store, endpoint.url)
    cpu_s = time.thread_time() - start_s
    growth_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - peak_mb
    endpoint.close()
    assert (report.traces, report.spans) == (1000 + 100 + 10, 1000 * 5 + 100 + 10)
    assert growth_mb < 30, "the memory does not depend on the number of steps"
    assert cpu_s < 60
    with capsys.disabled():
        print(f"\n1,000 rollouts: {cpu_s:.1f} s of CPU, {report.seconds_s:.1f} s, {growth_mb:.1f} MB more than for 100")
