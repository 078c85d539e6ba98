"""One client with 100 requests does not delay the request of another client by more than two replies of each slot."""

import httpx
import pytest
from support.serverless_parts import QUESTION
from support.tinker_parts import serving
from support.turns import endpoint_client, replies_before

import art_nb as art
from art_nb.backends.remote_server import BackendServer
from art_nb.servers.serverless_routes import ServerlessServer

pytestmark = pytest.mark.timeout(300)
MANY, RUNNING, TOKENS = 100, 8, 120
KEYS = {name: f"{name}-0123456789-{name}" for name in ("ann", "bob")}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text("".join(f'[{name}]\nkey = "{key}"\n' for name, key in KEYS.items()))
    path.chmod(0o600)
    return path


def clients_of(url, prefix=""):
    limits = httpx.Limits(max_connections=None)
    return [
        httpx.AsyncClient(base_url=url, headers={"x-api-key": prefix + key}, timeout=120, limits=limits)
        for key in KEYS.values()
    ]


async def test_the_serverless_server(tiny_model_dir, tmp_path, key_file):
    """Ann and Bob have a model each. Bob's replies are long."""
    backend = art.LocalBackend(path=tmp_path, device="cpu", dtype="float32", max_running=RUNNING, verbose=False)
    with ServerlessServer(backend, keys=key_file, port=0) as server:
        ann, bob = clients_of(f"http://127.0.0.1:{server.port}")
        for client in (ann, bob):
            body = {"entity": None, "project": "p", "name": "m", "base_model": str(tiny_model_dir)}
            assert (await client.post("/v1/preview/models", json=body | {"return_existing": True})).status_code == 200

        async def ask(client, name, tokens):
            body = {"model": f"{name}/p/m", "messages": [QUESTION], "max_tokens": tokens, "ignore_eos": True}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text

        def is_busy():
            waiting = [runtime.sampler.stats()["waiting"] for runtime in backend._runtimes.values()]
            return max(waiting) >= MANY // 2

        ask_one, ask_many = (lambda _: ask(ann, "ann", 4)), (lambda _: ask(bob, "bob", TOKENS))
        assert await replies_before(ask_one, ask_many, is_busy, MANY, RUNNING) <= 2 * RUNNING
        for client in (ann, bob):
            await client.aclose()


async def test_two_notebooks_of_one_model(named, tmp_path):
    """Each request is a session of its own, as with rollouts of one request."""
    backend = art.LocalBackend(path=tmp_path, device="cpu", dtype="float32", max_running=RUNNING, verbose=False)
    with BackendServer(backend, port=0) as server:
        address = {"base_url": f"http://127.0.0.1:{server.port}", "api_key": server.api_key, "verbose": False}
        notebooks = [(art.Backend(**address, path=tmp_path / name), named()) for name in KEYS]
        for each, model in notebooks:
            await model.register(each)
        ann, bob = (endpoint_client(model) for _, model in notebooks)

        async def ask(client, number, tokens):
            body = {"model": "ttt", "messages": [QUESTION], "max_tokens": tokens, "ignore_eos": True}
            answer = await client.post("/chat/completions", json=body, headers={"x-session-id": str(number)})
            assert answer.status_code == 200, answer.text

        (runtime,) = backend._runtimes.values()
        is_busy = lambda: runtime.sampler.stats()["waiting"] >= MANY // 2
        ask_one, ask_many = (lambda n: ask(ann, n, 4)), (lambda n: ask(bob, n, TOKENS))
        assert await replies_before(ask_one, ask_many, is_busy, MANY, RUNNING) <= 2 * RUNNING
        for client in (ann, bob, *(each for each, _ in notebooks)):
            await (client.aclose() if isinstance(client, httpx.AsyncClient) else client.close())


async def test_the_server_for_tinkers_client(tiny_model_dir, tmp_path, key_file):
    """Ann and Bob sample from the same base model."""
    with serving(tiny_model_dir, tmp_path, keys=key_file, max_running=RUNNING) as server:
        accepted, (ann, bob) = [], clients_of(f"{server.url}/api/v1", "tml-")

        async def post(client, path, **body):
            answer = await client.post(f"/{path}", json=body)
            assert answer.status_code == 200, answer.text
            return answer

        async def sampler_of(client):
            session = (await post(client, "create_session", tags=[], sdk_version="0.38.0")).json()["session_id"]
            body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": str(tiny_model_dir)}
            return (await post(client, "create_sampling_session", **body)).json()["sampling_session_id"]

        async def ask(client, sampler, number, tokens):
            prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
            body = {"sampling_session_id": sampler, "seq_id": number, "num_samples": 1, "prompt": prompt}
            body |= {"sampling_params": {"max_tokens": tokens, "stop": []}}
            request_id = (await post(client, "asample", **body)).json()["request_id"]
            accepted.append(request_id)
            while True:
                answer = await post(client, "retrieve_future", request_id=request_id)
                if "json" not in answer.headers["content-type"] or answer.json().get("type") != "try_again":
                    assert "error" not in answer.text[:200]
                    return

        one, many = await sampler_of(ann), await sampler_of(bob)
        ask_one, ask_many = (lambda n: ask(ann, one, n, 4)), (lambda n: ask(bob, many, n, TOKENS))
        is_busy = lambda: len(accepted) == MANY
        assert await replies_before(ask_one, ask_many, is_busy, MANY, RUNNING) <= 2 * RUNNING
        for client in (ann, bob):
            await client.aclose()
