"""Spans and annotations of a Phoenix server, and its dataset for fine-tuning: `python phoenix_writer.py FILE CHATS`."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from agent import SESSIONS, answer, client
from openinference.instrumentation import using_session
from openinference.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor


def free_port():
    """Return a port that no process uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def read(path, body=None):
    """Return the content of the server's reply to a request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return reply.read()


def get(path, body=None):
    """Return the reply of the server to a request."""
    return json.loads(read(path, body) or b"null")


def mutate(name, payload):
    """Change a dataset as Phoenix's pages do. Return its ID."""
    query = f"mutation ($input: {name[0].upper()}{name[1:]}Input!) {{ {name}(input: $input) {{ dataset {{ id }} }} }}"
    return get("/graphql", {"query": query, "variables": {"input": payload}})["data"][name]["dataset"]["id"]


port, folder = free_port(), tempfile.mkdtemp()
url = f"http://127.0.0.1:{port}"
settings = {"PHOENIX_PORT": port, "PHOENIX_GRPC_PORT": free_port(), "PHOENIX_HOST": "127.0.0.1"}
settings |= {"PHOENIX_WORKING_DIR": folder, "PHOENIX_TELEMETRY_ENABLED": "false"}
command = [str(Path(sys.executable).parent / "phoenix"), "serve"]
server = subprocess.Popen(command, env=os.environ | settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    for _ in range(1000):
        try:
            get("/v1/projects")
            break
        except OSError:
            time.sleep(0.5)
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces", timeout=30)))
    OpenAIInstrumentor().instrument(tracer_provider=provider)
    tracer, llm = provider.get_tracer("tests"), client()
    for session, questions in SESSIONS.items():
        for question in questions:
            with using_session(session), tracer.start_as_current_span("guide"):
                answer(llm, question)
    provider.force_flush()
    for _ in range(60):
        spans = get("/v1/projects/default/spans?limit=100")["data"]
        if len(spans) >= 8:
            break
        time.sleep(0.5)
    spans.sort(key=lambda span: (span["start_time"], span["end_time"]))
    chats = [span for span in spans if span["span_kind"] == "LLM"]
    kinds = {"LLM": 0.25, "HUMAN": 1.0}
    annotations = [
        {"span_id": chats[-1]["context"]["span_id"], "name": "helpful", "annotator_kind": kind}
        | {"result": {"score": score, "explanation": "It names the weather."}, "identifier": kind}
        for kind, score in kinds.items()
    ]
    get("/v1/span_annotations?sync=true", {"data": annotations})
    ids = "&".join(f"span_ids={span['context']['span_id']}" for span in spans)
    notes = get(f"/v1/projects/default/span_annotations?{ids}&limit=100")["data"]
    notes.sort(key=lambda note: note["identifier"])
    Path(sys.argv[1]).write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in [*spans, *notes]))
    dataset = mutate("createDataset", {"name": "chats"})
    mutate("addSpansToDataset", {"datasetId": dataset, "spanIds": [span["id"] for span in chats]})
    Path(sys.argv[2]).write_bytes(read(f"/v1/datasets/{dataset}/jsonl/openai_ft"))
finally:
    server.terminate()
    server.wait(30)
