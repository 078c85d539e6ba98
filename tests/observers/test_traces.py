"""Exports to endpoints that fail, hang or come back, live runs, memory, and runs of ART."""

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

import pytest
from support.live_parts import say
from support.observed_run import SECRET, overrule, write_run
from support.registered import until

import art_nb as art
from art_nb.core.types import BackendMissing, ServeError
from art_nb.integrations import traces
from art_nb.integrations.spans import span_text
from art_nb.rewards.journal import Journal
from art_nb.rewards.judges import Judgment
from art_nb.rollouts.trajectories import PydanticException

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ASKED = {"steps": 2, "groups_per_step": 1, "rollouts_per_group": 4, "show": False}


class Endpoint:
    """An OpenTelemetry endpoint that keeps the spans, and annotations in Phoenix's form."""

    def __init__(self, port=0, keep=True):
        self.status, self.spans, self.requests, self.annotations, self.headers = 200, [], 0, [], []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                endpoint.requests += 1
                endpoint.headers.append(dict(self.headers))
                if endpoint.status == 200 and self.path.endswith("/span_annotations"):
                    endpoint.annotations += json.loads(body)["data"]
                elif endpoint.status == 200 and keep:
                    message = ExportTraceServiceRequest.FromString(body)
                    endpoint.spans += [s for r in message.resource_spans for c in r.scope_spans for s in c.spans]
                self.send_response(endpoint.status)
                self.end_headers()
                self.wfile.write(b"")

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def endpoint():
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(traces, "FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(traces, "MAX_PAUSE_S", 0.5)
    monkeypatch.setattr(traces, "JOURNAL_POLL_S", 0.2)


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
    assert live_export(model).drain(60)
    live = {span.span_id: span.SerializeToString() for span in endpoint.spans}
    assert len(endpoint.spans) == len(live) == 2 * (4 * 2 + 1), "each span once"
    assert not (await closed_report(model)).dropped
    endpoint.spans.clear()
    art.export_traces(model.store.path, endpoint.url)
    assert {span.span_id: span.SerializeToString() for span in endpoint.spans} == live


async def test_the_loops_of_art_are_reported_too(named, local, endpoint):
    model = named(report_traces=[endpoint.url])
    await model.register(local)
    group = art.TrajectoryGroup([await say(model, i) for i in range(2)])
    await model.log([group], split="val")
    await until(lambda: len(endpoint.spans) == 5)
    assert not (await closed_report(model)).dropped


@pytest.mark.parametrize("problem", ["closed", "silent", 500, 400])
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
    assert len({span.span_id for span in endpoint.spans}) == len(endpoint.spans) == 18
    assert not (await closed_report(model)).dropped and "Send the rest later" not in capsys.readouterr().out


async def test_an_override_is_sent_while_the_model_is_trained(named, local, endpoint, impatient):
    model = named(report_traces=[f"phoenix@{endpoint.url}"])
    await model.register(local)
    group = art.TrajectoryGroup([await say(model, i) for i in range(2)], metadata={"group_id": "group-1-0"})
    await model.log([group], split="val", step=1)
    await until(lambda: len(endpoint.annotations) == 2)
    overrule(model.store, index=1, score=0.25)
    await until(lambda: len(endpoint.annotations) == 5)
    (judgment,) = [each for each in endpoint.annotations if each["name"] == "judgment"]
    assert (judgment["annotator_kind"], judgment["result"]["score"]) == ("HUMAN", 0.25)
    await model.end_reports()


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
    assert live_export(model).drain(30)
    n_before = len(endpoint.spans)
    await model.log(metrics={"x": 1.0}, split="val", step=1)
    assert live_export(model).drain(30)
    (span,) = endpoint.spans[n_before:]
    assert any("x" in attribute.key for attribute in span.attributes)
    await model.end_reports()


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
