"""`art.notify` tells when a run ends, fails or stalls, and never disturbs it."""

import asyncio
import json
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.registered import until

import art_nb as art
from art_nb.core.events import Warned
from art_nb.core.types import TrainError
from art_nb.training import notifications
from art_nb.training.run import AttachedRun

SECRET = "T00000000-B00000000-abcdef"
ASKED = {"steps": 1, "groups_per_step": 1, "rollouts_per_group": 2, "show": False}


@pytest.fixture
def webhook():
    """A server that keeps what it receives. Paths that contain "broken" get status 500."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(500 if "broken" in self.path else 200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def silent_server():
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def rollout_that(fails=False, waits_s=0.0):
    async def rollout(model, scenario):
        await asyncio.sleep(waits_s)
        if fails:
            raise ValueError("what a model said")
        messages = [{"role": "user", "content": "free"}]
        reply = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages, max_tokens=2, logprobs=True
        )
        choice = reply.choices[0]
        return art.Trajectory(messages_and_choices=[*messages, choice], reward=len(choice.message.content))

    return rollout


async def test_a_webhook_receives_the_end_of_a_run(named, local, webhook):
    url, received = webhook
    model = named()
    await model.register(local)
    run = art.train(model, rollout_that(), [1], **ASKED)
    art.notify(run, f"{url}/{SECRET}")
    await run
    await until(lambda: received)
    (message,) = received
    assert message["text"] == message["content"]
    assert message["text"].startswith("ttt is done: step 1 of 1, reward ")


async def test_a_failed_run_is_reported_without_its_text(named, local):
    texts = []

    async def keep(text):
        await asyncio.sleep(0.01)
        texts.append(text)

    model = named()
    await model.register(local)
    run = art.train(model, rollout_that(fails=True), [1], max_exceptions=0, **ASKED)
    art.notify(run, keep)
    with pytest.raises(Exception, match="what a model said"):
        await run
    await until(lambda: texts)
    assert texts[0].startswith("ttt failed with ")
    assert "what a model said" not in texts[0]
    attached = []
    art.notify(AttachedRun(model.store), attached.append)  # as another process sees it
    await until(lambda: attached)
    assert attached == texts


async def test_a_stall_is_reported_once(named, local):
    texts = []
    model = named()
    await model.register(local)
    run = art.train(model, rollout_that(waits_s=8), [1], **ASKED)
    art.notify(run, texts.append, stalled_s=2)
    await run
    await until(lambda: len(texts) >= 2)
    assert texts[0].startswith("ttt stalls after step 0 of 1. No event for ")
    assert texts[-1].startswith("ttt is done")
    assert sum("stalls" in text for text in texts[:2]) == 1


@pytest.mark.parametrize("kind", ["broken", "silent", "gone"])
async def test_a_bad_webhook_warns_once_and_the_run_goes_on(
    kind, named, local, webhook, silent_server, monkeypatch, capsys
):
    monkeypatch.setattr(notifications, "TIMEOUT_S", 1.0)
    url = {"broken": f"{webhook[0]}/broken", "silent": silent_server, "gone": "http://127.0.0.1:9"}[kind]
    model = named()
    await model.register(local)
    run = art.train(model, rollout_that(), [1], **ASKED)
    warnings = []
    run.bus.subscribe(warnings.append, Warned)
    art.notify(run, f"{url}/{SECRET}")
    await run
    assert run.status == "done"
    await until(lambda: [event for event in warnings if "art.notify" in event.message])
    shown = [event.message for event in warnings] + [str(capsys.readouterr())]
    assert not [text for text in shown if SECRET in text]
    assert len([event for event in warnings if "art.notify" in event.message]) == 1


async def test_a_function_that_raises_does_not_end_the_run(named, local):
    def broken(text):
        raise SystemError("no")

    model = named()
    await model.register(local)
    run = art.train(model, rollout_that(), [1], **ASKED)
    art.notify(run, broken)
    await run
    assert run.status == "done"


def test_the_target_is_checked_at_the_call(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TrainError, match="was not found"):
        art.notify(tmp_path, "desktop")
    for wrong in ("slack", "ftp://host/x", 3, None):
        with pytest.raises(TrainError, match="Invalid `to`"):
            art.notify(tmp_path, wrong)


@pytest.mark.skipif(sys.platform != "linux", reason="notify-send")
def test_the_desktop_gets_the_text_as_an_argument(tmp_path, monkeypatch):
    program, kept = tmp_path / "notify-send", tmp_path / "kept.json"
    program.write_text(f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open({str(kept)!r}, 'w'))\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    notifications.show_on_desktop()("--evil <b>; $(id)")
    assert json.loads(kept.read_text())[-3:] == ["--", "art_nb", "--evil &lt;b&gt;; $(id)"]


async def test_watching_can_be_stopped(named, local):
    texts = []
    model = named()
    await model.register(local)
    run = art.train(model, rollout_that(waits_s=3), [1], **ASKED)
    art.notify(run, texts.append)()
    await run
    time.sleep(1.5)
    assert not texts
