"""A real server process and its clients: the contract, two at once, keys, garbage, cut lines, kills on both sides."""

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from io import BytesIO

import httpx
import numpy as np
import pytest
from support.registered import QUESTION, a_group, ask, better_and_worse, heard
from support.remote_parts import CALL, LONG, ROOT, Server, a_long_group, command
from support.remote_tests import (  # noqa: F401
    files,
    test_a_checkpoint_is_pulled,
    test_a_remote_backend_keeps_the_contract,
    test_a_whole_run,
    test_a_wrong_key_is_rejected,
    test_both_spellings_log_on_both_sides,
    test_cancelling_undoes_the_step,
    test_checkpoints_are_deleted_and_forked_there,
    test_events_come_to_the_bus_here,
    test_sft,
    test_tokens_that_the_model_does_not_know_are_refused,
    test_two_clients_of_one_run,
    until,
)
from support.warm import warm_python

import art_nb as art
from art_nb.backends.remote_client import RegisteredModel, SharedStore, normalize_url
from art_nb.backends.remote_protocol import MAX_CALL_BYTES, group_lines, tar_pieces, unpack
from art_nb.backends.remote_server import BackendServer
from art_nb.core.events import AdapterServed, CheckpointSaved, GradientStep, StepDone, Warned, to_json
from art_nb.core.types import ServeError, StoreError, TokenError, TrainError
from art_nb.rollouts.exchanges import ChatCompletionsExchange, TrajectoryExchanges
from art_nb.runs.store import record_events

pytestmark = pytest.mark.timeout(300)


class Line:
    """A TCP connection to a server that can be cut and mended."""

    def __init__(self, port):
        self.to, self.open, self.answers = port, True, True
        self.writers, self.asking = set(), set()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self.cut()
        self.server.close()

    async def _carry(self, reader, writer):
        if not self.open:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection("127.0.0.1", self.to)
        self.writers |= {writer, back}
        self.asking.add(writer)
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer))

    async def _copy(self, reader, writer):
        with suppress(OSError):
            while (data := await reader.read(1 << 16)) and (self.answers or writer not in self.asking):
                writer.write(data)
                await writer.drain()
        writer.close()

    def cut(self):
        self.open, writers, self.writers = False, self.writers, set()
        for writer in writers:
            writer.transport.abort()


class ShortLine(Line):
    """A line that is cut after so many bytes of the first answer."""

    def __init__(self, port, most):
        super().__init__(port)
        self.most = most

    async def _copy(self, reader, writer):
        if writer not in self.asking:
            return await super()._copy(reader, writer)
        writer.write(await reader.readexactly(self.most))
        await writer.drain()
        self.cut()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = Server(tmp_path_factory.mktemp("far"))
    yield started
    started.end()


# what works as it does locally


async def test_it_trains_what_a_local_backend_trains(named, far, tmp_path):
    here, there = named("here"), named("there")
    await there.register(far)
    group = await a_group(there)
    async with art.LocalBackend(path=tmp_path / "local", verbose=False) as local:
        await here.register(local)
        results = [
            await backend.train(model, [group], learning_rate=1e-2) for backend, model in ((local, here), (far, there))
        ]
        answers = [await ask(model, temperature=0) for model in (here, there)]
    for name in ("loss/train", "loss/grad_norm", "data/step_num_groups_trainable"):
        np.testing.assert_allclose(results[0].metrics[name], results[1].metrics[name], rtol=1e-4)
    assert answers[0].model_extra["token_ids"] == answers[1].model_extra["token_ids"]
    assert group.metadata["trained_step"] == 1


async def test_nothing_to_learn_is_said_here(named, far, capsys):
    model, warned = named(), heard(far, Warned)
    await model.register(far)
    group = await a_group(model)
    for trajectory in group:
        trajectory.reward = 0.5
    far.verbose = True
    assert (await far.train(model, [group])).step == 1
    assert "Nothing is learned" in warned[0].message
    assert capsys.readouterr().out.count(warned[0].message) == 1
    await far.train(model, [group])
    assert warned[1].is_repeated and warned[1].message not in capsys.readouterr().out


