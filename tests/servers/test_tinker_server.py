"""The protocol of Tinker's client over HTTP: order, results, checkpoints, sessions, fairness and limits."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from support.tinker_parts import PROTOBUF, TinkerHttp, read_output, request_message, serving

import art_nb as art
from art_nb.runs.locks import LOCK_NAME, read_lock
from art_nb.servers import request_queues, tinker_server, tinker_sessions
from art_nb.servers.tinker_messages import parse_message
from art_nb.servers.tinker_records import TinkerRun
from art_nb.tokens.learner_records import read_record

TOKENS = [5, 6, 7, 8, 9]
SFT = [(TOKENS[:-1], {"target_tokens": TOKENS[1:], "weights": [0.0, 1.0, 1.0, 1.0]})]

NINES = [([5, 6, 9, 9], {"target_tokens": [6, 9, 9, 9], "weights": [0.0, 1.0, 1.0, 1.0]})]


@pytest.fixture(scope="module")
def server(tiny_model_dir, tmp_path_factory):
    with serving(tiny_model_dir, tmp_path_factory.mktemp("runs")) as running:
        yield running


@pytest.fixture
def client(server, tiny_model_dir):
    return TinkerHttp(server, str(tiny_model_dir))


def prompt(*tokens):
    return {"chunks": [{"type": "encoded_text", "tokens": [*tokens]}]}


def sampled(client, sampler, seq_id=0, **options):
    """Return the tokens of each reply."""
    params = {"max_tokens": 6, "temperature": 1.0} | options.pop("params", {})
    body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": prompt(5, 6), "sampling_params": params}
    response = parse_message("SampleResponse", client.retrieve(client.post("asample", **body | options)))
    return [np.frombuffer(sequence.tokens, "<i4").tolist() for sequence in response.sequences]


def test_requests_run_in_the_order_of_their_numbers(client):
    """The parts of a large request arrive in any order, and a repeated request is not run again."""
    model = client.create_model()
    step = client.post("optim_step", model_id=model, seq_id=4, adam_params={"learning_rate": 0.01})
    later = [client.send_data(model, seq, "cross_entropy", SFT) for seq in (3, 2)]
    with pytest.raises(httpx.ReadTimeout):  # it waits for the first one
        client.http.post("/retrieve_future", json={"request_id": later[0]["request_id"]}, timeout=0.5)
    first = client.send_data(model, 1, "cross_entropy", SFT)
    losses = [read_output(client.retrieve(answer))[0]["loss:sum"] for answer in (first, *later)]
    assert losses[0] == losses[1] == losses[2]  # all before the optimizer step
    again = client.send_data(model, 1, "cross_entropy", SFT)
    assert again == first
    norm = client.retrieve(step)["metrics"]["grad_norm"]
    single = client.create_model(1)
    client.forward_backward(single, 1, "cross_entropy", SFT)
    assert norm == pytest.approx(3 * client.optim_step(single, 2, learning_rate=0.01)["metrics"]["grad_norm"], rel=1e-4)


def test_an_error_in_the_data_does_not_break_the_order(client):
    model = client.create_model()
    wrong = [(TOKENS[:-1], {"target_tokens": TOKENS[1:], "advantages": [0.0] * 4})]
    failed = client.send_data(model, 1, "cross_entropy", wrong)
    after = client.forward_backward(model, 2, "cross_entropy", SFT)
    assert "advantages" in client.retrieve(failed)["error"]
    assert client.retrieve(failed)["category"] == "user"
    assert after[0]["loss:sum"] > 0


def test_forward_computes_no_gradients(client):
    model = client.create_model()
    metrics, (item,) = client.forward_backward(model, 1, "cross_entropy", SFT, forward_only=True)
    assert metrics["loss:sum"] == pytest.approx(-item["logprobs"][1:].sum(), rel=1e-5)
    assert item["elementwise_loss"][0] == 0
    assert client.optim_step(model, 2, learning_rate=0.01)["metrics"]["grad_norm"] == 0


def test_a_checkpoint_restores_weights_and_optimizer(client, server):
    model = client.create_model()
    for seq in (1, 3):
        client.forward_backward(model, seq, "cross_entropy", SFT)
        client.optim_step(model, seq + 1, learning_rate=0.02)
    path = client.retrieve(client.post("save_weights", model_id=model, seq_id=5, path="second"))["path"]
    client.forward_backward(model, 6, "cross_entropy", SFT)
    client.optim_step(model, 7, learning_rate=0.02)
    expected = client.forward_backward(model, 8, "cross_entropy", SFT)[0]["loss:sum"]
    loaded = client.retrieve(
        client.post("load_weights", session_id=client.session, model_seq_id=1, path=path, optimizer=True)
    )["model_id"]
    assert client.post("get_info", model_id=loaded)["lora_rank"] == 8
    client.forward_backward(loaded, 1, "cross_entropy", SFT)
    client.optim_step(loaded, 2, learning_rate=0.02)
    assert client.forward_backward(loaded, 3, "cross_entropy", SFT)[0]["loss:sum"] == pytest.approx(expected, rel=1e-5)
    other = client.create_model(2)
    client.retrieve(client.post("load_weights", model_id=other, seq_id=1, path=path, optimizer=False))
    client.forward_backward(other, 2, "cross_entropy", SFT)
    client.optim_step(other, 3, learning_rate=0.02)  # without the state of Adam, the step is another one
    assert client.forward_backward(other, 4, "cross_entropy", SFT)[0]["loss:sum"] != pytest.approx(expected, rel=1e-5)
    info = client.http.post("/weights_info", json={"tinker_path": path}).json()
    assert info["lora_rank"] == 8 and info["train_unembed"] is False


def test_checkpoints_are_listed_and_deleted(client, server):
    model = client.create_model()
    client.retrieve(client.post("save_weights", model_id=model, path="a", user_metadata={"note": "x"}))
    client.retrieve(client.post("save_weights_for_sampler", model_id=model, path="b", ttl_seconds=3600))
    again = client.retrieve(client.post("save_weights", model_id=model, path="a"))
    assert "exists already" in again["error"]
    listed = client.http.get(f"/training_runs/{model}/checkpoints").json()["checkpoints"]
    assert [checkpoint["checkpoint_id"] for checkpoint in listed] == ["weights/a", "sampler_weights/b"]
    assert listed[0]["user_metadata"] == {"note": "x"} and listed[1]["expires_at"] > listed[1]["time"]
    assert client.http.delete(f"/training_runs/{model}/checkpoints/weights/a").status_code == 200
    assert client.http.delete(f"/training_runs/{model}/checkpoints/weights/a").status_code == 404
    run = client.http.get(f"/training_runs/{model}").json()
    assert run["last_checkpoint"] is None and run["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/b"
    assert client.http.get("/training_runs?limit=1").json()["cursor"]["limit"] == 1


def test_an_expired_checkpoint_is_deleted(client, server):
    model = client.create_model()
    path = client.retrieve(client.post("save_weights", model_id=model, path="a", ttl_seconds=3600))["path"]
    directory = server.path / "tinker" / "models" / model.replace(":train:", "-train-")
    run = TinkerRun.read(directory)
    run.facts["saved"]["weights/a"]["expires"] = time.time() - 1
    run.write()
    assert run.store.steps_saved() == [0]
    assert run.delete_expired() == ["weights/a"]
    assert run.store.steps_saved() == []
    answer = client.http.post("/weights_info", json={"tinker_path": path})
    assert answer.status_code == 404


def test_a_name_that_is_used_again_deletes_the_old_checkpoint(client, server):
    model = client.create_model()
    run = TinkerRun(server.path / "tinker" / "models" / model.replace(":train:", "-train-"))
    path = client.retrieve(client.post("save_weights_for_sampler", model_id=model, seq_id=1, path="latest"))["path"]
    fields = {"session_id": client.session, "sampling_session_seq_id": 0, "model_path": path}
    old = client.post("create_sampling_session", **fields)["sampling_session_id"]
    for seq in (2, 4, 6):
        client.optim_step(model, seq, learning_rate=0.02)
        client.retrieve(client.post("save_weights_for_sampler", model_id=model, seq_id=seq + 1, path="latest"))
    assert run.store.steps_saved() == [3]
    client.retrieve(client.post("save_weights", model_id=model, seq_id=8, path="final"))
    client.optim_step(model, 9, learning_rate=0.02)
    client.retrieve(client.post("save_weights_for_sampler", model_id=model, seq_id=10, path="latest"))
    assert run.store.steps_saved() == [3, 4]  # the former one has another name
    body = {"sampling_session_id": old, "seq_id": 0, "prompt": prompt(5, 6), "sampling_params": {"max_tokens": 2}}
    assert "were removed" in client.retrieve(client.post("asample", **body))["error"]


def test_replies_follow_the_weights_and_the_options(client, tiny_model_dir):
    model = client.create_model()
    base = client.post(
        "create_sampling_session", session_id=client.session, sampling_session_seq_id=0, base_model=str(tiny_model_dir)
    )["sampling_session_id"]
    greedy = {"params": {"temperature": 0.0}}
    before = sampled(client, base, **greedy)
    for seq in range(1, 21, 2):
        client.forward_backward(model, seq, "cross_entropy", NINES)
        client.optim_step(model, seq + 1, learning_rate=0.05)
    saved = client.retrieve(client.post("save_weights_for_sampler", model_id=model, sampling_session_seq_id=1))
    trained = saved["sampling_session_id"]
    assert sampled(client, trained, **greedy)[0][:3] == [9, 9, 9]
    assert sampled(client, base, seq_id=1, **greedy) == before  # another adapter does not change the base model
    stopped = sampled(client, trained, seq_id=1, params={"temperature": 0.0, "stop": [9]})
    assert stopped == [[9]]
    seeded = [sampled(client, base, seq_id=seq, num_samples=3, params={"seed": 5}) for seq in (2, 3)]
    assert seeded[0] == seeded[1] and len({tuple(reply) for reply in seeded[0]}) > 1
    info = client.http.get(f"/samplers/{trained}").json()
    assert info["base_model"] == str(tiny_model_dir)
    named = client.retrieve(client.post("save_weights_for_sampler", model_id=model, path="final"))["path"]
    reopened = client.post(
        "create_sampling_session", session_id=client.session, sampling_session_seq_id=2, model_path=named
    )["sampling_session_id"]
    assert sampled(client, reopened, **greedy)[0][:3] == [9, 9, 9]


def test_an_inflight_sampler_gets_newer_weights(client):
    model = client.create_model()
    save = {"model_id": model, "kind": "inflight"}
    first = client.retrieve(client.post("save_weights_for_sampler", **save, sampling_session_seq_id=0))
    before = sampled(client, first["sampling_session_id"], params={"temperature": 0.0})
    for seq in range(2, 22, 2):
        client.forward_backward(model, seq, "cross_entropy", NINES)
        client.optim_step(model, seq + 1, learning_rate=0.05)
    client.retrieve(client.post("save_weights_for_sampler", **save, sampling_session_seq_id=1))
    after = sampled(client, first["sampling_session_id"], seq_id=1, params={"temperature": 0.0})
    assert after != before and after[0][:3] == [9, 9, 9]


def test_the_viewer_shows_the_run(client, server):
    """The data of an optimizer step are trajectories with the sampler's and the learner's logprobs."""
    model = client.create_model()
    arrays = {"logprobs": [0.0, -5.0, -5.0, -5.0], "advantages": [0.0, 0.5, 0.5, 0.5]}
    data = [(TOKENS[:-1], {"target_tokens": TOKENS[1:], **arrays})]
    _, (item,) = client.forward_backward(model, 1, "importance_sampling", data)
    client.optim_step(model, 2, learning_rate=0.01)
    store = art.open_run(server.path / "tinker" / "models" / model.replace(":train:", "-train-"))
    (group,) = store.read_groups("train", 1)
    (trajectory,) = group
    assert trajectory.metrics["advantage"] == 0.5 and trajectory.metadata["reward"] == "not known"
    record = read_record(store, 1)
    assert record.old_E.tolist() == [-5.0] * 3
    assert np.allclose(record.new_E, item["logprobs"][1:])
    (row,) = store.history()
    assert row["loss/learning_rate"] == 0.01 and row["data/step_num_trajectories"] == 1
    assert store.read_model()["base_model"] == client.base_model
    assert "advantage" in art.view(store.path).html()


def test_a_dead_client_is_removed(server, tiny_model_dir, monkeypatch):
    client, living = TinkerHttp(server, str(tiny_model_dir)), TinkerHttp(server, str(tiny_model_dir))
    model = client.create_model()
    client.forward_backward(model, 1, "cross_entropy", SFT)
    client.optim_step(model, 2, learning_rate=0.01)
    pending = client.send_data(model, 4, "cross_entropy", SFT)  # waits for number 3
    path = server.path / "tinker" / "models" / model.replace(":train:", "-train-")
    assert read_lock(path / LOCK_NAME)
    monkeypatch.setattr(tinker_sessions, "SESSION_TIMEOUT_S", 0.5)
    end = time.monotonic() + 120
    while time.monotonic() < end:
        living.post("session_heartbeat", session_id=living.session)
        if client.session not in living.http.get("/sessions").json()["sessions"]:
            break
        time.sleep(0.2)
    gone = client.http.post("/session_heartbeat", json={"session_id": client.session})
    assert gone.status_code == 410 and "has ended" in gone.json()["detail"]
    assert client.http.post("/retrieve_future", json={"request_id": pending["request_id"]}).status_code == 410
    assert not (path / LOCK_NAME).exists()
    assert art.open_run(path).history()  # its data stay
    assert living.session in living.http.get("/sessions").json()["sessions"]


def test_finish_ends_a_session(client):
    model = client.create_model()
    assert (
        client.http.post(f"/sessions/{client.session}/finish", json={"reason": {"type": "success"}}).status_code == 200
    )
    assert client.http.post("/get_info", json={"model_id": model}).status_code == 410


def test_canceled_samples_end(client, tiny_model_dir):
    base = client.post(
        "create_sampling_session", session_id=client.session, sampling_session_seq_id=0, base_model=str(tiny_model_dir)
    )["sampling_session_id"]
    body = {"sampling_session_id": base, "num_samples": 200, "prompt": prompt(5)}
    answer = client.post("asample", **body, seq_id=0, sampling_params={"max_tokens": 500, "stop": []})
    assert len(answer["sample_sequence_ids"]) == 200
    client.post("cancel_future", request_id=answer["request_id"])
    assert "canceled" in client.retrieve(answer)["error"]
    assert sampled(client, base, seq_id=1)


def test_one_client_does_not_block_another(server, tiny_model_dir):
    """A client asks for many long replies and sends much data. Short requests of another client do not wait."""
    large, small = TinkerHttp(server, str(tiny_model_dir)), TinkerHttp(server, str(tiny_model_dir))
    samplers = [
        c.post(
            "create_sampling_session", session_id=c.session, sampling_session_seq_id=0, base_model=str(tiny_model_dir)
        )["sampling_session_id"]
        for c in (large, small)
    ]
    models = [c.create_model() for c in (large, small)]
    long_prompt = {"prompt": prompt(*range(5, 105)), "sampling_params": {"max_tokens": 400, "stop": []}}
    replies = large.post("asample", sampling_session_id=samplers[0], seq_id=0, num_samples=150, **long_prompt)
    generator = np.random.default_rng(0)
    rows = generator.integers(5, 200, (200, 300)).tolist()
    data = [(row[:-1], {"target_tokens": row[1:], "weights": [1.0] * 299}) for row in rows]
    training = [large.send_data(models[0], seq, "cross_entropy", data) for seq in range(1, 6)]
    start = time.monotonic()
    assert len(sampled(small, samplers[1], params={"max_tokens": 3})[0]) <= 3
    small.forward_backward(models[1], 1, "cross_entropy", SFT)
    small.optim_step(models[1], 2, learning_rate=0.01)
    elapsed = time.monotonic() - start

    def finished(answer):
        body = {"request_id": answer["request_id"]}
        try:
            return large.http.post("/retrieve_future", json=body, timeout=0.5).json().get("type") != "try_again"
        except httpx.TimeoutException:
            return False

    assert not finished(training[-1]), f"the large client was done within {elapsed:.1f} s: send more"
    assert not finished(replies)
    large.http.post(f"/sessions/{large.session}/finish", json={})  # stops its work
    assert sampled(small, samplers[1], seq_id=1, params={"max_tokens": 3})


ROUTES = [
    (method, path.format(session_id="s", sampler_id="s", model_id="m", kind="weights", name="n"))
    for path, _, method in tinker_server.tinker_routes()
]


@pytest.mark.parametrize("key", [None, "wrong", "tml-", "Bearer"], ids=["none", "wrong", "prefix", "scheme"])
def test_no_route_answers_without_the_key(server, key):
    assert len(ROUTES) >= 28
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        for method, path in [*ROUTES, ("GET", "/"), ("GET", "/health"), ("POST", "/api/v1/unknown")]:
            headers = {} if key is None else {"x-api-key": key, "authorization": f"Bearer {key}"}
            response = http.request(method, path, headers=headers)
            assert response.status_code == 401, (method, path)
            assert server.api_key not in response.text


def test_bodies_are_limited(client):
    big = b"x" * (tinker_server.MAX_BODY + 1)
    for path in ("asample", "forward_backward", "telemetry", "create_session"):
        response = client.http.post(f"/{path}", content=big, headers=PROTOBUF)
        assert response.status_code == 413, path
    zipped = client.http.post("/forward_backward", content=b"", headers=PROTOBUF | {"content-encoding": "zstd"})
    assert zipped.status_code == 415
    text = client.http.post("/forward_backward", content=b"{}", headers={"content-type": "application/json"})
    assert text.status_code == 415


def test_a_model_has_a_limited_queue(client, monkeypatch):
    model = client.create_model()
    monkeypatch.setattr(request_queues, "MAX_PENDING_BYTES", 2000)
    codes = []
    for seq in range(2, 40):  # number 1 is missing, so all wait
        body = request_message(model, seq, "cross_entropy", SFT, {}).SerializeToString()
        codes.append(client.http.post("/forward_backward", content=body, headers=PROTOBUF).status_code)
    assert set(codes) == {200, 429}
    far = request_message(model, 5000, "cross_entropy", SFT, {}).SerializeToString()
    assert client.http.post("/forward_backward", content=far, headers=PROTOBUF).status_code == 400


def test_many_models_are_refused(client, monkeypatch):
    monkeypatch.setattr(tinker_sessions, "MAX_TRAINED_MODELS", 0)
    body = {
        "session_id": client.session,
        "model_seq_id": 0,
        "base_model": client.base_model,
        "lora_config": {"rank": 2},
    }
    assert client.http.post("/create_model", json=body).status_code == 429


def test_many_samplers_end_the_oldest_one_of_a_checkpoint(client, monkeypatch):
    """A loop that creates a sampling client of a checkpoint at each step does not end with 429."""
    monkeypatch.setattr(tinker_sessions, "MAX_SAMPLERS", 3)
    model = client.create_model()
    path = client.retrieve(client.post("save_weights_for_sampler", model_id=model, seq_id=1, path="step"))["path"]
    body = {"session_id": client.session, "base_model": client.base_model}
    base = client.post("create_sampling_session", **body, sampling_session_seq_id=0)["sampling_session_id"]
    for number in range(1, 7):
        fields = {"session_id": client.session, "sampling_session_seq_id": number, "model_path": path}
        sampler = client.post("create_sampling_session", **fields)["sampling_session_id"]
        assert client.post("create_sampling_session", **fields)["sampling_session_id"] == sampler  # a retry
        assert len(sampled(client, sampler)) == 1
    existing = {name: client.http.get(f"/samplers/{name}").status_code for name in (base, f"{sampler[:-1]}5", sampler)}
    assert [*existing.values()] == [200] * 3
    assert client.http.get(f"/samplers/{sampler[:-1]}4").status_code == 404
    for number, code in ((7, 200), (8, 200), (9, 429)):
        answer = client.http.post("/create_sampling_session", json={**body, "sampling_session_seq_id": number})
        assert answer.status_code == code


def test_unknown_values_name_the_choices(client):
    body = {"session_id": client.session, "model_seq_id": 0, "base_model": "other", "lora_config": {"rank": 2}}
    answer = client.http.post("/create_model", json=body)
    assert answer.status_code == 400 and client.base_model in answer.json()["detail"]
    body |= {"base_model": client.base_model, "lora_config": {"rank": 2, "train_mlp": False, "train_attn": False}}
    assert "unembedding" in client.retrieve(client.post("create_model", **body))["error"]
    for path in ("tinker://x/weights/../../y", "tinker://../weights/a", "s3://x", "tinker://a:train:0/weights/b"):
        answer = client.http.post("/weights_info", json={"tinker_path": path})
        assert answer.status_code in (400, 404), path


def test_two_servers_cannot_write_one_run(server, client, tiny_model_dir):
    model = client.create_model()
    path = server.path / "tinker" / "models" / model.replace(":train:", "-train-")
    with pytest.raises(art.StoreError, match="exists already"):
        TinkerRun.create(path, {"model_id": model})


async def test_results_are_kept_and_removed(monkeypatch):
    table = request_queues.ResultTable()
    monkeypatch.setattr(request_queues, "KEEP_RESULT_S", 0.05)
    result = request_queues.PendingResult("r", task=asyncio.ensure_future(asyncio.sleep(0)))
    table.add(result)
    assert table.pending() == 1
    result.finish({})
    assert table.get("r") is result
    await asyncio.sleep(0.1)
    table.remove_old()
    assert table.get("r") is None


async def test_slots_are_returned_if_a_caller_is_canceled():
    slots, release = request_queues.FairSlots(1), asyncio.Event()

    async def work(client):
        async with slots.slot(client):
            await release.wait()

    tasks = [asyncio.ensure_future(work(name)) for name in "aabb"]
    await asyncio.sleep(0.01)
    tasks[0].cancel()
    tasks[1].cancel()
    await asyncio.sleep(0.01)
    assert slots.running == {"b": 1} and not tasks[3].done()
    release.set()
    await asyncio.wait(tasks)
    assert not slots.running


async def test_the_sessions_of_a_client_share_its_turns():
    """Ann has three sessions and Bob one: every second turn is Bob's."""
    slots, order = request_queues.FairSlots(1), []

    async def work(*owner):
        async with slots.slot(*owner):
            order.append(owner)
            await asyncio.sleep(0)

    owners = [("ann", session) for session in "xyz" for _ in range(2)] + [("bob", "x")] * 3
    await asyncio.gather(*(work(*owner) for owner in owners))
    assert [owner[0] for owner in order] == ["ann", "ann", "bob", "ann", "bob", "ann", "bob", "ann", "ann"]
    assert [owner[1] for owner in order if owner[0] == "ann"] == ["x", "x", "y", "z", "y", "z"]


