"""A chat API whose answers follow a script, and groups that it judges."""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from art_nb.models.model import Model, TrainableModel
from art_nb.rewards.ruler import score_group
from art_nb.rollouts.trajectories import Trajectory, TrajectoryGroup

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no price list from the network
ASK = {"role": "user", "content": "Name an animal."}
KEY = "sk-very-secret"
GOOD = [0.2, 0.9, 0.5]  # scores of three trajectories


class Served(ThreadingHTTPServer):
    """A chat API whose answers follow a script; the last one is repeated."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answering)
        self.script, self.asked, self.keys, self.lock = [], [], [], threading.Lock()
        self.gate = threading.Event()  # no answer is sent before it is set
        self.gate.set()
        self.refuses_schema = False
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request, client_address):
        "Clients that give up waiting are part of the tests."

    def next(self, body):
        with self.lock:
            self.asked.append(body)
            return self.script.pop(0) if len(self.script) > 1 else self.script[0]


class Answering(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def send(self, status, body, **headers):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(raw), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self):
        card = {"id": "the-only-one", "object": "model", "created": 0, "owned_by": "x"}
        self.send(200, {"object": "list", "data": [card]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.append(self.headers.get("Authorization", ""))
        if self.server.refuses_schema and "response_format" in body:
            return self.send(400, {"error": {"message": "response_format is not supported here"}})
        status, said = self.server.next(body)
        self.server.gate.wait(120)
        if status != 200:
            message = f"{said} {self.headers.get('Authorization')}"  # some do repeat the key
            return self.send(status, {"error": {"message": message}}, **{"Retry-After": "0.01"})
        if isinstance(said, bytes):
            return self.send(200, said)
        n = body["messages"][1]["content"].count('<trajectory id="')
        message = {"role": "assistant", "content": said(n) if callable(said) else said}
        usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
        self.send(
            200,
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "usage": usage,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            },
        )


def table(scores, first=1):
    """A good answer."""
    return json.dumps(
        {
            "scores": [
                {"trajectory_id": str(i), "explanation": f"because {s}", "score": s}
                for i, s in enumerate(scores, first)
            ]
        }
    )


def well(n):
    return table([i / n for i in range(n)])


def says(*answers):
    """A script of answers with status 200."""
    return [(200, answer) for answer in answers]


def saying(text, **fields):
    return Trajectory(messages_and_choices=[ASK, {"role": "assistant", "content": text}], **fields)


def animals(n=3, **fields):
    return TrajectoryGroup(
        [saying(f"animal {i}", reward=0.25, **fields) for i in range(n)], metadata={"group_id": "g1"}
    )


def address(judge, model="strong"):
    return f"{model}@{judge.url}"


FAST = {"max_retries": 2, "timeout": 60.0, "api_key": KEY}


async def scored(judge, group=None, **options):
    return await score_group(group or animals(), address(judge), params=FAST, cache=None, **options)


def served_model(judge, trainable=False):
    """A model whose endpoint is the scripted judge's."""
    if not trainable:
        return Model(name="strong", project="p", inference_base_url=judge.url, inference_api_key=KEY)
    model = TrainableModel(name="player", project="p", base_model="tiny-base")
    model.inference_base_url, model.inference_api_key = judge.url, KEY
    return model


def parsed(message):
    """The JSON values in the user message, by tag."""
    parts = [part.split("\n") for part in message.split("\n\n") if "\n" in part]
    return {opening: json.loads(value) for opening, value, _ in parts}
