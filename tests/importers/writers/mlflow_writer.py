"""Traces of MLflow with assessments: `python mlflow_writer.py FILE`."""

import json
import logging
import sys
import tempfile
from pathlib import Path

import mlflow
from agent import SESSIONS, answer, client
from mlflow.entities import AssessmentSource

logging.getLogger("alembic").setLevel(logging.ERROR)
mlflow.set_tracking_uri(f"sqlite:///{tempfile.mkdtemp()}/traces.db")
mlflow.set_experiment("tests")
mlflow.openai.autolog()
llm = client()


@mlflow.trace(span_type="AGENT")
def guide(session, question):
    """Answer a question."""
    mlflow.update_current_trace(metadata={"mlflow.trace.session": session})
    return answer(llm, question)


for session, questions in SESSIONS.items():
    for question in questions:
        guide(session, question)
mlflow.flush_trace_async_logging()
traces = sorted(mlflow.search_traces(return_type="list"), key=lambda trace: trace.info.request_time)
for trace, name in zip(traces, ("LLM_JUDGE", "HUMAN"), strict=True):
    source = AssessmentSource(source_type=name, source_id="someone")
    mlflow.log_feedback(trace_id=trace.info.trace_id, name="helpful", value=True, rationale="ok", source=source)
    if name == "HUMAN":
        code = AssessmentSource(source_type="CODE", source_id="length")
        mlflow.log_feedback(trace_id=trace.info.trace_id, name="length", value=12, source=code)
        mlflow.log_expectation(trace_id=trace.info.trace_id, name="expected", value="It is sunny.", source=source)
traces = sorted(mlflow.search_traces(return_type="list"), key=lambda trace: trace.info.request_time)
lines = [json.dumps(json.loads(trace.to_json()), sort_keys=True) + "\n" for trace in traces]
Path(sys.argv[1]).write_text("".join(lines))