async def test_a_run_is_reported_here_and_not_on_the_server(named, far, server, monkeypatch):
    rows, groups = [], []

    class Here(art.Reporter):
        def row(self, metrics, step):
            rows.append((step, metrics["train/reward"]))

        def rollouts(self, sent, step):
            groups.extend(sent)

    model = named(report_to=[Here()])
    await model.register(far)
    group = better_and_worse([await ask(model), await ask(model)])
    await model.train([group])
    await model.end_reports()
    assert rows == [(1, 0.5)] and [len(group) for group in groups] == [2]
    assert len(model.store.history()) == 1


async def test_what_the_server_does_not_know_is_logged_here(named, server, tmp_path):
    model, prompted = named(), art.Model(name="prompted", project="p")
    async with server.client(tmp_path) as backend:
        for one in (model, prompted):
            await one.register(backend)
        await prompted.log(metrics={"accuracy": 0.5})
    await model.log(metrics={"accuracy": 0.5}, step=0)
    for one in (model, prompted):
        assert [row["val/accuracy"] for row in one.store.history()] == [0.5]


async def test_settings_of_the_endpoint_apply_on_the_server(named, far):
    model = named()
    await model.register(far)
    with pytest.raises(art.ArtError, match="'abacus'"):  # whether or not vLLM is there, which knows more of them
        await model.register(far, _openai_client_config={"server_args": {"tool_call_parser": "abacus"}})


async def test_one_directory_of_both_sides_is_written_once(named, server):
    async with server.client(server.folder) as backend:
        model = named()
        await model.register(backend)
        result = await backend.train(model, [await a_group(model)])
        await model.log(metrics=result.metrics, split="train", step=1)
        backend.bus.emit(StepDone(run="ttt", step=1))
    assert len(model.store.history()) == 1
    kept = [type(event) for event in model.store.events()]
    assert kept.count(CheckpointSaved) == kept.count(AdapterServed) == kept.count(StepDone) == 1


async def test_a_checkpoint_that_is_not_there(named, far, tmp_path):
    model, mine = named(), tmp_path / "mine"
    await model.register(far)
    for one, step, kind, said in (
        (model, 7, StoreError, "no checkpoint of step 7. Existing steps: 0"),
        (named("stranger"), None, StoreError, "Existing steps: none"),
        (named(project="../.."), None, StoreError, "Existing steps: none"),
        (model, -1, ServeError, "step"),
        (model, "../0000", ServeError, "step"),
    ):
        with pytest.raises(kind, match=said):
            await far._experimental_pull_model_checkpoint(one, step=step, local_path=str(mine))
    with pytest.raises(StoreError, match="step 7.*bucket my-bucket"):
        await far._experimental_pull_model_checkpoint(model, step=7, s3_bucket="my-bucket")
    assert not mine.exists()


async def test_a_checkpoint_is_for_the_owner_of_the_key(server, named, far, tmp_path):
    model = named()
    await model.register(far)
    async with server.client(tmp_path / "other", api_key="wrong") as other:
        with pytest.raises(ServeError, match="ART_NB_API_KEY") as caught:
            await other._experimental_pull_model_checkpoint(model)
    assert caught.value.status == 401
    headers = {"Authorization": f"Bearer {model.inference_api_key}"}
    assert httpx.post(f"{server.url}/checkpoints", headers=headers, content=b"{}", timeout=60).status_code == 401
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("most", [40, 700, 30_000])
async def test_a_checkpoint_whose_line_is_cut_is_not_there(server, named, far, tmp_path, most):
    model, mine = named(), tmp_path / "mine"
    await model.register(far)
    async with ShortLine(server.port, most) as line, server.client(tmp_path, base_url=line.url) as backend:
        with pytest.raises(ServeError, match="checkpoint download from .* failed"):
            await backend._experimental_pull_model_checkpoint(model, local_path=str(mine))
    assert not [path for path in tmp_path.iterdir() if "mine" in path.name]
    await far._experimental_pull_model_checkpoint(model, local_path=str(mine))
    assert sum(map(len, files(mine).values())) > most


