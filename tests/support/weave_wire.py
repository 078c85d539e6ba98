"""What Weave's client sends: a server that records all requests, and answers them or passes them to a real server."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

PROJECT = "tests/2048"


class Wire(ThreadingHTTPServer):
    """Records requests. Without `upstream`, it answers those that Weave's client makes during a run."""

    daemon_threads = True

    def __init__(self, upstream=""):
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream, self.requests, self.fails_after = upstream, [], None
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def sent(self, *ends):
        """The bodies of all requests whose path has one of these ends."""
        return [json.loads(body) for path, body in self.requests if path.endswith(ends)]

    def calls(self):
        """The calls, with their starts and ends together."""
        calls = [call for body in self.sent("/calls/complete") for call in body["batch"]]
        starts = {body["start"]["id"]: body["start"] for body in self.sent("/call/start")}
        ends = [body["end"] for body in self.sent("/call/end")]
        return calls + [starts[end["id"]] | end for end in ends]

    def feedback(self):
        """All feedback."""
        single = self.sent("/feedback/create")
        return single + [each for body in self.sent("/feedback/batch/create") for each in body["batch"]]

    def n_bytes(self):
        """The bytes of all bodies."""
        return sum(len(body) for _, body in self.requests)


class Handler(BaseHTTPRequestHandler):
    """Answers a request."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Print nothing."""

    def do_GET(self):
        self.answer(b"")

    def do_POST(self):
        self.answer(self.rfile.read(int(self.headers.get("content-length") or 0)))

    def answer(self, body):
        self.server.requests.append((self.path, body))
        limit = self.server.fails_after
        if limit is not None and len(self.server.requests) > limit:
            status, reply = 500, b"{}"
        elif self.server.upstream:
            status, reply = self.passed_on(body)
        else:
            status, reply = 200, json.dumps(known_reply(self.path, body)).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def passed_on(self, body):
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "content-length", "connection")}
        reply = httpx.request(self.command, self.server.upstream + self.path, content=body, headers=headers, timeout=60)
        return reply.status_code, reply.content


def known_reply(path, body):
    """What Weave's server answers."""
    digest = hashlib.sha256(body).hexdigest()
    if path.endswith("/server_info"):
        return {"min_required_weave_python_version": "0.0.1"}
    if path.endswith("/graphql"):
        name = (json.loads(body).get("variables") or {}).get("name") or "project"
        viewer = {"id": "tester", "username": "tester", "defaultEntity": {"name": "tests"}}
        return {"data": {"viewer": viewer, "model": {"name": name}, "project": {"name": name}}}
    if path.endswith(("/obj/create", "/file/create", "/files/create")):
        return {"digest": digest}
    if path.endswith("/table/create"):
        rows = json.loads(body)["table"]["rows"]
        return {"digest": digest, "row_digests": [hashlib.sha256(repr(row).encode()).hexdigest() for row in rows]}
    if path.endswith("/feedback/batch/create"):
        made = {"created_at": "2026-11-18T11:00:00Z", "wb_user_id": "tester", "payload": {}}
        return {"res": [made | {"id": each.get("id") or digest} for each in json.loads(body)["batch"]]}
    return {"id": digest, "trace_id": digest}
