"""Spans of Langfuse's SDK, and observations and scores in the types of its API: `python langfuse_writer.py SPANS ROWS`.

Langfuse's server writes the export, and it needs four databases. The rows here are built from the SDK's spans with the
SDK's types of the API.
"""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import langfuse
import openai
from agent import SESSIONS, answer
from langfuse.api import ObservationV2, ScoreSubjectV3_Trace, ScoreV3_Boolean, ScoreV3_Numeric
from langfuse.openai import OpenAI
from opentelemetry.exporter.otlp.json.file import FileSpanExporter

SPANS, ROWS = sys.argv[1:]
told = openai.OpenAI()
tracer = langfuse.Langfuse(
    public_key="pk", secret_key="sk", base_url="http://127.0.0.1:9", span_exporter=FileSpanExporter(SPANS)
)
llm = OpenAI(base_url=str(told.base_url), api_key=told.api_key)
traces = []
for session, questions in SESSIONS.items():
    for question in questions:
        with tracer.start_as_current_observation(name="guide", as_type="agent") as span:
            with langfuse.propagate_attributes(session_id=session):
                answer(llm, question)
            traces.append(span.trace_id)
tracer.flush()


def value(entry):
    """Return the value of an attribute in OTLP's JSON format."""
    return next(iter(entry["value"].values()))


now = datetime(2026, 11, 26, tzinfo=UTC)
times = {"created_at": now, "updated_at": now}
rows = []
for line in Path(SPANS).read_text().splitlines():
    for resource in json.loads(line)["resourceSpans"]:
        for span in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
            facts = {entry["key"]: value(entry) for entry in span["attributes"]}
            kind = facts.get("langfuse.observation.type", "span")
            if kind != "generation":
                continue
            content = {key: facts.get(f"langfuse.observation.{key}") for key in ("input", "output")}
            content = {key: json.loads(text) if text and text[0] in "[{" else text for key, text in content.items()}
            start = datetime.fromtimestamp(int(span["startTimeUnixNano"]) / 1e9, UTC)
            rows.append(
                ObservationV2(
                    id=span["spanId"],
                    trace_id=span["traceId"],
                    parent_observation_id=span.get("parentSpanId"),
                    project_id="tests",
                    type="GENERATION",
                    name=span["name"],
                    start_time=start,
                    session_id=facts.get("session.id"),
                    model=facts.get("langfuse.observation.model.name"),
                    **content,
                    **times,
                )
            )
common = {"project_id": "tests", "environment": "default", "timestamp": now, **times}
subjects = [ScoreSubjectV3_Trace(kind="trace", id=trace) for trace in traces]
rows.append(ScoreV3_Numeric(id="1", name="helpful", value=0.5, source="EVAL", subject=subjects[0], **common))
rows.append(ScoreV3_Boolean(id="2", name="right", value=True, source="ANNOTATION", subject=subjects[1], **common))
rows.append(ScoreV3_Numeric(id="3", name="length", value=12, source="API", subject=subjects[1], **common))
lines = [json.dumps(json.loads(row.model_dump_json(by_alias=True, exclude_none=True))) + "\n" for row in rows]
Path(ROWS).write_text("".join(lines))