async def test_a_call_whose_sender_has_hung_up_is_not_begun(server, named, far):
    model = named()
    await model.register(far)
    group = await a_long_group(model)
    head = {"verb": "train", "choices": len(group.trajectories), "run": far._registration(model).run, "options": {}}
    body = json.dumps(head).encode() + b"\n" + group_lines([group])
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    lines = [
        f"POST /calls/{secrets.token_hex(16)} HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {server.key}",
        f"Content-Length: {len(body)}",
        "",
        "",
    ]
    writer.write("\r\n".join(lines).encode() + body)
    await writer.drain()
    writer.close()
    await writer.wait_closed()  # otherwise the connection stays open while `train` writes its own request
    assert (await far.train(model, [group])).step == 1


async def test_events_of_two_concurrent_calls_are_written_once(tmp_path):
    async with art.Backend(path=tmp_path, verbose=False) as backend:
        store = SharedStore(tmp_path / "run", backend.bus)
        backend.bus.subscribe(lambda event: time.sleep(0.001))
        backend._registered["run"] = RegisteredModel("run", "key", record_events(store, backend.bus, "run"), store)
        said = [to_json(StepDone(step=step, run="run")) for step in range(100)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(backend._deliver_event, said))
    assert not list(store.events())


# two clients


class RoomForOne(art.LocalBackend):
    """A backend with room for one model, as a small cluster has it."""

    async def register(self, model):
        if self._runtimes:
            raise ServeError("There is no room.", status=503)
        await super().register(model)


async def test_a_model_whose_clients_have_closed_makes_room(named, tmp_path):
    with BackendServer(RoomForOne(path=tmp_path / "far", verbose=False), port=0) as server:
        options = {"base_url": f"http://127.0.0.1:{server.port}", "api_key": server.api_key, "verbose": False}
        async with art.Backend(path=tmp_path / "first", **options) as first:
            await named("one").register(first)
            async with art.Backend(path=tmp_path / "second", **options) as second:
                with pytest.raises(ServeError, match="no room"):
                    await named("two").register(second)
                await first.close()
                model = named("two")
                await model.register(second)
                await ask(model)


async def test_two_models_at_once(named, far):
    models = [named("one"), named("two", lora_config={"rank": 2})]
    for model in models:
        await model.register(far)
    await asyncio.gather(*[far.train(model, [await a_group(model)]) for model in (*models, models[0])])
    assert [await model.get_step() for model in models] == [2, 1]


# errors


async def test_errors_are_those_of_a_local_backend(named, far, tmp_path):
    said = []
    async with art.LocalBackend(path=tmp_path / "local", verbose=False) as local:
        for backend in (local, far):
            model = named()
            await model.register(backend)
            group = await a_group(model)
            group.trajectories[0].messages_and_choices[-1].logprobs.content.pop()
            for call in (
                named("odd", base_model="smolm2-135m").register(backend),
                named("odder", lora_config={"target_modules": ["nothing"]}).register(backend),
                backend.train(model, [group]),
                backend.train(named("stranger"), []),
            ):
                with pytest.raises(art.ArtError) as caught:
                    await call
                said.append((type(caught.value), str(caught.value)))
    assert said[:4] == said[4:]
    assert [kind for kind, _ in said[4:]] == [StoreError, TrainError, TokenError, ServeError]


async def test_what_cannot_travel_is_refused_here(named, far):
    model = named()
    await model.register(far)
    for options in ({"loss_fn": lambda tensors: 0}, {"learning_rate": float("nan")}, {"model": "x"}):
        with pytest.raises((TrainError, TypeError)):
            await far.train(model, [await a_group(model)], **options)
    assert await model.get_step() == 0


async def test_tokens_of_two_models_are_refused_here(named, far):
    models = [named("one"), named("two")]
    for model in models:
        await model.register(far)
    seen = TrajectoryExchanges()
    for model in models:
        request, now = {"model": model.name, "messages": QUESTION}, datetime.now()
        reply = await model.openai_client().chat.completions.create(**request, max_tokens=8, logprobs=True)
        seen.chat_completions.append(
            ChatCompletionsExchange(request=request, response=reply, start_time=now, end_time=now)
        )
    with pytest.raises(TokenError, match="2 models"):
        await far.train(models[0], [art.TrajectoryGroup([art.Trajectory(exchanges=seen, reward=1.0)])])
    assert await models[0].get_step() == 0


# keys


