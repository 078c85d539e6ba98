"""Connections without a key: deadlines, limits, file descriptors, TLS, and the number of loaded models."""

import asyncio
import socket
import ssl
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from support.registered import a_group, ask
from support.remote_parts import Server

import art_nb as art
from art_nb.backends.remote_calls import CallRegistry
from art_nb.backends.remote_protocol import ModelForm
from art_nb.backends.remote_server import BackendServer
from art_nb.core.types import ServeError
from art_nb.serving import http_server
from art_nb.serving.http_server import HttpServer, bind_socket, mark_authenticated

CERTIFICATE = Path(__file__).parent / "certificates" / "localhost.pem"  # self-signed, for tests only; with its key
HALF = b"POST /calls/x HTTP/1.1\r\nHost: x\r\n"
WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer right\r\n\r\n"


async def app(scope, receive, send):
    """Answer 200 to the key `right` and 401 to others."""
    status = 401
    if (b"authorization", b"Bearer right") in scope["headers"]:
        mark_authenticated(scope)
        status = 200
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
async def serve():
    """Start servers that end with the test; returns their address."""
    running = []

    async def start(*tls):
        server = HttpServer(app, bind_socket("127.0.0.1", 0), *tls)
        running.append((server, asyncio.create_task(server.serve())))
        await asyncio.to_thread(server.ready.wait)
        server.address = server.listener.getsockname()
        return server

    yield start
    for server, serving in running:
        server.should_exit = True
        await serving


async def send(server, *parts, every=0.0):
    """Open a connection, send each part, and return its streams."""
    reader, writer = await asyncio.open_connection(*server.address)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(every)
    return reader, writer


async def answer(reader):
    """The status of the next answer; nothing if the connection was closed."""
    try:
        return (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 120)).split()[1]
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return b""


@pytest.mark.parametrize(
    "parts", [[], [HALF], [b"G"], [WHOLE.replace(b"right", b"wrong")], [WHOLE, HALF], [WHOLE + HALF], [b"\r\n"] * 3]
)
async def test_a_connection_without_a_whole_head_and_key_is_closed(serve, monkeypatch, parts):
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.2)
    server = await serve()
    reader, writer = await send(server, *parts)
    while await answer(reader):
        pass
    assert not server.server_state.connections
    writer.close()


async def test_a_head_that_arrives_byte_by_byte_does_not_move_the_deadline(serve, monkeypatch):
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.3)
    reader, writer = await send(await serve())

    async def trickle():
        while True:
            writer.write(b"G")
            await asyncio.sleep(0.05)

    trickling = asyncio.create_task(trickle())
    assert await answer(reader) == b""
    trickling.cancel()
    writer.close()


async def test_a_client_with_the_key_keeps_its_connection(serve, monkeypatch):
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 3)
    server = await serve()
    reader, writer = await send(server, WHOLE)
    assert await answer(reader) == b"200"
    stranger, strange = await send(server)
    assert await answer(stranger) == b""  # the deadline has passed even for who came later
    strange.close()
    writer.write(WHOLE)
    assert await answer(reader) == b"200"
    writer.close()


async def test_the_oldest_connections_without_a_key_make_room(serve, monkeypatch):
    monkeypatch.setattr(http_server, "EVICT_AFTER_S", 0.05)
    server = await serve()
    server.limit = 8
    strangers = [await send(server, HALF) for _ in range(30)]
    reader, writer = await send(server, WHOLE)
    assert await answer(reader) == b"200"
    assert sum(not c.authenticated for c in server.server_state.connections) <= 8
    for _, stranger in strangers:
        stranger.close()
    writer.close()


async def test_connections_with_the_key_are_not_limited(serve):
    server = await serve()
    server.limit = 8
    clients = [await send(server, WHOLE) for _ in range(50)]
    assert [await answer(reader) for reader, _ in clients] == [b"200"] * 50
    assert len(server.server_state.connections) == 50
    for _, writer in clients:
        writer.close()


async def test_tls(serve, monkeypatch):
    server = await serve(CERTIFICATE)
    context = ssl.create_default_context(cafile=CERTIFICATE)
    stranger, writer = await send(server, b"\x16\x03\x01")  # a handshake that never continues
    plain, plain_writer = await send(server, WHOLE)
    async with httpx.AsyncClient(verify=context, timeout=60) as client:
        reply = await client.get(f"https://127.0.0.1:{server.address[1]}/", headers={"Authorization": "Bearer right"})
    assert reply.status_code == 200
    assert await answer(plain) == b""
    writer.close()
    plain_writer.close()
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.5)
    stranger, writer = await send(server, b"\x16\x03\x01")
    assert await answer(stranger) == b""
    writer.close()


