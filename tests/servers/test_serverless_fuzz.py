"""Mutated requests to `art-nb run --serverless`: no 5xx, no answer without a key, and the server works afterwards."""

import copy
import json
import random

import httpx
import pytest
from support.audit import count
from support.serverless_parts import JOBS, QUESTION, ServerlessProcess, job_body

pytestmark = pytest.mark.timeout(3600)
REQUESTS = count(10_000, 300)
MODEL = "wandb-artifact:///art-nb/ttt/agent"
NUMBERS = [None, True, False, 0, 1, -1, 7, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, 1e-320]
TEXTS = ["", "x", "agent", "..", "a/b", "a@1", "\ud800", "\x00", "é", "x" * 5000, "all", "asc", "token", "yes"]
LEAVES = [*NUMBERS, *TEXTS, [], {}, [[]], [None], {"": None}]
KEYS = """model_id trajectory_groups experimental_config steps split name project entity base_model return_existing
    reward messages_and_choices trajectories message role content finish_reason logprobs token_ids prompt_token_ids
    learning_rate epsilon loss_fn kl_penalty_coef plot_tensors model messages n max_tokens stream tools metadata metrics
    logs exceptions additional_histories exchanges training_data_url config nonsense""".split()


def templates(model_id, base, choices, job_id):
    """A good request of each kind: method, path and body."""
    models = "/v1/preview/models"
    job = json.loads(job_body(model_id, choices, epsilon=0.2, scale_rewards=True, importance_sampling_level="token"))
    names = {"entity": None, "project": "ttt", "name": "agent", "base_model": str(base), "return_existing": True}
    ask = {"model": MODEL, "messages": [QUESTION], "max_tokens": 2}
    return [
        ("POST", models, names),
        ("GET", f"{models}/{model_id}/checkpoints?limit=2&order=desc&after={model_id}-1", None),
        ("DELETE", f"{models}/{model_id}/checkpoints", {"steps": [40, 41]}),
        ("POST", f"{models}/{model_id}/log", {**job, "split": "val", "experimental_config": None}),
        ("POST", JOBS, job),
        ("POST", JOBS, job),
        ("POST", JOBS, job),
        ("GET", f"{JOBS}/{job_id}/events?after={job_id}-0&limit=10", None),
        ("DELETE", f"{JOBS}/{job_id}", None),
        ("POST", "/v1/preview/sft-training-jobs",
         {"model_id": model_id, "training_data_url": "wandb-artifact:///e/p/d:v0", "config": {"batch_size": 2}}),
        ("POST", "/v1/chat/completions", {**ask, "n": 2, "logprobs": True}),
        ("POST", "/v1/completions", {"model": "agent@0", "prompt": "A1", "max_tokens": 2}),
        ("POST", "/v1/responses", {"model": MODEL, "input": "A1", "max_output_tokens": 2}),
        ("POST", "/v1/messages", ask),
        ("POST", "/v1/messages/count_tokens", {"model": MODEL, "messages": [QUESTION]}),
        ("GET", "/v1/models", None),
    ]  # fmt: skip


def places(value, path=()):
    """Every path into a JSON value."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def mutate(rng, body):
    """The body with one to three things wrong."""
    body = json.loads(json.dumps(body))
    for _ in range(rng.randint(1, 3)):
        *parents, last = rng.choice(list(places(body)) or [()]) or (rng.choice(KEYS),)
        target = body
        for key in parents:
            target = target[key]
        action = rng.random()
        if action < 0.25 and (last in target if isinstance(target, dict) else True):
            del target[last]
        elif action < 0.4 and isinstance(target, dict):
            target[rng.choice(KEYS)] = copy.deepcopy(rng.choice(LEAVES))
        elif action < 0.5 and isinstance(target, list):
            target.append(copy.deepcopy(rng.choice([*LEAVES, target[last]])))
        else:
            target[last] = copy.deepcopy(rng.choice(LEAVES))
    return body


def cut(rng, data):
    """The bytes, of which a part may be missing or changed."""
    kind, at = rng.random(), rng.randrange(len(data) + 1)
    if kind < 0.1:
        return data[:at]
    if kind < 0.2:
        return data[:at] + rng.randbytes(rng.randint(1, 4)) + data[at + 2 :]
    if kind < 0.25:
        return data[:at] + b"[" * 100_000
    if kind < 0.28:
        return data.replace(b":", b": NaN,", 1)
    return data


def mutated(rng, choices):
    """A request as (method, path, content); most of its parts are as they should be."""
    method, path, body = rng.choice(choices)
    content = b"" if body is None else cut(rng, json.dumps(mutate(rng, body)).encode())
    if rng.random() < 0.2 or body is None:
        at = rng.randrange(1, len(path) + 1)
        path = (
            path[:at]
            + rng.choice(["", "/", "x", "%00", "..", "?limit=x", "é", "&after=1", "%2F", "-1"])
            + path[at + 1 :]
        )
    if rng.random() < 0.05:
        method = rng.choice(["PUT", "PATCH", "GET", "POST", "HEAD", "OPTIONS"])  # a DELETE would delete the model
    return method, path, content


def headers_of(rng, key):
    """Headers, and whether they contain the key."""
    kind = rng.random()
    if kind < 0.15:
        wrong = ["", "Bearer", f"Bearer {key[:-1]}", f"Basic {key}", f"Bearer {key}x", key, "Bearer \xff"]
        return {"Authorization": rng.choice(wrong).encode("latin-1")}, False
    if kind < 0.25:
        return {"x-api-key": key}, True
    return {"Authorization": f"Bearer {key}"}, True


@pytest.mark.slow
def test_mutated_requests(tiny_model_dir, tmp_path):
    process, rng = ServerlessProcess(tmp_path), random.Random(0)
    model_id = process.register(tiny_model_dir)
    sampled = process.sample(n=3)
    job_id = process.submit(job_body(model_id, sampled))
    process.wait(job_id)
    choices = templates(model_id, tiny_model_dir, sampled, job_id)
    client, statuses = httpx.Client(base_url=process.url, timeout=120), {}
    for n in range(REQUESTS):
        method, path, content = mutated(rng, choices)
        headers, has_key = headers_of(rng, process.key)
        answer = client.request(method, path, content=content, headers=headers)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        told = (n, method, path, content[:2000], answer.text[:500])
        assert answer.status_code < 500, told
        assert has_key or answer.status_code == 401, told
        if answer.status_code >= 400 and method != "HEAD":
            error = answer.json()["error"]
            assert error["message"], told
            assert error["type"] in ("invalid_request_error", "not_found_error", "authentication_error",
                                     "rate_limit_error"), told  # fmt: skip
    print(statuses)
    assert len(statuses) >= 5, statuses  # 200, 400, 401, 404 and 405 at least
    assert statuses[200] > REQUESTS / 50, statuses
    good = job_body(model_id, process.sample(n=6))
    events = process.wait(process.submit(good), timeout_s=300)
    assert events[-1]["type"] == "training_ended"
    code, printed = process.end()
    assert code == 0
    assert "The reply failed" not in printed, printed[-3000:]
