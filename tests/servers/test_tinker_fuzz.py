"""Mutated requests of Tinker's client: no 5xx, no error of the server in a result, and no answer without the key."""

import json
import random

import pytest
from support.audit import count
from support.tinker_parts import PROTOBUF, TinkerHttp, request_message, serving

from art_nb.servers import tinker_server

REQUESTS = count(10_000, 300)
EACH = 60  # requests of one session
LEAVES = [
    None, True, 0, 1, -1, 2, 3.5, -0.0, 1e308, float("nan"), float("inf"), 2**31, 2**63, -(2**63), 10**400, "", "a",
    "\ud800", "\x00", "x" * 5000, [], {}, [[]], [None], [0, -1], {"type": "x"}, "tinker://a:train:0/weights/b",
]  # fmt: skip
TOKENS = [5, 6, 7, 8]
INPUTS = {
    "cross_entropy": {"target_tokens": [6, 7, 8, 9], "weights": [0.0, 1.0, 1.0, 0.5]},
    "ppo": {"target_tokens": [6, 7, 8, 9], "logprobs": [0.0, -1.0, -1.0, -2.0], "advantages": [0.0, 1.0, 1.0, -1.0]},
}


def good_requests(client, model, sampler, saved):
    """Requests that succeed, by path."""
    session = client.session
    prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
    targets = {"data": [5, 6, 7], "dtype": "int64", "shape": [3, 1]}
    lora = {"rank": 2, "seed": 1, "train_attn": True, "train_mlp": True, "train_unembed": True}
    adam = {
        "learning_rate": 1e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 1.0,
    }
    sampling = {"max_tokens": 3, "seed": 1, "stop": ["x"], "temperature": 1.0, "top_k": -1, "top_p": 1.0}
    return {
        "create_session": {"tags": [], "user_metadata": {"a": "b"}, "sdk_version": "0.38.0", "display_name": "d"},
        "session_heartbeat": {"session_id": session},
        "create_model": {
            "session_id": session, "model_seq_id": 1, "base_model": client.base_model, "lora_config": lora,
            "optimizer_config": {"type": "adamw"}, "user_metadata": {"a": 1},
        },
        "optim_step": {"model_id": model, "seq_id": 1, "adam_params": adam},
        "save_weights": {"model_id": model, "seq_id": 1, "path": "a", "ttl_seconds": 3600, "overwrite": True},
        "load_weights": {"model_id": model, "seq_id": 1, "path": saved, "optimizer": True},
        "save_weights_for_sampler": {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 3, "kind": "snapshot"},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 4, "model_path": saved},
        "asample": {
            "sampling_session_id": sampler, "seq_id": 1, "num_samples": 2, "prompt": prompt,
            "sampling_params": sampling, "prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2,
            "target_prompt_logprobs": targets, "prompt_alt_tokens_k": 2, "prompt_logprobs_last_n": 2,
        },
        "get_info": {"model_id": model},
        "weights_info": {"tinker_path": saved},
        "retrieve_future": {"request_id": f"{model}:0", "allow_metadata_only": True},
        "cancel_future": {"request_id": f"{model}:0"},
        "telemetry": {"events": [], "session_id": session},
        "client/config": {"sdk_version": "0.38.0"},
    }  # fmt: skip


