"""Mutated requests at an endpoint with a real sampler, and at `art-nb run`: no 5xx, no hang, no harm."""

import asyncio
import copy
import json
import random
import string

import httpx
import pytest
from support.audit import count
from support.registered import a_group, ask
from support.remote_parts import Server
from test_endpoint_fuzz import GOOD, places

import art_nb as art
from art_nb.backends.remote_client import model_to_json
from art_nb.backends.remote_protocol import group_lines

pytestmark = pytest.mark.timeout(7200)
VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    -(2**63),
    10**400,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "text",
    "\x00",
    "\ud800",
    "../../x",
    "/etc/passwd",
    ".hidden",
    "C:\\x",
    "a" * 5000,
    [],
    {},
    [[]],
    [{}],
    {"a": {}},
]
FIELDS = """model messages prompt n stream temperature top_p top_k min_p seed stop max_tokens logprobs top_logprobs
    tools
    tool_choice response_format guided_choice guided_regex structured_outputs role content tool_calls
    chat_template_kwargs verb choices run options learning_rate loss_fn config split step row grouped keep keys
    from_model base_model name project run_name lora_config internal_config server_args reward metrics
    trajectories messages_and_choices""".split()


def set_path(value, path, change):
    """Apply `change(parent, key)` at a path in a JSON value."""
    for key in path[:-1]:
        value = value[key]
    change(value, path[-1])