def test_the_key_is_never_displayed(tmp_path, tiny_model_dir, named):
    server = Server(tmp_path / "far", key="a-key-that-somebody-chose")

    async def use():
        async with server.client(tmp_path / "near") as backend:
            model = named()
            await model.register(backend)
            await backend.train(model, [await a_group(model)])
            with pytest.raises(ServeError):
                await named("odd", base_model="nothing").register(server.client(tmp_path / "near", api_key="wrong"))
            return model.inference_api_key

    lesser = asyncio.run(use())
    status, said = server.end()
    assert status == 0
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for key in (server.key, lesser):
        assert key not in said
        assert not [content for content in written if key.encode() in content]


@pytest.mark.parametrize(
    ("options", "env", "said"),
    [
        (["--host", "0.0.0.0"], {}, "0.0.0.0 is open to other machines"),
        (["--host", "0.0.0.0"], {"ART_NB_API_KEY": "short"}, "16 or more"),
        (["--port", "99999"], {}, "Cannot serve"),
        (["--host", "203.0.113.7"], {"ART_NB_API_KEY": "x" * 16}, "Cannot serve"),
    ],
)
def test_what_is_not_served(tmp_path, options, env, said):
    line, env = [*command(), "run", "--path", str(tmp_path), *options], os.environ | {"PYTHONPATH": str(ROOT)} | env
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


# what arrives is not trusted

HEAD = {"verb": "train", "choices": 0, "run": "0" * 16, "options": {}}
CHOICE = {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": "A1"}}


def body(*lines, **said):
    return "\n".join(map(json.dumps, [HEAD | said, *lines])).encode()


def a_tar(name, kind=tarfile.REGTYPE, to="../secret"):
    """A tar with one member."""
    content, member = BytesIO(), tarfile.TarInfo(name)
    member.type, member.linkname = kind, to
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.addfile(member)
    return content.getvalue()


@pytest.fixture
def whole(tmp_path):
    """What is sent for a checkpoint."""
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "adapter_config.json").write_text("{}")
    head = json.dumps({"x": {"dtype": "U8", "shape": [5000], "data_offsets": [0, 5000]}}).encode()
    (saved / "adapter_model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(5000))
    return b"".join(tar_pieces(saved))


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"<html>",
        b"\x00" * 2000,
        b"\xff" * 2000,
        a_tar("../out"),
        a_tar("a/../../out"),
        a_tar("/out"),
        a_tar("out"),
        a_tar("link", tarfile.SYMTYPE),
        a_tar("link", tarfile.LNKTYPE),
        a_tar("link", tarfile.SYMTYPE, "/etc"),
        a_tar("pipe", tarfile.FIFOTYPE),
        a_tar("device", tarfile.CHRTYPE),
        100,
        600,
        1024,
        1100,
        3000,
    ],
)
def test_what_is_no_checkpoint_is_not_laid_down(tmp_path, whole, sent):
    (tmp_path / "here").mkdir()
    unpack(BytesIO(whole), tmp_path / "whole")
    assert files(tmp_path / "whole") == files(tmp_path / "saved")
    with pytest.raises(ServeError, match="No files were kept"):
        unpack(BytesIO(whole[:sent] if isinstance(sent, int) else sent), tmp_path / "here" / "mine")
    assert {path.name for path in tmp_path.iterdir()} == {"here", "saved", "whole"}
    assert not [*(tmp_path / "here").iterdir()]


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\n",
        b"\x00\xff" * 500,
        b"GET / HTTP/1.1\r\n\r\n",
        b"null",
        b"[]",
        b'{"verb": "train"',
        b"[" * 100_000,
        b'{"verb": ["train"]}',
        b'{"verb": "__class__", "choices": 0}',
        body(run="../../../etc"),
        body(run="0" * 15),
        body(extra=1),
        body(options=[]),
        body(choices=-1),
        body(choices=1),
        body(options={"learning_rate": float("nan")}),
        body(verb="log", split="../up", step=1, row={}, grouped=True),
        body(verb="log", split="val", step=-1, row={}),
        body("no group"),
        body({"trajectories": 3}),
        body({"trajectories": [{"reward": "high"}]}),
        body({"trajectories": [{"messages_and_choices": [CHOICE | {"index": "first"}]}]}, choices=1),
        body() + b"\n{not json",
        body() + b"\n" + b"[" * 100_000,
        json.dumps(
            {
                "verb": "fork",
                "choices": 0,
                "from_model": "../..",
                "model": {"name": "a", "project": "b", "run_name": "a", "base_model": "c"},
            }
        ).encode(),
    ],
)
def test_garbage_is_refused_in_a_sentence(server, sent):
    reply = server.post(sent)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["kind"] == "ServeError"
    assert error["message"].endswith(".")
    assert len(error["message"]) < 400
    assert "\n" not in error["message"]
    assert server.process.poll() is None


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", f"/calls/{CALL}", 404),
        ("DELETE", f"/calls/{CALL}", 404),
        ("POST", "/calls/1", 400),
        ("GET", "/", 404),
        ("PUT", f"/calls/{CALL}", 405),
        ("GET", "/runs/0000000000000000/v1/models", 404),
        ("GET", f"/calls/{'%2e' * 40}", 404),
    ],
)
def test_other_paths(server, method, path, status):
    reply = httpx.request(method, server.url + path, headers={"Authorization": f"Bearer {server.key}"}, timeout=60)
    assert reply.status_code == status
    assert reply.json()["error"]["message"]