async def test_fail_all_waits_for_the_end_of_canceled_tasks():
    """A task needs some turns of the event loop for its cleanup."""
    table, ended = request_queues.ResultTable(), []

    async def sample():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            ended.append(True)

    result = request_queues.PendingResult("r", task=asyncio.ensure_future(sample()))
    table.add(result)
    await asyncio.sleep(0)
    failing = asyncio.ensure_future(table.fail_all("The session has ended."))
    await asyncio.sleep(0)
    assert result.error == "The session has ended." and not ended  # a client that waits gets the error at once
    await failing
    assert ended and result.task.cancelled()


def test_names_are_deleted_at_the_same_time(client, server):
    """Each request about a run whose session has ended reads the names. None of them is lost."""
    model = client.create_model()
    names = [f"name-{n}" for n in range(8)]
    for seq, name in enumerate([*names, "last"], 1):
        client.retrieve(client.post("save_weights", model_id=model, seq_id=seq, path=name))
    client.http.post(f"/sessions/{client.session}/finish", json={})
    path = f"/training_runs/{model}/checkpoints"
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda name: client.http.delete(f"{path}/weights/{name}"), names)]
    assert [answer.status_code for answer in answers] == [200] * 8
    listed = client.http.get(path).json()["checkpoints"]
    assert [checkpoint["checkpoint_id"] for checkpoint in listed] == ["weights/last"]
    directory = server.path / "tinker" / "models" / model.replace(":train:", "-train-")
    assert not (directory / LOCK_NAME).exists()


