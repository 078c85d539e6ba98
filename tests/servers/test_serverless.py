"""`art-nb run --serverless` in a process of its own: kills, turns, keys, limits, clients that leave."""

import asyncio
import json
import signal
import socket
import threading
import time
from io import BytesIO

import httpx
import pytest
from support.audit import count
from support.serverless_parts import JOBS, QUESTION, ServerlessProcess, job_body

import art_nb as art
from art_nb.backends.options import checked_options
from art_nb.core.events import Bus
from art_nb.core.types import RequestError, StoreError
from art_nb.models import clients
from art_nb.runs.store import open_run
from art_nb.servers.serverless_jobs import MAX_ATTEMPTS, TrainingJob, new_job, read_jobs
from art_nb.servers.serverless_protocol import (
    REFUSED_OPTIONS,
    ExperimentalConfig,
    ModelRequest,
    checked_group_line,
    train_options,
)
from art_nb.servers.serverless_routes import MESSAGES_PATHS, SERVERLESS_ROUTES
from art_nb.servers.serverless_service import MAX_WAITING_JOBS, ServerlessService

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    process = ServerlessProcess(tmp_path_factory.mktemp("far"))
    yield process
    process.end()


def kinds(events):
    return [event["type"] for event in events]


WHOLE = ["training_started", "gradient_step", "training_ended"]


@pytest.mark.slow
def test_a_killed_server_continues_with_its_models_and_jobs(tiny_model_dir, tmp_path):
    """Killed before, during and after a step: each job trains exactly one step, and its client finds it again."""
    process = ServerlessProcess(tmp_path)
    model_id = process.register(tiny_model_dir)
    for number, pause_s in enumerate(count((0.0, 0.05, 0.1, 0.15, 0.4, 1.5), (0.05, 0.15, 1.5))):
        body = job_body(model_id, process.sample(seed=number))
        job_id = process.submit(body)
        time.sleep(pause_s)
        process.restart()
        assert process.submit(body) == job_id  # the client repeats its call, because it got no result
        events = process.wait(job_id)
        assert kinds(events) == WHOLE
        assert events[-1]["data"]["step"] == number + 1
        assert events[1]["data"]["data/step_num_gradient_steps"] == 1
        assert process.steps(model_id)[0] == number + 1
    assert process.submit(body) != job_id  # its end was delivered: this is a new step
    (old,) = process.sample(model="agent@0", n=1, temperature=0)
    assert old["token_ids"]
    code, printed = process.end()
    assert code == 0, printed
    run = open_run(tmp_path / "ttt" / "models" / "agent")
    rows = [row for row in run.history() if "loss/train" in row]
    assert [row["step"] for row in rows][: number + 1] == [*range(1, number + 2)]
    assert all(row["train/reward"] == pytest.approx(1.0) for row in rows[: number + 1])
    assert len(run.read_groups("train", 3)[0].trajectories) == 6


def test_models_take_turns(served, tiny_model_dir):
    """A model with many jobs does not block another: of five jobs that came before, at most two end earlier."""
    many, one = (served.register(tiny_model_dir, name) for name in ("many", "one"))
    choices = served.sample("many", n=6)
    first = [served.submit(job_body(many, choices, epsilon=0.1 + n / 100)) for n in range(5)]
    other = served.submit(job_body(one, served.sample("one", n=6)))
    for job_id in [*first, other]:
        assert kinds(served.wait(job_id)) == WHOLE
    directories = {path.name: path for path in served.folder.glob("*/models/*/serverless/jobs/*")}
    ended = {job_id: (directories[job_id] / "events.jsonl").stat().st_mtime_ns for job_id in [*first, other]}
    submitted = (directories[other] / "job.json").stat().st_ctime_ns
    after = [job_id for job_id in first if ended[job_id] > min(submitted, ended[other])]
    earlier = [job_id for job_id in after if ended[job_id] < ended[other]]
    assert len(earlier) <= 2


