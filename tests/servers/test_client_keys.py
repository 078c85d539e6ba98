"""Keys and quotas of each client, for both servers: clients do not see or block each other."""

import asyncio
import copy
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import httpx
import numpy as np
import pytest
from support.remote_parts import ROOT, Server, command
from support.serverless_parts import JOBS, QUESTION, ServerlessProcess, job_body
from support.tinker_parts import PROTOBUF, TinkerHttp, request_message, serving

import art_nb as art
from art_nb.core.types import RequestError, ServeError
from art_nb.servers.client_keys import Client, ClientKeys, current_client, read_keys
from art_nb.servers.serverless_protocol import ModelRequest
from art_nb.servers.serverless_service import ServerlessService

pytestmark = pytest.mark.timeout(300)
KEYS = {name: f"{name}-0123456789-{name}" for name in ("ann", "bob")}


def key_file(folder, **quotas):
    """A file with the keys of Ann and Bob. The quotas are Ann's."""
    lines = [f'[ann]\nkey = "{KEYS["ann"]}"', *(f"{name} = {value}" for name, value in quotas.items())]
    path = folder / "keys.toml"
    path.write_text("\n".join([*lines, f'[bob]\nkey = "{KEYS["bob"]}"\n']))
    path.chmod(0o600)
    return path


