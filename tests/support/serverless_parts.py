"""A real `art-nb run --serverless` in a process of its own, and what a client of the protocol sends to it."""

import json
import signal
import time

import httpx
from support.remote_parts import Server

QUESTION = {"role": "user", "content": "free: A1 B1"}
JOBS = "/v1/preview/training-jobs"
FINAL = ("training_ended", "training_failed")


class ServerlessProcess:
    """The server, which can be killed and started again, and an HTTP client with its key."""

    def __init__(self, folder, key="0123456789abcdef", port=0):
        self.folder, self.key, self.port = folder, key, port
        self.start()

    def start(self):
        self.server = Server(self.folder, self.key, self.port, "--serverless")
        self.port, headers = self.server.port, {"Authorization": f"Bearer {self.key}"}
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=120)

    def end(self, how=signal.SIGTERM):
        self.http.close()
        return self.server.end(how)

    def kill(self):
        """End it as a power cut does."""
        self.end(signal.SIGKILL)

    def restart(self):
        self.kill()
        self.start()

    def register(self, base, name="agent", project="ttt", **fields):
        """The ID of a model."""
        body = {"entity": None, "project": project, "name": name, "base_model": str(base), "return_existing": True}
        answer = self.http.post("/v1/preview/models", json=body | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    def sample(self, name="agent", project="ttt", **fields):
        """Replies to QUESTION."""
        model = f"wandb-artifact:///art-nb/{project}/{name}"
        body = {"model": model, "messages": [QUESTION], "max_tokens": 8, "n": 6}
        answer = self.http.post("/v1/chat/completions", json=body | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    def submit(self, job):
        """The ID of a job."""
        answer = self.http.post(JOBS, content=job)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    def events(self, job_id):
        return self.http.get(f"{JOBS}/{job_id}/events").json()["data"]

    def wait(self, job_id, timeout_s=200):
        """The events of a job that has ended."""
        end = time.monotonic() + timeout_s
        while not (events := self.events(job_id)) or events[-1]["type"] not in FINAL:
            assert time.monotonic() < end, events
            time.sleep(0.05)
        return events

    def steps(self, model_id):
        """The steps of a model, the latest first."""
        page = self.http.get(f"/v1/preview/models/{model_id}/checkpoints").json()
        assert page["has_more"] is False
        return [checkpoint["step"] for checkpoint in page["data"]]


def job_body(model_id, choices, **config):
    """A training job as bytes, in ART's JSON form: a reward of 0 is left out."""
    trajectories = [
        {"messages_and_choices": [QUESTION, choice], **({"reward": float(n % 3)} if n % 3 else {})}
        for n, choice in enumerate(choices)
    ]
    body = {
        "model_id": model_id,
        "trajectory_groups": [{"trajectories": trajectories}],
        "experimental_config": {"learning_rate": 1e-3, "ppo": None} | config,
    }
    return json.dumps(body).encode()