@pytest.mark.parametrize(
    ("certfile", "keyfile", "message"),
    [
        (None, CERTIFICATE, "needs --certfile"),
        ("missing.pem", None, "Could not load the TLS certificate missing.pem"),
        (__file__, None, "PEM"),
        (CERTIFICATE, __file__, "Pass PEM files that match"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_an_error_before_serving(tmp_path, certfile, keyfile, message):
    with pytest.raises(ServeError, match=message):
        BackendServer(art.LocalBackend(path=tmp_path), port=0, certfile=certfile, keyfile=keyfile)


@pytest.mark.timeout(300)
async def test_a_model_is_trained_over_tls(tmp_path, named, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    with BackendServer(art.LocalBackend(path=tmp_path / "far", verbose=False), port=0, certfile=CERTIFICATE) as host:
        assert host.line.startswith('backend = art.Backend(base_url="https://127.0.0.1:')
        url = f"https://127.0.0.1:{host.port}"
        async with art.Backend(base_url=url, api_key=host.api_key, path=tmp_path / "near", verbose=False) as backend:
            model = named()
            await model.register(backend)
            assert (await backend.train(model, [await a_group(model)])).step == 1


# training continues under attack


class Strangers:
    """Connections that send half a head and then one byte a second; each comes back when it is dropped."""

    def __init__(self, port, how_many):
        self.port, self.dropped, self.end = port, 0, threading.Event()
        self.threads = [threading.Thread(target=self._attack, args=[how_many // 4], daemon=True) for _ in range(4)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.end.set()
        for thread in self.threads:
            thread.join()

    def _attack(self, how_many):
        lines = [None] * how_many
        while not self.end.is_set():
            for n, line in enumerate(lines):
                try:
                    if line is None:
                        line = lines[n] = socket.create_connection(("127.0.0.1", self.port), timeout=5)
                        line.sendall(HALF)
                    line.sendall(b"x")
                except OSError:
                    self.dropped, lines[n] = self.dropped + 1, None
            self.end.wait(1)
        for line in filter(None, lines):
            line.close()


@pytest.mark.timeout(300)
async def test_training_continues_beside_400_half_open_connections(tmp_path, named):
    server = Server(tmp_path / "far", max_files=256)
    try:
        async with server.client(tmp_path / "near") as backend:
            model = named()
            await model.register(backend)
            with Strangers(server.port, 400) as strangers:
                for step in (1, 2):
                    assert (await backend.train(model, [await a_group(model)])).step == step
                assert (await ask(model)).message.content is not None
                while strangers.dropped < 100:  # the attack was one
                    await asyncio.sleep(0.1)
            assert len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())) < 250
    finally:
        status, log = server.end()
    assert status == 0
    assert len(log) < 20_000


async def test_without_free_descriptors_the_server_waits_and_logs_once(serve, monkeypatch, caplog):
    """Accepting fails as it does when no file descriptor is free; the client's connection waits and is then served."""
    server = await serve()
    limit, hard = http_server.resource.getrlimit(http_server.resource.RLIMIT_NOFILE)
    client = socket.socket()
    client.settimeout(60)
    highest = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
    spare = []
    http_server.resource.setrlimit(http_server.resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            spare.extend(iter(socket.socket, None))
        await asyncio.get_running_loop().run_in_executor(None, client.connect, server.address)
        client.sendall(WHOLE)
        deadline = time.monotonic() + 60
        while not caplog.records and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await asyncio.sleep(1)  # several attempts
    finally:
        http_server.resource.setrlimit(http_server.resource.RLIMIT_NOFILE, (limit, hard))
        for each in spare:
            each.close()
    assert (await asyncio.to_thread(client.recv, 100)).split()[1] == b"200"
    client.close()
    refusals = [r.message for r in caplog.records if r.name == "art_nb.serving.http_server"]
    assert len(refusals) == 1
    assert "Too many open files" in refusals[0]
    assert not [r for r in caplog.records if r.exc_info]


# the number of loaded models


@pytest.mark.timeout(300)
async def test_the_least_recently_used_model_is_released(tmp_path, named, monkeypatch):
    monkeypatch.setattr("art_nb.backends.remote_calls.MAX_MODELS", 2)
    local = art.LocalBackend(path=tmp_path / "far", verbose=False)
    with BackendServer(local, port=0) as host:
        url = f"http://127.0.0.1:{host.port}"
        async with art.Backend(base_url=url, api_key=host.api_key, path=tmp_path / "near", verbose=False) as backend:
            first, second, third = (named(name) for name in ("first", "second", "third"))
            await first.register(backend)
            assert (await backend.train(first, [await a_group(first)])).step == 1
            await second.register(backend)
            await ask(first)  # so the second was used least recently
            await third.register(backend)
            assert {home.name for home in local._runtimes.values()} == {"first", "third"}
            with pytest.raises(openai.NotFoundError, match="to make room for another one"):
                await ask(second)
            await second.register(backend)  # it comes back, and the first goes
            assert await ask(second)
            await first.register(backend)
            assert await first.get_step() == 1


@pytest.mark.timeout(300)
async def test_a_model_in_use_is_not_released(tmp_path, tiny_model_dir, monkeypatch):
    monkeypatch.setattr("art_nb.backends.remote_calls.MAX_MODELS", 1)
    busy, other = (
        ModelForm(name=name, project="p", run_name=name, base_model=str(tiny_model_dir)) for name in ("busy", "other")
    )
    registry = CallRegistry(art.LocalBackend(path=tmp_path, verbose=False))
    await registry.load(busy)
    async with registry.locks[busy.run]:  # as a step that is being trained holds it
        with pytest.raises(ServeError, match="1 models are in use") as caught:
            await registry.load(other)
    assert caught.value.status == 503
    assert list(registry.models) == [busy.run]
    await registry.load(other)
    assert list(registry.models) == [other.run]
    await registry.close()


def test_the_file_limit_is_raised_in_art_nb_run(tmp_path):
    server = Server(tmp_path)
    try:
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
        soft, hard = next(line.split()[3:5] for line in limits.splitlines() if line.startswith("Max open files"))
        assert hard == "unlimited" or int(soft) >= min(int(hard), http_server.MAX_OPEN_FILES)
    finally:
        server.end()