class KeyedProcess(ServerlessProcess):
    """`art-nb run --serverless --keys`. `client` returns what one client sends to it."""

    def __init__(self, folder, **quotas):
        folder.mkdir()
        self.file = key_file(folder.parent, **quotas)
        super().__init__(folder, key=None)

    def start(self):
        self.server = Server(self.folder, None, self.port, "--serverless", "--keys", str(self.file))
        self.port = self.server.port
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client()

    def client(self, name):
        one = copy.copy(self)
        one.key = KEYS[name]
        one.http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {one.key}"}, timeout=120)
        return one


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Ann may have two requests and two jobs at a time, and 300 kB. Bob has no quota."""
    process = KeyedProcess(tmp_path_factory.mktemp("keys") / "far", max_requests=2, max_jobs=2, max_bytes=300_000)
    yield process
    process.end()


@pytest.fixture
def clients(served):
    return served.client("ann"), served.client("bob")


@pytest.fixture
def project(request):
    return request.node.name.partition("[")[0][:60]


# the file and the quotas


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "clients: Dictionary should have at least 1 item"),
        ("[ann]", "ann.key: Field required"),
        ('[ann]\nkey = "secret-secret"', "ann.key: String should have at least 16"),
        ('[ann]\nkey = "secret secret secret"', "ann.key: String should match"),
        ('[ann]\nkey = "secret-secret-secret"\nmax_jobs = 0', "ann.max_jobs"),
        ('[ann]\nkey = "secret-secret-secret"\njobs = 1', "ann.jobs: Extra inputs"),
        ('[ann]\nkey = "secret-secret-secret"\n[bob]\nkey = "secret-secret-secret"', "two clients have the same key"),
        ('[ann]\nkey = "secret-secret-secret', "must be a TOML file"),
        ('["a/b"]\nkey = "secret-secret-secret"', "String should match"),
    ],
)
def test_a_wrong_file_is_refused_without_its_keys(tmp_path, text, problem):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ServeError, match=problem) as refused:
        read_keys(path)
    assert "secret" not in str(refused.value)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_file_that_others_can_read_is_refused(tmp_path):
    path = key_file(tmp_path)
    path.chmod(0o640)
    with pytest.raises(ServeError, match="chmod 600"):
        read_keys(path)
    with pytest.raises(ServeError, match="No such file"):
        read_keys(tmp_path / "other.toml")


def test_the_server_has_one_key_or_a_file(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "ART_NB_API_KEY"} | {"PYTHONPATH": str(ROOT)}
    file = str(key_file(tmp_path))
    for options, more, problem in (
        (["--keys", file], {}, "--keys needs --serverless or --tinker"),
        (["--serverless", "--keys", file], {"ART_NB_API_KEY": "x" * 16}, "unset ART_NB_API_KEY"),
        (["--tinker", "--keys", file], {"ART_NB_API_KEY": "x" * 16}, "unset ART_NB_API_KEY"),
    ):
        done = subprocess.run(
            [*command(sys.executable), "run", "--port", "0", *options],
            env=env | more, capture_output=True, text=True, cwd=tmp_path, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert problem in done.stderr


def test_shares_leave_room_for_others():
    clients = {str(n): Client(str(n)) for n in range(3)}
    for limit, share in ((8, 2), (3, 1), (2, 1), (0, 0)):
        assert ClientKeys(clients).share(limit) == share
    assert ClientKeys({"k": Client()}).share(8) == 8


async def test_a_request_that_is_canceled_is_not_counted_any_more():
    client, key = Client("ann", max_requests=1, max_bytes=100), b"k"
    started = asyncio.Event()

    async def app(scope, receive, send):
        assert current_client() is client
        await receive()
        started.set()
        await asyncio.sleep(60)

    async def receive():
        return {"type": "http.request", "body": bytes(60), "more_body": False}

    refused = []

    def refuse(error):
        async def respond(scope, receive, send):
            refused.append(error.status)

        return respond

    guard = ClientKeys({"k": client}).guard(app, refuse, "")
    scope = {"type": "http", "headers": [(b"x-api-key", key)]}
    request = asyncio.ensure_future(guard(scope, receive, None))
    await started.wait()
    assert (client.requests, client.bytes) == (1, 60)
    await guard(scope, receive, None)
    await guard(scope | {"headers": []}, receive, None)
    assert refused == [429, 401]
    request.cancel()
    await asyncio.wait({request})
    assert (client.requests, client.bytes) == (0, 0)
    with pytest.raises(RequestError, match="100 bytes of requests") as large:
        await client.serve(app, scope, lambda: receive_large(), None)
    assert large.value.status == 413
    assert (client.requests, client.bytes) == (0, 0)


async def receive_large():
    return {"type": "http.request", "body": bytes(101), "more_body": True}


# the serverless server


def test_clients_have_models_of_their_own(served, clients, tiny_model_dir, project):
    ann, bob = clients
    ids = [one.register(tiny_model_dir, project=project) for one in clients]
    assert ids[0] != ids[1]
    assert ann.register(tiny_model_dir, project=project) == ids[0]
    names = [[card["id"] for card in one.http.get("/v1/models").json()["data"]] for one in clients]
    artifacts = [f"wandb-artifact:///{name}/{project}/agent" for name in KEYS]
    assert artifacts[0] in names[0] and artifacts[1] in names[1]
    assert artifacts[0] not in names[1] and artifacts[1] not in names[0]
    body = {"model": artifacts[0], "messages": [QUESTION], "max_tokens": 8, "n": 6}
    choices = ann.http.post("/v1/chat/completions", json=body).json()["choices"]
    job_id = ann.submit(job_body(ids[0], choices))
    assert ann.wait(job_id)[-1]["type"] == "training_ended"
    checkpoints = f"/v1/preview/models/{ids[0]}/checkpoints"
    for method, path, content in (
        ("POST", "/v1/chat/completions", json.dumps(body)),
        ("GET", checkpoints, None),
        ("DELETE", checkpoints, '{"steps": [0]}'),
        ("DELETE", f"/v1/preview/models/{ids[0]}", None),
        ("POST", f"/v1/preview/models/{ids[0]}/log", job_body(ids[0], choices).replace(b'"experimental', b'"x')),
        ("POST", JOBS, job_body(ids[0], choices)),
        ("POST", "/v1/preview/sft-training-jobs", json.dumps({"model_id": ids[0], "training_data_url": "a"})),
        ("GET", f"{JOBS}/{job_id}/events", None),
        ("DELETE", f"{JOBS}/{job_id}", None),
    ):
        answer = bob.http.request(method, path, content=content)
        assert answer.status_code in (400, 404), (method, path, answer.text)
        assert ann.key not in answer.text
    assert ann.steps(ids[0]) == [1, 0]
    assert bob.steps(ids[1]) == [0]
    for name, model_id in zip(KEYS, ids, strict=True):
        stored = json.loads((served.folder / f"{name}@{project}/models/agent/serverless/model.json").read_text())
        assert (stored["id"], stored["client"]) == (model_id, name)


def test_a_client_with_many_jobs_does_not_block_another(clients, tiny_model_dir, project):
    """Bob has six jobs of two models. At most two of them that came before end earlier than Ann's job."""
    ann, bob = clients
    many = [bob.register(tiny_model_dir, name, project) for name in ("a", "b")]
    one = ann.register(tiny_model_dir, "a", project)
    choices = sampled(bob, "bob", project, "a", 12)
    jobs = [bob.submit(job_body(model_id, choices, epsilon=0.1 + n / 100)) for n in range(3) for model_id in many]
    own = ann.submit(job_body(one, sampled(ann, "ann", project, "a", 6)))
    ann.wait(own)
    unfinished = sum(not bob.events(job) or bob.events(job)[-1]["type"] != "training_ended" for job in jobs)
    submitted = [path for path in ann.folder.glob(f"bob@{project}/models/*/serverless/jobs/*/events.jsonl")]
    ended = {path.parent.name: path.stat().st_mtime_ns for path in submitted}
    (mine,) = ann.folder.glob(f"ann@{project}/models/*/serverless/jobs/*")
    start, end = (mine / "job.json").stat().st_ctime_ns, (mine / "events.jsonl").stat().st_mtime_ns
    between = [job for job, at in ended.items() if start < at < end]
    assert len(between) <= 2 or not unfinished
    for job in jobs:
        assert bob.wait(job)[-1]["type"] == "training_ended"