@pytest.mark.parametrize("key", ["right", "wrong"])
def test_a_giant_body_is_not_read(server, key):
    """It is announced and never sent: an answer comes all the same."""
    key = server.key if key == "right" else key
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as line:
        line.sendall(
            f"POST /calls/{CALL} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Length: {MAX_CALL_BYTES + 1}\r\n\r\n".encode()
            + b"x" * 4096
        )
        assert line.recv(4096).split()[1] == (b"413" if key == server.key else b"401")


async def test_too_much_is_refused_before_it_is_sent(named, far, monkeypatch):
    model = named()
    await model.register(far)
    group = await a_group(model)
    monkeypatch.setattr("art_nb.backends.remote_client.MAX_CALL_BYTES", len(group_lines([group])))
    with pytest.raises(TrainError, match="Pass fewer groups"):
        await far.train(model, [group])


async def test_what_was_trained_is_not_sent_again(named, far, server, monkeypatch):
    model = named()
    await model.register(far)
    group = await a_group(model)
    step = (await far.train(model, [group])).step
    monkeypatch.setattr("art_nb.backends.remote_client.MAX_CALL_BYTES", len(group_lines([group])))
    await model.log([group], split="train", step=step)
    with pytest.raises(TrainError, match="Pass fewer groups"):
        await model.log([group], split="val", step=step)
    kept = art.RunStore(server.folder / model.project / "models" / "ttt")
    ours, theirs = (store.read_groups("train", step)[0] for store in (model.store, kept))
    assert ours.trajectories == theirs.trajectories
    assert [row["step"] for row in kept.history()] == [step]


