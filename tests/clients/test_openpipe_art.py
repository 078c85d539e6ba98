"""The unmodified client of openpipe-art trains on `art-nb run --serverless` (`make test-clients`)."""

import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("art") is None:  # not imported here: it patches transformers
    pytest.skip("openpipe-art is not in this environment: make test-clients", allow_module_level=True)

from support.serverless_parts import ServerlessProcess

from art_nb.runs.store import open_run
from art_nb.servers.serverless_protocol import ExperimentalConfig

SCRIPT = Path(__file__).with_name("openpipe_art_client.py")


class Client:
    """The training script in a process of its own."""

    def __init__(self, server, base_model, folder):
        ours = ("WANDB_API_KEY", "PYTHONPATH")
        env = {name: value for name, value in os.environ.items() if name not in ours}
        env |= {"ART_NB_API_KEY": server.key, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        self.log = open(folder / "client.log", "w+")
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), f"{server.url}/v1", base_model],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, cwd=folder, env=env,
        )  # fmt: skip

    def next(self, kind):
        """The values of the next line, which must be of this kind."""
        while line := self.process.stdout.readline():
            if line.startswith('{"kind"'):
                values = json.loads(line)
                assert values.pop("kind") == kind, values
                return values
        self.log.seek(0)
        raise AssertionError(self.log.read()[-3000:])

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self):
        self.process.kill()
        self.process.wait()
        self.log.close()


@pytest.fixture
def pair(tmp_path):
    """A server and a client of it."""
    for name in ("far", "near"):
        (tmp_path / name).mkdir()
    server = ServerlessProcess(tmp_path / "far")
    client = Client(server, "smollm2-135m", tmp_path / "near")
    yield server, client
    client.end()
    server.end()


def wait_for_training(run):
    """Wait until a job trains: it has its first event, and still its groups."""
    while not any(path.with_name("events.jsonl").exists() for path in run.glob("serverless/jobs/*/groups.jsonl")):
        time.sleep(0.01)


def train_step(server, client, step):
    """Train a step. The server is killed before the third one, and while it trains the fourth one."""
    assert client.next("before")["step"] == step
    if step == 2:
        server.restart()
    client.go_on()
    reward = client.next("training")["reward"]
    if step == 3:
        wait_for_training(server.folder / "yes-no-maybe" / "models" / "maybe-001")
        server.kill()
        assert client.next("lost") == {}
        server.start()
        client.go_on()
    trained = client.next("trained")
    assert trained["step"] == step + 1  # not one more: the repeated call got the result of the first one
    assert trained["artifact"] == f"art-nb/yes-no-maybe/maybe-001:step{step + 1}"
    assert trained["metrics"]["loss/learning_rate"] == pytest.approx(3e-4)
    return reward


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_openpipe_art_trains_on_our_server(pair, smollm2_dir):
    assert version("openpipe-art") == "0.5.18"
    server, client = pair
    registered = client.next("registered")
    assert registered["entity"] == "art-nb"
    assert {*registered["keys"]} <= {*ExperimentalConfig.model_fields}
    rewards = [train_step(server, client, step) for step in range(5)]
    print("rewards", rewards)
    assert sum(rewards[3:]) / 2 > sum(rewards[:2]) / 2 + 0.1
    served = client.next("served")
    assert served["names"][2] == "wandb-artifact:///art-nb/yes-no-maybe/maybe-001:step3"
    versions, replies = zip(*served["replies"], strict=True)
    assert versions == (5, 0, 3, 5, 3)
    latest, untrained, third, fifth, same_as_third = replies
    assert latest == pytest.approx(fifth, abs=0.05)  # cached prefixes change a logprob in bf16
    assert third == pytest.approx(same_as_third, abs=0.05)
    assert untrained != pytest.approx(fifth, abs=0.05)
    deleted = client.next("deleted")
    assert deleted == {"checkpoints": [5], "status": 404, "step": 5}
    assert client.next("failed")["message"].startswith("Training job failed: A choice has the token ID 1000000")
    sft = client.next("sft")
    assert sft["type"] == "training_failed"
    assert "art.Backend" in sft["data"]["error_message"]
    assert "learning_rate" in client.next("refused")["message"]
    run = server.folder / "yes-no-maybe" / "models" / "maybe-001"
    history = [row for row in open_run(run).history() if "train/reward" in row]
    assert [row["train/reward"] for row in history] == pytest.approx(rewards)  # recorded at the server
    client.next("end")
    assert client.process.wait(60) == 0
    assert not run.exists()