def sampled(one, name, project, model, n):
    body = {"model": f"{name}/{project}/{model}", "messages": [QUESTION], "max_tokens": 8, "n": n}
    return one.http.post("/v1/chat/completions", json=body).json()["choices"]


def test_jobs_above_the_quota_are_refused(clients, tiny_model_dir, project):
    ann, bob = clients
    models = [ann.register(tiny_model_dir, name, project) for name in ("a", "b")]
    choices = sampled(ann, "ann", project, "a", 48)
    answers = [ann.http.post(JOBS, content=job_body(models[n % 2], choices, epsilon=0.1 + n / 100)) for n in range(4)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) in (1, 2), "all jobs have ended before the last one was sent"
    assert "2 training jobs" in refused[0].json()["error"]["message"]
    other = bob.register(tiny_model_dir, "a", project)
    assert bob.http.post(JOBS, content=job_body(other, sampled(bob, "bob", project, "a", 4))).status_code == 200
    for answer in answers:
        if answer.status_code == 200:
            ann.wait(answer.json()["id"])
    assert ann.http.post(JOBS, content=job_body(models[0], choices, epsilon=0.5)).status_code == 200


def test_bytes_above_the_quota_are_refused_until_the_client_has_left(served, clients, tiny_model_dir, project):
    ann, bob = clients
    model_id = ann.register(tiny_model_dir, "agent", project)
    good = job_body(model_id, sampled(ann, "ann", project, "agent", 4))
    large = ann.http.post(JOBS, content=good + b" " * 300_000)
    assert large.status_code == 413
    assert "300,000 bytes" in large.json()["error"]["message"]
    head = f"POST {JOBS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ann.key}\r\nContent-Length: 290001\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port)) as slow:
        slow.sendall(head.encode() + b" " * 290_000)  # the last byte is missing
        wait_for(lambda: ann.http.get("/health").json()["bytes"] == 290_000)
        assert ann.http.post(JOBS, content=good + b" " * 20_000).status_code == 429
        assert bob.http.post(JOBS, content=good).status_code == 404  # it is read, and the model is Ann's
    wait_for(lambda: ann.http.get("/health").json()["bytes"] == 0)
    assert ann.http.post(JOBS, content=good).status_code == 200