def places(value, path=()):
    """Every path into a JSON value."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def mutated_json(body, rng):
    """A body with one to three changed, removed or added values, and sometimes broken bytes."""
    body = json.loads(json.dumps(body))
    for _ in range(rng.randint(1, 3)):
        where = rng.choice([*places(body)])
        if not where:
            body = body | {rng.choice(["type", "new", "seq_id", "path"]): rng.choice(LEAVES)}
            continue
        *parents, last = where
        target = body
        for key in parents:
            target = target[key]
        if rng.random() < 0.2:
            del target[last]
        else:
            target[last] = rng.choice(LEAVES)
    return broken(json.dumps(body).encode(), rng, 0.1)


def broken(data, rng, share):
    """The bytes, or in a share of cases with some replaced, or cut."""
    if rng.random() >= share or not data:
        return data
    position = rng.randrange(len(data))
    if rng.random() < 0.3:
        return data[:position]
    return data[:position] + rng.randbytes(rng.randint(1, 4)) + data[position + rng.randint(0, 4) :]


def mutated_protobuf(model, seq, rng):
    """A request with data, with changed arrays, options, or bytes."""
    loss = rng.choice([*INPUTS, *INPUTS, "cispo", "dro", "gspo", "custom", "nonsense", ""])
    inputs = {name: [*values] for name, values in INPUTS.get(loss, INPUTS["ppo"]).items()}
    tokens, config = [*TOKENS], {}
    for _ in range(rng.randint(0, 2)):
        action = rng.randrange(6)
        if action == 0:
            tokens = rng.choice([[], [-1], [10**6], tokens * 500, tokens[:2]])
        elif action == 1:
            inputs.pop(rng.choice([*inputs]), None)
        elif action == 2 and inputs:
            inputs[rng.choice([*inputs])] = rng.choice(
                [[], [1.0], [float("nan")] * 4, [[1.0] * 4], [10**9] * 4, [-5] * 4]
            )
        elif action == 3:
            inputs["new"] = [1.0] * 4
        elif action == 4:
            config = {rng.choice(["clip_low_threshold", "beta", "x"]): rng.choice([0.5, -1.0, float("nan"), 1e300])}
        else:
            seq = rng.choice([0, -1, seq + 1, 10**6])
    message = request_message(
        model, seq, loss, [(tokens, inputs)] * rng.choice([0, 1, 1, 2]), config, rng.random() < 0.2
    )
    return broken(message.SerializeToString(), rng, 0.4)


@pytest.fixture
def client(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(tinker_server, "MAX_POLL_S", 0.3)
    with serving(tiny_model_dir, tmp_path, max_model_len=64) as server:
        server_client = TinkerHttp(server, str(tiny_model_dir))
        server_client.server = server
        yield server_client


def new_world(client):
    """A session with a model, a checkpoint and a sampling session."""
    session = TinkerHttp(client.server, client.base_model)
    model = session.create_model(0, rank=2)
    saved = session.retrieve(session.post("save_weights", model_id=model, seq_id=1, path="a"))["path"]
    base = {"session_id": session.session, "sampling_session_seq_id": 0, "base_model": client.base_model}
    sampler = session.post("create_sampling_session", **base)["sampling_session_id"]
    return session, model, good_requests(session, model, sampler, saved)


def check_result(session, answer):
    """An accepted request ends, and its error, if it has one, is not one of the server."""
    session.http.post("/cancel_future", json={"request_id": answer["request_id"]})
    response = session.http.post("/retrieve_future", json={"request_id": answer["request_id"]})
    assert response.status_code in (200, 410), response.text
    if response.status_code == 200 and response.headers["content-type"] == "application/json":
        assert response.json().get("category", "user") == "user", response.text


@pytest.mark.timeout(7000)
def test_mutated_requests(client):
    rng, statuses, session = random.Random(7), {}, client
    for i in range(REQUESTS):
        if i % EACH == 0:
            session.http.post(f"/sessions/{session.session}/finish", json={})
            session, model, good = new_world(client)
            seq = 2
        if rng.random() < 0.35:
            path, data, headers = "forward_backward", mutated_protobuf(model, seq, rng), PROTOBUF
        else:
            path = rng.choice([*good])
            body = good[path] | ({"seq_id": seq} if good[path].get("seq_id") == 1 else {})
            data, headers = mutated_json(body, rng), {"content-type": "application/json"}
        if rng.random() < 0.1:
            response = session.http.post(f"/{path}", content=data, headers=headers | {"x-api-key": "tml-wrong"})
            assert response.status_code == 401
            continue
        response = session.http.post(f"/{path}", content=data, headers=headers)
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        assert response.status_code < 500, (i, path, data[:500], response.text)
        answer = response.json() if response.headers["content-type"] == "application/json" else {}
        if response.status_code == 200 and "request_id" in answer and path not in ("retrieve_future", "cancel_future"):
            check_result(session, answer)
            seq = (
                max(seq, int(answer["request_id"].rpartition(":")[2]) + 1)
                if ":train:0" in answer["request_id"]
                else seq
            )
    assert statuses[200] > REQUESTS / 10 and statuses[400] > REQUESTS / 10, statuses
    session, model, _ = new_world(client)
    data = [(TOKENS, INPUTS["cross_entropy"])]
    assert session.forward_backward(model, 2, "cross_entropy", data)[0]["loss:sum"] > 0
    print(statuses)