def test_a_copy_of_a_run_does_not_undo_the_changes_of_another_one(client, server):
    """The names that the living model writes are those that a request has left, and the other way round."""
    model = client.create_model()
    directory = server.path / "tinker" / "models" / model.replace(":train:", "-train-")
    for seq, name in enumerate("ab", 1):
        client.retrieve(client.post("save_weights", model_id=model, seq_id=seq, path=name))
    copy = TinkerRun.read(directory)
    client.retrieve(client.post("save_weights", model_id=model, seq_id=3, path="c"))
    copy.delete_checkpoint("weights/a")
    client.retrieve(client.post("save_weights", model_id=model, seq_id=4, path="d"))
    assert [*TinkerRun.read(directory).facts["saved"]] == ["weights/b", "weights/c", "weights/d"]
    assert read_lock(directory / LOCK_NAME)  # the model still has its lock


def test_the_server_ends_its_threads(tiny_model_dir, tmp_path):
    before = {*threading.enumerate()}
    with serving(tiny_model_dir, tmp_path) as server:
        client = TinkerHttp(server, str(tiny_model_dir))
        client.create_model()
        assert json.loads((next((tmp_path / "tinker" / "models").glob("*")) / "tinker.json").read_text())
    rest = {*threading.enumerate()} - before
    assert not [thread for thread in rest if thread.name.startswith(("art-nb-shared", "art_nb-tinker"))]
    assert [*(tmp_path / "tinker" / "models").glob("*")] == []  # nothing was trained or saved