async def test_the_jobs_of_a_model_are_limited(tiny_model_dir, tmp_path):
    service = ServerlessService(art.LocalBackend(path=tmp_path, verbose=False))  # not started: all jobs wait
    request = ModelRequest(project="ttt", name="agent", base_model=str(tiny_model_dir))
    served = service.model((await service.create_model(request)).id)
    line = checked_group_line({"trajectories": [{"messages_and_choices": [QUESTION]}]}, 0)
    for n in range(MAX_WAITING_JOBS):
        await service.submit(served, {}, str(n), BytesIO(line))
    with pytest.raises(RequestError, match="jobs of this model are waiting") as refused:
        await service.submit(served, {}, "one more", BytesIO(line))
    assert refused.value.status == 429
    with pytest.raises(RequestError, match="exists") as refused:
        await service.create_model(request)
    assert refused.value.status == 409
    await service.delete_model(served)
    assert len(service.queue) == 0
    await service.close()


async def test_requests_at_the_same_time_create_one_job_and_respect_the_limit(tiny_model_dir, tmp_path, monkeypatch):
    service = ServerlessService(art.LocalBackend(path=tmp_path, verbose=False))  # not started: all jobs wait
    request = ModelRequest(project="ttt", name="agent", base_model=str(tiny_model_dir))
    served = service.model((await service.create_model(request)).id)
    line = checked_group_line({"trajectories": [{"messages_and_choices": [QUESTION]}]}, 0)
    same = await asyncio.gather(*(service.submit(served, {}, "same", BytesIO(line)) for _ in range(4)))
    assert len({job.id for job in same}) == len(service.queue) == len(service.jobs) == 1
    sent = [service.submit(served, {}, str(n), BytesIO(line)) for n in range(MAX_WAITING_JOBS + 3)]
    answers = await asyncio.gather(*sent, return_exceptions=True)
    assert [isinstance(answer, RequestError) for answer in answers] == [False] * (MAX_WAITING_JOBS - 1) + [True] * 4
    assert len(service.queue) == len(service.jobs) == MAX_WAITING_JOBS
    service.queue.remove(lambda job: True)
    service.jobs.clear()

    def fail(job, groups):
        raise StoreError("The disk is full.")

    monkeypatch.setattr(TrainingJob, "create", fail)
    with pytest.raises(StoreError):
        await service.submit(served, {}, "one more", BytesIO(line))
    assert not service.jobs
    await service.close()


class Unreadable(BytesIO):
    """A body whose temporary file cannot be read."""

    def seek(self, *_):
        raise OSError("The disk does not respond.")


async def test_a_request_that_waits_for_a_job_that_cannot_be_created_creates_it(tiny_model_dir, tmp_path):
    """A client sends its request again while the first one is being written. The first one fails."""
    service = ServerlessService(art.LocalBackend(path=tmp_path, verbose=False))  # not started: the job waits
    request = ModelRequest(project="ttt", name="agent", base_model=str(tiny_model_dir))
    served = service.model((await service.create_model(request)).id)
    line = checked_group_line({"trajectories": [{"messages_and_choices": [QUESTION]}]}, 0)
    bodies = (Unreadable(line), BytesIO(line), BytesIO(line))
    failed, *jobs = await asyncio.gather(
        *(service.submit(served, {}, "same", body) for body in bodies), return_exceptions=True
    )
    assert isinstance(failed, OSError)
    assert jobs[0] is jobs[1] is service.job(jobs[0].id)
    assert [job.id for job in read_jobs(served.path, print)] == [jobs[0].id]
    await service.close()


@pytest.mark.parametrize("pause_s", [0.0, 0.3], ids=["waiting", "running"])
def test_a_canceled_job_changes_nothing(served, tiny_model_dir, pause_s):
    model_id = served.register(tiny_model_dir, f"canceled-{pause_s}")
    job_id = served.submit(job_body(model_id, served.sample(f"canceled-{pause_s}", n=64, max_tokens=64)))
    time.sleep(pause_s)
    assert served.http.delete(f"{JOBS}/{job_id}").status_code == 204
    events = served.events(job_id)
    if events[-1]["type"] == "training_ended":  # it was faster
        assert served.steps(model_id) == [1, 0]
    else:
        assert "was canceled" in events[-1]["data"]["error_message"]
        assert served.steps(model_id) == [0]
    assert served.http.delete(f"{JOBS}/{job_id}").status_code == 204  # nothing more to do
    assert served.events(job_id) == events
    assert kinds(served.wait(served.submit(job_body(model_id, served.sample(f"canceled-{pause_s}"))))) == WHOLE