def mutate_json(rng, value):
    """Change one to four places of a JSON value."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 4)):
        path = rng.choice([p for p in places(value) if p] or [(rng.choice(FIELDS),)])
        drawn = copy.deepcopy(rng.choice(VALUES))
        action = rng.choice(["set", "drop", "add", "copy"])

        def change(parent, key, drawn=drawn, action=action):
            if action == "drop" and len(parent):
                del parent[key]
            elif action == "add" and isinstance(parent, dict):
                parent[rng.choice([*FIELDS, rng.choice(string.printable)])] = drawn
            elif action == "copy" and isinstance(parent, list):
                parent.append(copy.deepcopy(parent[key]))
            else:
                parent[key] = drawn

        try:
            set_path(value, path, change)
        except (KeyError, IndexError, TypeError):
            continue  # the place is not there any more
    return value


def mutate_bytes(rng, data):
    """Cut, flip or nest bytes, or leave them as they are."""
    kind = rng.randrange(8)
    at = rng.randrange(len(data) + 1)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + rng.randbytes(rng.randint(1, 9)) + data[at + 1 :]
    if kind == 2:
        return data[:at] + rng.choice([b"[", b'{"a":']) * rng.choice([50, 2000, 100_000]) + data[at:]
    if kind == 3:
        return data.replace(b": 1", b": " + b"9" * 6000)
    return data


def check(reply):
    """A 4xx with a message, or a success."""
    assert reply.status_code < 500 or reply.status_code == 503, (reply.status_code, reply.text[:500])
    if reply.status_code >= 400:
        assert reply.json()["error"]["message"], reply.text[:500]
    assert '"status":5' not in reply.text.replace(" ", ""), reply.text[:500]


async def send_all(client, requests, is_well, every):
    """Send requests eight at a time; after each batch of `every` a good request must be answered."""
    limit, statuses = asyncio.Semaphore(8), {}

    async def send(method, path, content, headers):
        async with limit:
            reply = await client.request(method, path, content=content, headers=headers)
            check(reply)
            statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1

    for start in range(0, len(requests), every):
        await asyncio.gather(*(send(*request) for request in requests[start : start + every]))
        await is_well()
    return statuses


async def test_mutated_requests_at_the_endpoint(tmp_path, tiny_model_dir):
    model = art.TrainableModel(name="ttt", project="fuzz", base_model=str(tiny_model_dir))
    rng, total = random.Random(16), count(10_000, 400)
    async with art.LocalBackend(path=tmp_path, verbose=False) as backend:
        await model.register(backend)
        headers = {"Authorization": f"Bearer {model.inference_api_key}"}
        good = {path: body | {"model": "ttt", "max_tokens": 3} for path, body in GOOD.items()}
        del good["/v1/chat/completions"]["messages"][1]["content"]
        good["/v1/chat/completions"]["messages"][1]["content"] = "Hi"

        def mutated():
            path = rng.choice(sorted(good))
            body = json.dumps(mutate_json(rng, good[path])).encode()
            method = rng.choice(["POST"] * 30 + ["GET", "PUT", "DELETE", "OPTIONS"])
            return method, path, mutate_bytes(rng, body), headers

        async with httpx.AsyncClient(base_url=model.inference_base_url.removesuffix("/v1"), timeout=60) as client:

            async def is_well():
                assert (await ask(model)).message.content is not None

            statuses = await send_all(client, [mutated() for _ in range(total)], is_well, 200)
        assert statuses[400] > total // 4
        assert statuses[200] > total // 100
        assert (await backend.train(model, [await a_group(model)])).step == 1


def calls(model, run, group):
    """A good body of every call of `art-nb run`."""
    lines, choices = group_lines([group]), len(group.trajectories)
    whole = {"model": model_to_json(model)}
    return [
        ({"verb": "register", "choices": 0, **whole}, b""),
        ({"verb": "train", "choices": choices, "run": run, "options": {"learning_rate": 1e-3}}, lines),
        ({"verb": "train_sft", "choices": choices, "run": run, "config": {"learning_rate": 1e-3}}, lines),
        (
            {
                "verb": "log",
                "choices": choices,
                "run": run,
                "split": "val",
                "step": 1,
                "row": {"a": 1},
                "grouped": True,
            },
            lines,
        ),
        ({"verb": "get_step", "choices": 0, "run": run}, b""),
        ({"verb": "delete_checkpoints", "choices": 0, "run": run, "keep": [0, 1]}, b""),
        ({"verb": "fork", "choices": 0, **whole, "from_model": "ttt"}, b""),
        ({"verb": "revoke_keys", "choices": 0, "keys": ["x"]}, b""),
        ({"verb": "pull", "choices": 0, **whole, "step": "latest"}, b""),
    ]


async def test_mutated_requests_at_art_nb_run(tmp_path, tiny_model_dir):
    rng, total = random.Random(61), count(10_000, 300)
    server = Server(tmp_path / "far" / "runs")
    model = art.TrainableModel(name="ttt", project="fuzz", base_model=str(tiny_model_dir))
    try:
        async with server.client(tmp_path / "near") as backend:
            await model.register(backend)
            group = await a_group(model, size=2)
            good = calls(model, backend._registration(model).run, group)
            key = {"Authorization": f"Bearer {server.key}"}

            def mutated():
                head, lines = rng.choice(good)
                head = head if rng.random() < 0.1 else mutate_json(rng, head)
                body = mutate_bytes(rng, json.dumps(head).encode() + b"\n" + lines)
                path = rng.choice(
                    [f"/calls/{rng.randbytes(16).hex()}"] * 12
                    + [
                        "/checkpoints",
                        "/health",
                        "/",
                        f"/runs/{rng.randbytes(8).hex()}/v1/models",
                        "/calls/..%2f..%2fx",
                        f"/calls/{rng.randbytes(16).hex()}?after={rng.choice(['-1', '9' * 30, 'x'])}",
                    ]
                )
                method = rng.choice(["POST"] * 12 + ["GET", "PUT", "DELETE"])
                headers = rng.choice([key] * 12 + [{}, {"Authorization": "Bearer x"}, {"Authorization": b"\xff"}])
                return method, path, body, headers

            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

                async def is_well():
                    assert (await client.get("/health")).json() == {"status": "ok"}
                    assert await model.get_step() >= 0

                statuses = await send_all(client, [mutated() for _ in range(total)], is_well, 100)
            assert statuses[400] > total // 4
            assert statuses[401] > total // 100
            fresh = art.TrainableModel(name="fresh", project="fuzz", base_model=str(tiny_model_dir))
            await fresh.register(backend)  # mutated calls may have ruined the other one
            assert (await backend.train(fresh, [await a_group(fresh)])).step == 1
    finally:
        status, log = server.end()
        print(log[-6000:])
    assert status == 0
    assert "Traceback" not in log, log[-3000:]
    assert {path.name for path in tmp_path.iterdir()} == {"far", "near"}
    assert {path.name for path in (tmp_path / "far").iterdir()} == {"runs"}