async def test_something_else_at_the_address(named, tmp_path):
    async def hello(reader, writer):
        await reader.read(1 << 16)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(hello, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(ServeError, match="is not `art-nb run`"):
            await named().register(art.Backend(base_url=f"http://127.0.0.1:{port}", path=tmp_path))
    with pytest.raises(ServeError, match="does not answer"):
        await named().register(art.Backend(base_url=f"http://127.0.0.1:{port}", path=tmp_path))
    with pytest.raises(ServeError, match="Invalid `base_url='127.0.0.1:7999'`"):
        art.Backend(base_url="127.0.0.1:7999")


# lines that are cut, and ends


async def test_a_truncated_line_is_repaired(server, named, tmp_path):
    async with Line(server.port) as line, server.client(tmp_path, base_url=line.url, patience_s=60) as backend:
        model, steps = named(), heard(backend, GradientStep)
        await model.register(backend)
        group = await a_long_group(model)
        training = asyncio.create_task(backend.train(model, [group], **LONG))
        await until(lambda: steps, training)
        line.cut()
        await asyncio.sleep(0.3)
        line.open = True
        assert (await training).step == 1
        numbers = [event.micro_batch for event in steps]
        assert numbers == sorted(set(numbers)), "each event once"
        assert await model.get_step() == 1


async def test_a_lost_call_is_found_again(server, named, tmp_path):
    async with Line(server.port) as line, server.client(tmp_path, base_url=line.url, patience_s=0) as backend:
        model, steps = named(), heard(backend, GradientStep)
        await model.register(backend)
        group = await a_long_group(model)
        training = asyncio.create_task(backend.train(model, [group], **LONG))
        await until(lambda: steps, training)
        line.cut()
        with pytest.raises(ServeError, match="make the same call again"):
            await training
        with pytest.raises(ServeError, match="does not answer"):
            await backend.train(model, [group], **LONG)
        line.open = True
        assert (await backend.train(model, [group], **LONG)).step == 1
        assert await model.get_step() == 1
        assert (await backend.train(model, [group], **LONG)).step == 2


async def test_a_request_with_a_lost_reply_is_sent_again(server, named, far, tmp_path):
    async with Line(server.port) as line, server.client(tmp_path, base_url=line.url, patience_s=0) as backend:
        mine, yours = named(), named()
        await mine.register(backend)
        await yours.register(far)
        line.answers = False
        with pytest.raises(ServeError, match="does not answer"):
            await mine.get_step()
        await far.train(yours, [await a_group(yours)])
        line.answers = True
        assert await mine.get_step() == 1


CLIENT = """
import asyncio, sys
sys.path[:0] = [{tests!r}]
import art_nb as art
from art_nb.core.events import GradientStep
from support.remote_parts import LONG, a_long_group

async def main():
    backend = art.Backend(base_url={url!r}, api_key={key!r}, path={path!r}, verbose=False)
    model = art.TrainableModel(name="ttt", project={project!r}, base_model={base!r})
    await model.register(backend)
    backend.bus.subscribe(lambda event: print("training", flush=True), GradientStep)
    await backend.train(model, [await a_long_group(model)], **LONG)
    print("trained", flush=True)

asyncio.run(main())
"""


async def test_a_client_that_is_killed_leaves_its_step_behind(server, named, tmp_path, tiny_model_dir):
    model = named()
    source = CLIENT.format(
        tests=str(ROOT / "tests"),
        url=server.url,
        key=server.key,
        path=str(tmp_path / "killed"),
        project=model.project,
        base=str(tiny_model_dir),
    )
    client = await asyncio.create_subprocess_exec(
        warm_python(), "-c", source, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert await client.stdout.readline() == b"training\n"
    client.kill()
    assert b"trained" not in (await client.communicate())[0]
    async with server.client(tmp_path / "again") as backend:
        await model.register(backend)  # waits for what is under way
        assert await model.get_step() == 1
        await ask(model, "ttt@1")
        assert (await backend.train(model, [await a_group(model)])).step == 2


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_server_that_ends_in_the_middle(named, tmp_path, how):
    server = Server(tmp_path / "far")
    backend = server.client(tmp_path / "near", patience_s=1)
    model, steps = named(), heard(backend, GradientStep)
    await model.register(backend)
    group = await a_long_group(model)
    await backend.train(model, [await a_group(model)])
    training = asyncio.create_task(backend.train(model, [group], **LONG))
    await until(lambda: steps and steps[-1].micro_batches > 20, training)
    status, _ = await asyncio.to_thread(server.end, how)
    assert status == (0 if how == signal.SIGTERM else -signal.SIGKILL)
    with pytest.raises((ServeError, TrainError)):
        await training
    again = Server(tmp_path / "far", key=server.key, port=server.port)
    with pytest.raises(ServeError, match="register"):
        await backend.train(model, [group])
    await model.register(backend)
    assert await model.get_step() == 1
    assert (await backend.train(model, [await a_group(model)])).step == 2
    await backend.close()
    assert again.end()[0] == 0
    await backend.close()


async def test_closing_without_a_server(named, tmp_path):
    server = Server(tmp_path / "far")
    backend = server.client(tmp_path / "near")
    await named().register(backend)
    server.end(signal.SIGKILL)
    await backend.close()


def test_a_client_needs_no_torch():
    source = "import sys; import art_nb as art; art.Backend(); print({'torch', 'transformers'} & {*sys.modules})"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("host", "warned"),
    [("localhost", False), ("127.0.0.7", False), ("[::1]", False), ("gpu.example", True), ("10.0.0.1", True)],
)
def test_clear_text_is_warned_of(host, warned):
    said = []
    normalize_url(f"http://{host}:7999", lambda *warning: said.append(warning))
    assert bool(said) == warned


def test_it_is_had_by_name():
    assert isinstance(art.backend("remote", base_url="http://127.0.0.1:1"), art.Backend)