async def test_a_job_that_is_canceled_after_its_step_ends_as_usual(tiny_model_dir, tmp_path):
    service = ServerlessService(art.LocalBackend(path=tmp_path, verbose=False))  # not started: the job waits
    request = ModelRequest(project="ttt", name="agent", base_model=str(tiny_model_dir))
    served = service.model((await service.create_model(request)).id)
    line = checked_group_line({"trajectories": [{"messages_and_choices": [QUESTION]}]}, 0)
    job = await service.submit(served, {}, "digest", BytesIO(line))
    job.set_step(0)  # as if step 0 were its result
    await service.cancel(job)
    assert not job.ended
    assert len(service.queue) == 1
    service.worker.start()
    while not job.ended:
        await asyncio.sleep(0.01)
    assert job.events[-1]["type"] == "training_ended"
    await service.cancel(job)
    await service.close()


async def test_a_trained_step_ends_its_job_even_if_nothing_can_be_written(tiny_model_dir, tmp_path, caplog):
    """Directories take the place of two files, so that writing fails after the step was trained."""
    service = ServerlessService(art.LocalBackend(path=tmp_path, verbose=False))
    request = ModelRequest(project="ttt", name="agent", base_model=str(tiny_model_dir))
    served = service.model((await service.create_model(request)).id)
    endpoint = (await service.load(served)).endpoint
    body = {"model": "agent", "messages": [QUESTION], "max_tokens": 8, "n": 4}
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with clients.httpx.AsyncClient(transport=endpoint.transport(), headers=headers) as http:
        reply = await http.post("http://in-process/v1/chat/completions", json=body)
    choices = reply.json()["choices"]
    group = [{"messages_and_choices": [QUESTION, choice], "reward": float(n)} for n, choice in enumerate(choices)]
    job = await service.submit(served, {}, "0", BytesIO(checked_group_line({"trajectories": group}, 0)))
    (served.path / "history.jsonl").unlink(missing_ok=True)
    for file in (served.path / "history.jsonl", job.directory / "events.jsonl"):
        file.mkdir()
    service.worker.start()
    while f"The end of the job {job.id} could not be written" not in caplog.text:  # the job has ended before
        await asyncio.sleep(0.01)
    assert job.ended and kinds(job.events) == WHOLE
    assert service.steps(served)[-1] == job.step == 1
    await service.close()
    assert "The metrics of step 1" in caplog.text