def wait_for(truth, timeout_s=120):
    end = time.monotonic() + timeout_s
    while not truth():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_requests_above_the_quota_are_refused_until_the_client_has_left(clients, tiny_model_dir, project):
    ann, bob = clients
    for one in clients:
        one.register(tiny_model_dir, "agent", project)
    body = {"model": f"ann/{project}/agent", "messages": [QUESTION], "max_tokens": 450, "n": 128, "ignore_eos": True}
    with ExitStack() as stack:
        parts = []  # a stream without a reference would be closed
        for _ in range(2):
            client = stack.enter_context(httpx.Client(base_url=ann.url, headers=ann.http.headers, timeout=60))
            stream = client.stream("POST", "/v1/chat/completions", json=body | {"stream": True})
            parts.append(stack.enter_context(stream).iter_bytes())
            assert next(parts[-1])
        answer = ann.http.get("/v1/models")
        assert answer.status_code == 429
        assert "2 requests" in answer.json()["error"]["message"]
        start = time.monotonic()
        assert len(sampled(bob, "bob", project, "agent", 2)) == 2
        assert ann.http.get("/v1/models").status_code == 429, f"done in {time.monotonic() - start:.1f} s: ask for more"
    wait_for(lambda: ann.http.get("/health").json().get("requests") == 0)  # the streams are closed, not finished
    assert ann.http.get("/v1/models").status_code == 200


def test_a_client_that_is_killed_uses_nothing(clients, tiny_model_dir, project):
    """A process with two long requests is killed."""
    ann, _ = clients
    ann.register(tiny_model_dir, "agent", project)
    body = {"model": f"ann/{project}/agent", "messages": [QUESTION], "max_tokens": 450, "n": 64, "ignore_eos": True}
    source = (
        "import httpx, json, sys, threading\n"
        "url, key, body = sys.argv[1:]\n"
        "ask = lambda: httpx.post(url, json=json.loads(body), headers={'x-api-key': key}, timeout=60)\n"
        "[threading.Thread(target=ask).start() for _ in range(2)]\n"
    )
    line = [sys.executable, "-c", source, f"{ann.url}/v1/chat/completions", ann.key, json.dumps(body)]
    process = subprocess.Popen(line)
    try:
        wait_for(lambda: ann.http.get("/v1/models").status_code == 429)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_for(lambda: ann.http.get("/v1/models").status_code == 200)


