"""`art-nb run --serverless --backend ray`: a run of `art.ServerlessBackend`, a restart, and two clients with keys."""

import asyncio
from itertools import count

import httpx
import openai
import pytest
from support.registered import QUESTION, a_group, ask, check_two_steps, heard
from support.remote_parts import Server

import art_nb as art
from art_nb.core.types import ServeError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CLUSTER = ["--serverless", "--backend", "ray", "--samplers", "2", "--learners", "1", "--address", "local"]
KEYS = {name: f"{name}-0123456789-{name}" for name in ("ann", "bob")}


class KeyedServer(Server):
    """A server with a key for each client. Ann may have four requests and two jobs at a time, and 300 kB."""

    def __init__(self, folder, port=0):
        file = folder.with_suffix(".toml")
        quotas = "max_requests = 4\nmax_jobs = 2\nmax_bytes = 300_000\n"
        file.write_text("".join(f'[{name}]\nkey = "{key}"\n{quotas * (name == "ann")}' for name, key in KEYS.items()))
        file.chmod(0o600)
        super().__init__(folder, None, port, *CLUSTER, "--keys", str(file), warm=False)

    def client(self, folder, name):
        settings = {"base_url": f"{self.url}/v1", "api_key": KEYS[name], "verbose": False}
        return art.ServerlessBackend(**settings, path=folder / name)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = KeyedServer(tmp_path_factory.mktemp("far") / "runs")
    yield started
    assert started.end()[0] == 0


@pytest.fixture
def start(tmp_path):
    """A maker of servers for the same runs. They end with the test, also if it fails."""
    started = []

    def make(port=0):
        started.append(KeyedServer(tmp_path / "runs", port))
        return started[-1]

    yield make
    for each in started:
        assert each.process.poll() is not None or each.end()[0] == 0


numbers = count()


async def rollout(model, scenario):
    """Two turns. All rewards are different, so that each step learns something."""
    messages, choices = [*QUESTION], []
    for _ in range(2):
        reply = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages, max_tokens=8, logprobs=True
        )
        choices.append(reply.choices[0])
        answer = {"role": "assistant", "content": choices[-1].message.content or ""}
        messages += [answer, {"role": "user", "content": "Go on."}]
    turns = [*QUESTION, choices[0], messages[-1], choices[1]]
    return art.Trajectory(messages_and_choices=turns, reward=float(next(numbers)))


async def test_it_keeps_the_contract(server, named, tmp_path):
    found = await art.check_backend(server.client(tmp_path, "bob"), named(), learning_rate=1e-2)
    assert found["step"] == 1
    assert found["rise"] > 0.1
    assert found["drift"] < 0.05


async def test_a_whole_run_and_a_restart(start, named, tmp_path):
    server, model = start(), named()
    backend = server.client(tmp_path, "bob")
    events = heard(backend)
    await model.register(backend)
    options = {"groups_per_step": 2, "rollouts_per_group": 2, "show": False, "learning_rate": 1e-2}
    run = art.train(model, rollout, ["a", "b"], steps=2, **options)
    await run
    check_two_steps(run, events)
    versions = [c.model_extra["policy_version"] for t in run.groups[-1] for c in t.messages_and_choices[1::2]]
    assert {*versions} == {1}
    assert model.store.steps("train") == [1, 2]
    (there,) = (art.RunStore(path) for path in (tmp_path / "runs").glob("bob@*/models/ttt"))
    assert there.steps("train") == [1, 2] and there.steps_saved() == [0, 1, 2]
    before = await ask(model, temperature=0)
    assert server.end()[0] == 0
    start(server.port)
    assert (await ask(model, temperature=0)).message == before.message  # the model is loaded again
    run = art.train(model, rollout, ["a", "b"], steps=3, **options)
    await run
    assert (run.status, run.step, await model.get_step()) == ("done", 3, 3)
    await backend.delete(model)
    with pytest.raises(ServeError, match="not registered"):
        await model.get_step()
    assert not [*(tmp_path / "runs").glob("bob@*/models/ttt")]
    await backend.close()


async def test_clients_have_their_own_models_and_quotas(server, named, tmp_path):
    ann, bob = (server.client(tmp_path, name) for name in KEYS)
    model, other = named(), named()
    await model.register(ann)
    await other.register(bob)  # the same names, and another run
    await ann.train(model, [await a_group(model)], learning_rate=1e-2)
    assert (await model.get_step(), await other.get_step()) == (1, 0)
    body = {"model": model.get_inference_name(), "messages": QUESTION, "max_tokens": 200, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=f"{server.url}/v1", timeout=120) as http:

        async def post(name, **fields):
            headers = {"authorization": f"Bearer {KEYS.get(name, name)}"}
            return (await http.post("/chat/completions", json=body | fields, headers=headers)).status_code

        assert await post("wrong") == 401
        assert await post("bob") == 404
        assert await post("ann", messages=[{"role": "user", "content": "A" * 400_000}]) == 413
        statuses = await asyncio.gather(*(post("ann") for _ in range(12)))
        assert {*statuses} == {200, 429}
        with pytest.raises(openai.NotFoundError):
            await ask(other, model.get_inference_name())
        leaving = [asyncio.ensure_future(post("ann")) for _ in range(4)]
        await asyncio.sleep(0.2)
        for request in leaving:
            request.cancel()
        await asyncio.wait(leaving)
        headers = {"authorization": f"Bearer {KEYS['ann']}"}
        while (await http.get(f"{server.url}/health", headers=headers)).json().get("requests") != 0:  # or an error: 429
            await asyncio.sleep(0.05)
        assert await post("ann", max_tokens=4) == 200  # the quota is free again
    for backend in (ann, bob):
        await backend.close()