def test_the_events_are_delivered_if_the_disk_is_full(served, tiny_model_dir):
    """A directory takes the place of `job.json`."""
    model_id = served.register(tiny_model_dir, "full")
    job_id = served.submit(job_body(model_id, served.sample("full")))
    directory = served.folder / "ttt" / "models" / "full" / "serverless" / "jobs" / job_id
    events, end = directory / "events.jsonl", time.monotonic() + 120
    while not (events.exists() and "training_ended" in events.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    (directory / "job.json").unlink()
    (directory / "job.json").mkdir()
    assert kinds(served.events(job_id)) == WHOLE


async def test_a_job_that_ends_the_server_is_not_repeated_forever(tiny_model_dir, tmp_path):
    service = ServerlessService(art.LocalBackend(path=tmp_path, verbose=False))
    record = await service.create_model(ModelRequest(project="ttt", name="agent", base_model=str(tiny_model_dir)))
    run = service.model(record.id).path
    await service.close()
    job = new_job(run, record.id, {}, "digest")
    job.attempts = MAX_ATTEMPTS
    job.create(BytesIO(b""))
    service = ServerlessService(art.LocalBackend(path=tmp_path, verbose=False))
    await service.start()
    job = service.job(job.id)
    while not job.ended:
        await asyncio.sleep(0.01)
    assert f"ended {MAX_ATTEMPTS} times" in job.events[-1]["data"]["error_message"]
    await service.close()
    assert [stored.ended for stored in read_jobs(run, print)] == [True]


def test_every_route_needs_the_key(served):
    paths = [(method, path) for path, _, method in SERVERLESS_ROUTES] + [("POST", path) for path in MESSAGES_PATHS]
    paths += [("GET", "/"), ("POST", "/v1/none"), ("GET", "/runs/0123456789abcdef/v1/models")]
    with httpx.Client(base_url=served.url) as client:
        for method, path in paths:
            filled = path.format(model_id="model-1", job_id="job-1")
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": served.key[:-1]}):
                answer = client.request(method, filled, headers=headers, content=b"{}")
                assert answer.status_code == 401, (method, path)
                assert answer.json()["error"]["code"] == "invalid_api_key"


def test_a_run_that_existed_before_survives_the_deletion_of_its_model(served, tiny_model_dir):
    run = served.folder / "ttt" / "models" / "notebook"
    run.mkdir(parents=True)
    (run / "history.jsonl").write_text('{"step": 1, "train/reward": 0.5}\n')
    new, old = served.register(tiny_model_dir, "new"), served.register(tiny_model_dir, "notebook")
    for model_id in (new, old):
        assert served.http.delete(f"/v1/preview/models/{model_id}").status_code == 204
        assert served.http.get(f"/v1/preview/models/{model_id}/checkpoints").status_code == 404
    assert not (served.folder / "ttt" / "models" / "new").exists()
    assert (run / "history.jsonl").exists()
    assert not (run / "serverless").exists()
    assert served.register(tiny_model_dir, "notebook") != old


def test_a_failed_job_has_a_message_and_changes_nothing(served, tiny_model_dir):
    model_id = served.register(tiny_model_dir, "failing")
    choices = served.sample("failing")
    choices[0]["token_ids"] = [10**6] * len(choices[0]["token_ids"])
    (event,) = served.wait(served.submit(job_body(model_id, choices)))
    assert event["type"] == "training_failed"
    assert "token ID 1000000" in event["data"]["error_message"]
    assert served.steps(model_id) == [0]
    same = [choice | {"index": 0} for choice in served.sample("failing", n=1)] * 4
    nothing = json.loads(job_body(model_id, same))
    for trajectory in nothing["trajectory_groups"][0]["trajectories"]:
        trajectory["reward"] = 1.0
    events = served.wait(served.submit(json.dumps(nothing).encode()))
    assert kinds(events) == ["training_started", "training_ended"]
    assert events[0]["data"] == {"num_sequences": 0}
    assert served.steps(model_id) == [1, 0]


def test_checkpoints_are_listed_in_pages_and_deleted(served, tiny_model_dir):
    model_id = served.register(tiny_model_dir, "pages")
    for n in range(3):
        served.wait(served.submit(job_body(model_id, served.sample("pages", seed=n))))
    path = f"/v1/preview/models/{model_id}/checkpoints"
    page = served.http.get(path, params={"limit": 2, "order": "asc"}).json()
    assert [item["step"] for item in page["data"]] == [0, 1]
    assert page["has_more"]
    page = served.http.get(path, params={"limit": 2, "order": "asc", "after": page["last_id"]}).json()
    assert [item["step"] for item in page["data"]] == [2, 3]
    assert page["data"][1]["metrics"]["loss/learning_rate"] == pytest.approx(1e-3)
    answer = served.http.request("DELETE", path, json={"steps": [1, 2, 9]})
    assert answer.json() == {"deleted_count": 2, "not_found_steps": [9]}
    assert served.steps(model_id) == [3, 0]
    for step, status in ((0, 200), (1, 404), (3, 200)):
        body = {"prompt": "A", "max_tokens": 2, "model": f"pages@{step}"}
        assert served.http.post("/v1/completions", json=body).status_code == status
    body = {"messages": [QUESTION], "max_tokens": 2, "model": "pages@3"}
    answer = served.http.post("/v1/messages", json=body)
    assert answer.json()["type"] == "message"
    names = [card["id"] for card in served.http.get("/v1/models").json()["data"]]
    assert "wandb-artifact:///art-nb/ttt/pages" in names


def test_a_log_request_writes_groups(served, tiny_model_dir):
    model_id = served.register(tiny_model_dir, "logged")
    body = json.loads(job_body(model_id, served.sample("logged")))
    log = {"model_id": model_id, "trajectory_groups": body["trajectory_groups"], "split": "val"}
    assert served.http.post(f"/v1/preview/models/{model_id}/log", json=log).status_code == 204
    run = open_run(served.folder / "ttt" / "models" / "logged")
    assert len(run.read_groups("val", 0)[0].trajectories) == 6


def test_slow_and_large_bodies_do_not_block_others(served, tiny_model_dir):
    model_id = served.register(tiny_model_dir, "patient")
    head = f"POST {JOBS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.key}\r\nContent-Length: 100000\r\n\r\n"
    slow = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(20)]
    try:
        for connection in slow:
            connection.sendall(head.encode() + b'{"model_id": "')
        assert kinds(served.wait(served.submit(job_body(model_id, served.sample("patient"))))) == WHOLE
    finally:
        for connection in slow:
            connection.close()
    with socket.create_connection(("127.0.0.1", served.port), timeout=120) as large:
        large.sendall(head.replace("100000", str(300 << 20)).encode())
        assert large.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_leaves_is_forgotten(served, tiny_model_dir):
    served.register(tiny_model_dir, "left")
    body = {"model": "left", "messages": [QUESTION], "max_tokens": 400, "n": 64, "ignore_eos": True}

    def ask_and_leave():
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=1.0, headers=served.http.headers)

    clients = [threading.Thread(target=ask_and_leave) for _ in range(2)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    end = time.monotonic() + 120
    while served.http.get("/health").json()["requests"]:
        assert time.monotonic() < end, "the requests of clients that left are still running"
        time.sleep(0.1)


VALUES = {
    "advantage_balance": 0.1,
    "allow_training_without_logprobs": False,
    "epsilon": 0.2,
    "epsilon_high": 0.3,
    "importance_sampling_level": "sequence",
    "kimi_k2_tau": 0.1,
    "kl_penalty_coef": 0.1,
    "kl_penalty_reference_step": 0,
    "kl_penalty_source": "sample",
    "kl_penalty_step_lag": 1,
    "kl_ref_adapter_path": "/models/base",
    "learning_rate": 1e-5,
    "logprob_calculation_chunk_size": 512,
    "loss_fn": "ppo",
    "mask_prob_ratio": True,
    "max_negative_advantage_importance_sampling_weight": 2.0,
    "normalize_advantages": False,
    "num_trajectories_learning_rate_multiplier_power": 0.5,
    "packed_sequence_length": 512,
    "plot_tensors": True,
    "ppo": True,
    "precalculate_logprobs": True,
    "scale_learning_rate_by_reward_std_dev": True,
    "scale_rewards": False,
    "truncated_importance_sampling": 2.0,
}


@pytest.mark.parametrize("name", ExperimentalConfig.model_fields)
def test_an_option_has_an_effect_or_is_refused(name):
    """Each of the 25 options changes the step's configuration, needs no effect, or is refused by its name."""
    if name in REFUSED_OPTIONS:
        with pytest.raises(RequestError, match=name):
            train_options({name: VALUES[name]})
        return
    needed = {"truncated_importance_sampling": {"precalculate_logprobs": True}}.get(name, {})
    if needed:
        with pytest.raises(RequestError, match=name):
            train_options({name: VALUES[name]})
    options = train_options({name: VALUES[name], **needed})
    assert options == {name: VALUES[name], **needed}
    if name == "logprob_calculation_chunk_size" or name.startswith("kl_penalty_reference") or name.endswith("step_lag"):
        return  # memory only; and the reference, which depends on the run
    assert checked_options(options, Bus())[0] != checked_options(needed, Bus())[0]


def test_the_server_ends_with_a_running_job(tiny_model_dir, tmp_path):
    process = ServerlessProcess(tmp_path)
    model_id = process.register(tiny_model_dir)
    process.submit(job_body(model_id, process.sample(n=64, max_tokens=64)))
    code, printed = process.end(signal.SIGINT)
    assert code == 0
    assert "Traceback" not in printed