def test_models_and_jobs_of_clients_survive_a_restart_and_keys_are_not_written(tiny_model_dir, tmp_path):
    served = KeyedProcess(tmp_path / "far")
    ids, jobs = [], []
    for name in KEYS:
        one = served.client(name)
        ids.append(one.register(tiny_model_dir))
        jobs.append(one.submit(job_body(ids[-1], sampled(one, name, "ttt", "agent", 6))))
    served.restart()
    for name, model_id, job in zip(KEYS, ids, jobs, strict=True):
        one = served.client(name)
        assert one.wait(job)[-1]["type"] == "training_ended"
        assert one.steps(model_id) == [1, 0]
        one.http.post(JOBS, content=b"nonsense")
    assert served.client("bob").http.get(f"{JOBS}/{jobs[0]}/events").status_code == 404
    refused = httpx.post(f"{served.url}{JOBS}", headers={"x-api-key": "x" * 20}, content=b"")
    assert refused.status_code == 401
    code, printed = served.end()
    assert code == 0
    files = [path.read_bytes() for path in served.folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    for key in KEYS.values():
        assert key not in printed
        assert not any(key.encode() in content for content in files)


# the server for Tinker's client

TOKENS = [5, 6, 7, 8, 9]
DATA = [(TOKENS[:-1], {"target_tokens": TOKENS[1:], "weights": [0.0, 1.0, 1.0, 1.0]})]


class As:
    """A server as one client sees it."""

    def __init__(self, server, name):
        self.url, self.api_key, self.path = server.url, f"tml-{KEYS[name]}", server.path


@pytest.fixture(scope="module")
def tinker(tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tinker")
    keys = key_file(folder, max_jobs=4, max_bytes=30_000, max_requests=8)
    with serving(tiny_model_dir, folder / "runs", keys=keys, max_model_len=400) as server:
        yield server


def both(server, tiny_model_dir):
    """Ann and Bob, each with a new session. A test ends the sessions, because models and requests are limited."""
    return [TinkerHttp(As(server, name), str(tiny_model_dir)) for name in KEYS]


def test_tinker_clients_have_sessions_and_runs_of_their_own(tinker, tiny_model_dir):
    ann, bob = both(tinker, tiny_model_dir)
    models = [one.create_model() for one in (ann, bob)]
    path = ann.retrieve(ann.post("save_weights", model_id=models[0], seq_id=1, path="a"))["path"]
    sampler = ann.post("create_sampling_session", session_id=ann.session, sampling_session_seq_id=0, model_path=path)[
        "sampling_session_id"
    ]
    message = request_message(models[0], 2, "cross_entropy", DATA, {}).SerializeToString()
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
    for name, body, status in (
        ("session_heartbeat", {"session_id": ann.session}, 410),
        ("get_info", {"model_id": models[0]}, 410),
        ("optim_step", {"model_id": models[0], "seq_id": 2, "adam_params": {"learning_rate": 0.1}}, 410),
        ("weights_info", {"tinker_path": path}, 404),
        ("retrieve_future", {"request_id": f"{models[0]}:0"}, 410),
        ("cancel_future", {"request_id": f"{models[0]}:0"}, 410),
        ("asample", {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {}}, 410),
        ("create_sampling_session", {"session_id": bob.session, "sampling_session_seq_id": 0, "model_path": path}, 404),
        ("load_weights", {"session_id": bob.session, "model_seq_id": 5, "path": path, "optimizer": True}, 404),
        (f"sessions/{ann.session}/finish", {}, 410),
    ):
        answer = bob.http.post(f"/{name}", json=body)
        assert answer.status_code == status, (name, answer.text)
    assert bob.http.post("/forward_backward", content=message, headers=PROTOBUF).status_code == 410
    run = f"/training_runs/{models[0]}"
    for method, place in (
        ("GET", f"/samplers/{sampler}"), ("GET", f"/sessions/{ann.session}"), ("GET", run),
        ("GET", f"{run}/checkpoints"), ("DELETE", f"{run}/checkpoints/weights/a"),
    ):  # fmt: skip
        assert bob.http.request(method, place).status_code in (404, 410), place
    assert bob.http.get("/sessions").json()["sessions"] == [bob.session]
    listed = [run["training_run_id"] for run in bob.http.get("/training_runs").json()["training_runs"]]
    assert listed == [models[1]]
    assert bob.http.get("/checkpoints").json()["checkpoints"] == []
    ann.http.post(f"/sessions/{ann.session}/finish", json={})
    assert bob.http.request("DELETE", f"{run}/checkpoints/weights/a").status_code == 404  # its session has ended
    again = TinkerHttp(As(tinker, "ann"), str(tiny_model_dir))
    loaded = again.post("load_weights", session_id=again.session, model_seq_id=0, path=path, optimizer=True)
    assert "model_id" in again.retrieve(loaded)
    assert again.http.delete(f"{run}/checkpoints/weights/a").status_code == 200
    for one in (again, bob):
        one.http.post(f"/sessions/{one.session}/finish", json={})


def test_the_quotas_of_tinker_clients(tinker, tiny_model_dir):
    ann, bob = both(tinker, tiny_model_dir)
    models = [one.create_model() for one in (ann, bob)]

    def send(one, model, seq, size=1):
        body = request_message(model, seq, "cross_entropy", DATA * size, {}).SerializeToString()
        return one.http.post("/forward_backward", content=body, headers=PROTOBUF).status_code

    assert [send(ann, models[0], seq) for seq in range(2, 8)] == [200] * 4 + [429] * 2  # number 1 is missing
    assert [send(bob, models[1], seq) for seq in range(2, 8)] == [200] * 6
    assert send(ann, models[0], 1) == 429  # one of four waits for it
    refused = ann.http.post("/create_model", json={"session_id": ann.session, "model_seq_id": 1,
                            "base_model": ann.base_model, "lora_config": {"rank": 2}})  # fmt: skip
    assert refused.status_code == 429
    ann.http.post(f"/sessions/{ann.session}/finish", json={})
    ann = TinkerHttp(As(tinker, "ann"), str(tiny_model_dir))
    model = ann.create_model()  # the requests of the session that has ended are not counted
    assert send(ann, model, 2, size=1000) == 413
    assert send(ann, model, 2, size=150) == 200  # 20 kB, which wait
    assert send(ann, model, 3, size=150) == 429
    assert send(bob, models[1], 8, size=1000) == 200
    sampler = ann.post("create_sampling_session", session_id=ann.session, sampling_session_seq_id=0,
                       base_model=ann.base_model)["sampling_session_id"]  # fmt: skip
    body = {"sampling_session_id": sampler, "num_samples": 30, "prompt": {"chunks": [{"type": "encoded_text",
            "tokens": [5]}]}, "sampling_params": {"max_tokens": 390, "stop": []}}  # fmt: skip
    codes = [ann.http.post("/asample", json=body | {"seq_id": seq}).status_code for seq in range(10)]
    assert codes == [200] * 8 + [429] * 2
    for one in (ann, bob):
        one.http.post(f"/sessions/{one.session}/finish", json={})


def test_a_tinker_client_with_many_models_does_not_block_another(tinker, tiny_model_dir):
    """Bob trains six models at once, and Ann one. Ann gets half of the slices: her request ends before most of his."""
    ann, bob = both(tinker, tiny_model_dir)
    one, many = ann.create_model(), [bob.create_model(number) for number in range(6)]
    rows = np.random.default_rng(0).integers(5, 200, (300, 200)).tolist()
    data = [(row[:-1], {"target_tokens": row[1:], "weights": [1.0] * 199}) for row in rows]
    answers = [bob.send_data(model, 1, "cross_entropy", data) for model in many]
    ends = []

    def retrieve(client, answer):
        client.retrieve(answer)
        ends.append(client)  # one operation, so that no thread sees half of it

    threads = [threading.Thread(target=retrieve, args=(bob, answer)) for answer in answers]
    for thread in threads:
        thread.start()
    retrieve(ann, ann.send_data(one, 1, "cross_entropy", data[:8]))
    for thread in threads:
        thread.join()
    assert ends.index(ann) <= 1
    for client in (ann, bob):
        client.http.post(f"/sessions/{client.session}/finish", json={})


def test_one_client_cannot_take_all_models(tinker, tiny_model_dir, monkeypatch):
    from art_nb.servers import tinker_sessions

    monkeypatch.setattr(tinker_sessions, "MAX_TRAINED_MODELS", 4)
    ann, bob = both(tinker, tiny_model_dir)
    body = {"session_id": bob.session, "base_model": bob.base_model, "lora_config": {"rank": 2}}
    codes = [bob.http.post("/create_model", json=body | {"model_seq_id": n}).status_code for n in range(3)]
    assert codes == [200, 200, 429]
    assert ann.create_model()
    for one in (ann, bob):
        one.http.post(f"/sessions/{one.session}/finish", json={})


def test_keys_of_tinker_clients_are_not_written(tinker, tiny_model_dir, caplog, capfd):
    both(tinker, tiny_model_dir)[0].create_model()
    assert tinker.settings == {"TINKER_BASE_URL": tinker.url}
    for headers in ({}, {"x-api-key": KEYS["ann"]}, {"x-api-key": "tml-"}):  # without tml-, it is no key
        assert httpx.get(f"{tinker.url}/api/v1/healthz", headers=headers).status_code == 401
    written = caplog.text.encode() + "".join(capfd.readouterr()).encode()
    written += b"".join(path.read_bytes() for path in tinker.path.rglob("*") if path.is_file())
    assert not [key for key in KEYS.values() if key.encode() in written]


async def test_one_client_cannot_use_all_models_that_are_loaded(tiny_model_dir, tmp_path):
    """With eight clients, each one can use one of eight models at a time."""
    clients = {str(n): Client(str(n)) for n in range(8)}
    service = ServerlessService(art.LocalBackend(path=tmp_path, verbose=False), ClientKeys(clients))

    async def create(client, name):
        """Create a model as a client does. The service is called where the guard would call its app."""
        records = []

        async def app(scope, receive, send):
            request = ModelRequest(project="ttt", name=name, base_model=str(tiny_model_dir))
            records.append(await service.create_model(request))

        await client.serve(app, {}, None, None)
        return service.models[records[0].id]

    first = await create(clients["0"], "a")
    async with service.locked(first):  # as long as it is trained
        with pytest.raises(RequestError, match="can use 1 loaded models") as refused:
            await create(clients["0"], "b")
        assert refused.value.status == 429
        await create(clients["1"], "b")
    await create(clients["0"], "b")
    assert {served.client for served in service.models.values()} == {"0", "1"}
    await service.close()
