"""Calls of Weave, as its client sends them to its server: `python weave_writer.py FILE`."""

import gzip
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

requests = []


class Recorder(BaseHTTPRequestHandler):
    """A server that keeps all requests."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        """Keep a request."""
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        requests.append((self.path, body))
        self.reply(self.answer(body))

    def do_GET(self):
        """Answer a request for the server's facts."""
        self.reply({"min_required_weave_python_version": "0.0.0"})

    def answer(self, body):
        """Return the reply to a request."""
        if self.path == "/graphql":
            viewer = {"defaultEntity": {"name": "tests"}, "username": "tests", "name": "tests", "entity": "tests"}
            return {"data": {"viewer": viewer, "project": {"name": "tests", "internalId": "tests", "id": "tests"}}}
        if "feedback" in self.path:
            return {"id": "1", "created_at": "2026-11-26T00:00:00Z", "wb_user_id": "tests", "payload": {}}
        return {"digest": "d" * 43, "results": [{"digest": "d" * 43}], "res": [], "content": {}}

    def reply(self, value):
        """Send JSON."""
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Print nothing."""


server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_address[1]}"
os.environ |= {"WANDB_BASE_URL": url, "WF_TRACE_SERVER_URL": url, "WANDB_API_KEY": "0" * 40, "WEAVE_DISABLED": "false"}
import weave  # noqa: E402
from agent import SESSIONS, answer, client  # noqa: E402

weave.init("tests/tests")
llm = client()


@weave.op
def guide(question):
    """Answer a question."""
    return answer(llm, question)


for session, questions in SESSIONS.items():
    with weave.thread(session):
        for question in questions:
            _, call = guide.call(question)
            call.feedback.add("helpful", {"value": 0.5})
weave.finish()
rows = []
for path, body in requests:
    if "/calls/" in path or "/feedback/" in path:
        rows += json.loads(body)["batch"]
rows.sort(key=lambda row: row.get("started_at", "3"))  # the feedback is at the end
Path(sys.argv[1]).write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))
server.shutdown()
