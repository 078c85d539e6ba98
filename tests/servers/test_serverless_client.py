"""`art.ServerlessBackend` against `art-nb run --serverless` in a process of its own."""

import asyncio
import os
import subprocess
import sys

import httpx
import numpy as np
import openai
import pytest
from support.registered import QUESTION, a_group, ask, better_and_worse, check_two_steps, heard
from support.remote_parts import ROOT, Server
from support.serverless_parts import ServerlessProcess

import art_nb as art
from art_nb.backends.options import RENAMED, BackendOptions
from art_nb.core.events import GradientStep, Warned
from art_nb.core.types import ServeError, TrainError
from art_nb.servers.serverless_client import protocol_options
from art_nb.servers.serverless_protocol import REFUSED_OPTIONS, ExperimentalConfig

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    process = ServerlessProcess(tmp_path_factory.mktemp("far"))
    yield process
    process.end()


def client(server, folder, **options):
    settings = {"base_url": f"{server.url}/v1", "api_key": server.key, "path": folder, "verbose": False}
    return art.ServerlessBackend(**settings | options)


@pytest.fixture
async def far(server, tmp_path):
    async with client(server, tmp_path / "near") as backend:
        yield backend


async def until(truth, work):
    """Wait for something that happens in the course of some work."""
    while not truth():
        assert not work.done(), work
        await asyncio.sleep(0.01)


async def a_long_group(model):
    """Replies that nobody gave, each another one: some seconds of training, also on a fast machine."""
    choice, draw = await ask(model), np.random.default_rng(0)
    return better_and_worse(
        [
            choice.model_copy(update={"logprobs": None, "token_logprobs": None, "token_ids": ids.tolist()})
            for ids in draw.integers(3, 290, (1500, 128))
        ]
    )


async def test_it_keeps_the_contract(server, named, tmp_path):
    found = await art.check_backend(client(server, tmp_path), named(), learning_rate=1e-2)
    assert found["step"] == 1
    assert found["rise"] > 0.1
    assert found["drift"] < 0.05


async def test_register_waits_until_the_model_is_loaded(named, far, monkeypatch):
    model = named()
    with monkeypatch.context() as patched:
        patched.setattr("art_nb.backends.remote_client.READ_TIMEOUT_S", 0.01)
        await model.register(far)
    assert await model.get_step() == 0


async def test_it_trains_what_a_local_backend_trains(named, far, tmp_path):
    here, there = named("here"), named("there")
    await there.register(far)
    group = await a_group(there)
    assert group.trajectories[0].messages_and_choices[-1].model_extra["prompt_token_ids"]
    async with art.LocalBackend(path=tmp_path / "local", verbose=False) as local:
        await here.register(local)
        options = {"learning_rate": 1e-2, "loss": "ppo", "epsilon": 0.2, "max_length": 512}
        results = [await backend.train(model, [group], **options) for backend, model in ((local, here), (far, there))]
        answers = [await ask(model, temperature=0) for model in (here, there)]
    for name in ("loss/train", "loss/grad_norm", "data/step_num_groups_trainable", "data/step_num_gradient_steps"):
        np.testing.assert_allclose(results[0].metrics[name], results[1].metrics[name], rtol=1e-4)
    assert answers[0].model_extra["token_ids"] == answers[1].model_extra["token_ids"]
    assert results[1].artifact_name == f"art-nb/{there.project}/there:step1"
    assert group.metadata["trained_step"] == 1


async def test_a_whole_run(named, far, server):
    """`art.train` shows the job's events, and both sides have the rollouts."""
    model, events = named(), heard(far)
    await model.register(far)

    async def rollout(model, scenario):
        choice = await ask(model)
        return art.Trajectory(messages_and_choices=[*QUESTION, choice], reward=float(len(choice.message.content)))

    run = art.train(model, rollout, ["a", "b"], steps=2, groups_per_step=2, rollouts_per_group=4, show=False)
    micro = []
    far.bus.subscribe(lambda event: micro.append(run.progress.micro), GradientStep)
    await run
    check_two_steps(run, events)
    steps = [event for event in events if isinstance(event, GradientStep)]
    assert [(event.step, event.micro_batch, event.micro_batches) for event in steps] == [
        (1, 0, 1), (1, 1, 1), (2, 0, 1), (2, 1, 1)
    ]  # fmt: skip
    assert steps[1].tokens > 0
    assert {(0, 1), (1, 1)} <= {*micro, run.progress.micro}
    assert model.store.steps("train") == [1, 2]
    there = art.RunStore(server.folder / model.project / "models" / "ttt")
    assert there.steps("train") == [1, 2]
    assert [row["train/reward"] for row in there.history()] == [row["train/reward"] for row in model.store.history()]
    versions = [c.model_extra["policy_version"] for t in run.groups[-1] for c in t.messages_and_choices[1:]]
    assert {*versions} == {1}


async def test_checkpoints_are_served_and_deleted(named, far):
    model = named()
    await model.register(far)
    first = await ask(model, temperature=0)
    for _ in range(3):
        await far.train(model, [await a_group(model)], learning_rate=1e-2)
    await model.log(metrics={"reward": 1.0}, split="val", step=2)
    assert model.get_inference_name(step=2) == f"wandb-artifact:///art-nb/{model.project}/ttt:step2"
    old = await ask(model, model.get_inference_name(step=0), temperature=0)
    assert old.model_extra["token_ids"] == first.model_extra["token_ids"]
    short = await ask(model, f"{model.project}/ttt@0", temperature=0)
    assert short.model_extra["token_ids"] == first.model_extra["token_ids"]
    await model.delete_checkpoints()
    assert [item["step"] for item in await far._checkpoints(model)] == [3, 2]
    with pytest.raises(openai.NotFoundError):
        await ask(model, model.get_inference_name(step=0))
    assert await model.get_step() == 3
    again = named()
    await again.register(far)  # the cell again
    assert (again.id, await again.get_step()) == (model.id, 3)
    await far.delete(again)
    with pytest.raises(ServeError, match="not registered"):
        await again.get_step()
    assert model.store.history()  # the run directory here is kept
    await model.register(far)
    assert await model.get_step() == 0


async def test_many_checkpoints_are_listed_in_pages(named, far):
    model = named()
    await model.register(far)
    for _ in range(3):
        await far.train(model, [await a_group(model, rewards=[1.0] * 6)])  # nothing is learned
    assert [item["step"] for item in await far._checkpoints(model)] == [3, 2, 1, 0]
    path = f"/preview/models/{model.id}/checkpoints"
    page = await far._send("GET", path, params={"limit": 3, "order": "desc"})
    rest = await far._send("GET", path, params={"after": page["last_id"], "order": "desc"})
    assert [item["step"] for item in page["data"] + rest["data"]] == [3, 2, 1, 0]


async def test_a_failed_job_raises_its_message(named, far):
    model = named()
    await model.register(far)
    group = await a_group(model)
    choice = group.trajectories[0].messages_and_choices[-1]
    choice.token_ids = [10**6] * len(choice.token_ids)
    with pytest.raises(TrainError, match="Training job failed: A choice has the token ID 1000000"):
        await far.train(model, [group])
    with pytest.raises(TrainError, match="learning_rate=-1"):
        await far.train(model, [group], learning_rate=-1.0)
    assert await model.get_step() == 0
    assert (await far.train(model, [await a_group(model)])).step == 1


async def test_nothing_to_learn_is_said_once(named, far, capsys):
    model, warned = named(), heard(far, Warned)
    await model.register(far)
    group = await a_group(model, rewards=[0.5] * 6)
    far.verbose = True
    result = await far.train(model, [group])
    assert (result.step, result.metrics["data/step_num_gradient_steps"]) == (1, 0)
    assert result.metrics["data/step_num_groups_trainable"] == 0
    await far.train(model, [group])
    assert [event.is_repeated for event in warned] == [False, True]
    assert capsys.readouterr().out.count("Nothing is learned") == 1


ACCEPTED = ExperimentalConfig.model_fields.keys() - REFUSED_OPTIONS.keys()


@pytest.mark.parametrize("name", sorted({*BackendOptions.__annotations__} - {"verbose", "save_checkpoint"}))
def test_an_option_is_sent_or_refused_by_its_name(name):
    """The names of ART that the protocol has, and art_nb's names of them, are sent. All others are refused."""
    values = {"loss_fn": "ppo", "loss": "ppo", "kl_source": "sample", "kl_penalty_source": "sample", "ppo": True,
              "importance_sampling_level": "sequence", "rescored": True, "precalculate_logprobs": True,
              "max_length": 64, "packed_sequence_length": 64}  # fmt: skip
    of_art = {ours: art_name for art_name, ours in RENAMED.items()}.get(name, name)
    field = ExperimentalConfig.model_fields.get(of_art)
    value = values.get(name, True if field is not None and "bool" in str(field.annotation) else 1)
    needed = {"precalculate_logprobs": True} if name == "truncated_importance_sampling" else {}
    if of_art in ACCEPTED:
        assert protocol_options({name: value, **needed}) == {of_art: value, **needed}
    else:
        with pytest.raises(TrainError, match=name):
            protocol_options({name: value})


async def test_what_the_protocol_does_not_have(named, far):
    assert protocol_options({"verbose": True, "save_checkpoint": True, "epsilon": None}) == {}
    with pytest.raises(TrainError, match="save_checkpoint"):
        protocol_options({"save_checkpoint": False})
    with pytest.raises(TrainError, match="Did you mean 'epsilon'"):
        protocol_options({"epsilom": 0.1})
    for settings in ({"lora_config": {"rank": 4}}, {"_internal_config": {"a": 1}}):
        with pytest.raises(TrainError, match=next(iter(settings))):
            await named("other", **settings).register(far)
    with pytest.raises(ServeError, match="project"):  # the server does not accept it as the name of a directory
        await named("other", project="a/b").register(far)
    with pytest.raises(TrainError, match="server_args"):
        await named("other").register(far, _openai_client_config={"server_args": {"tool_call_parser": "hermes"}})
    model = named()
    await model.register(far)
    with pytest.raises(TrainError, match=r"art\.Backend"):
        await model.train_sft([art.Trajectory(messages_and_choices=QUESTION)])
    for call in (far._experimental_pull_model_checkpoint(model), far._experimental_fork_checkpoint(model, "a")):
        with pytest.raises(ServeError, match=r"art\.Backend"):
            await call


async def test_a_canceled_call_cancels_its_job(named, far, server):
    model, steps = named(), heard(far, GradientStep)
    await model.register(far)
    group, before = await a_long_group(model), await ask(model, temperature=0)
    options = {"learning_rate": 1e-2, "allow_training_without_logprobs": True}
    training = asyncio.create_task(far.train(model, [group], **options))
    await until(lambda: steps, training)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert await model.get_step() == 0
    assert server.http.get("/health").json()["waiting_jobs"] == 0
    after = await ask(model, temperature=0)
    assert after.model_extra["token_ids"] == before.model_extra["token_ids"]
    assert (await far.train(model, [await a_group(model)])).step == 1


LONG_OPTIONS = {"learning_rate": 1e-2, "allow_training_without_logprobs": True}


async def train_until_killed(server, backend, model):
    """Register a model, kill the server in a step, and return the groups and the task of the call."""
    steps = heard(backend, GradientStep)
    await model.register(backend)
    groups = [await a_long_group(model)]
    training = asyncio.create_task(backend.train(model, groups, **LONG_OPTIONS))
    await until(lambda: steps, training)
    await asyncio.to_thread(server.kill)
    return groups, training


async def test_a_restarted_server_finishes_the_job_of_a_call(named, tmp_path):
    """The server is killed while it trains. The call goes on when it is back, and its step is trained once."""
    server = ServerlessProcess(tmp_path / "far")
    backend = client(server, tmp_path / "near", patience_s=120.0)
    model = named()
    _, training = await train_until_killed(server, backend, model)
    await asyncio.sleep(0.5)
    assert not training.done()
    await asyncio.to_thread(server.start)
    assert (await training).step == 1
    assert await model.get_step() == 1
    assert len((await ask(model)).model_extra["token_ids"]) > 0
    await backend.close()
    assert (await asyncio.to_thread(server.end))[0] == 0


async def test_a_lost_call_is_made_again(named, tmp_path):
    """The patience ends before the server is back. The same call receives the result of the first one."""
    server = ServerlessProcess(tmp_path / "far")
    backend = client(server, tmp_path / "near", patience_s=0.3)
    model = named()
    groups, training = await train_until_killed(server, backend, model)
    with pytest.raises(ServeError, match="make the same call again") as lost:
        await training
    assert lost.value.status == 503
    await asyncio.to_thread(server.start)
    assert (await backend.train(model, groups, **LONG_OPTIONS)).step == 1
    assert await model.get_step() == 1
    await backend.close()
    await asyncio.to_thread(server.end)


async def test_wrong_addresses_and_keys(named, server, tmp_path):
    for key in ("wrong", server.key[:-1]):
        with pytest.raises(ServeError, match="ART_NB_API_KEY") as refused:
            await named().register(client(server, tmp_path, api_key=key))
        assert refused.value.status == 401
    with pytest.raises(ServeError, match="/v1"):
        await named().register(client(server, tmp_path, base_url=f"{server.url}/wrong"))
    other = Server(tmp_path / "other")
    with pytest.raises(ServeError, match="/v1"):
        await named().register(client(server, tmp_path, base_url=f"{other.url}/v1", api_key=other.key))
    other.end()
    with pytest.raises(ServeError, match="does not answer"):
        await named().register(client(server, tmp_path, base_url="http://127.0.0.1:9/v1"))
    with pytest.raises(art.BackendMissing, match=r"base_url.*art\.LocalBackend"):
        art.ServerlessBackend(api_key="key")


async def test_the_key_is_not_written(named, tmp_path):
    server = ServerlessProcess(tmp_path / "far", key="a-key-that-somebody-chose")
    async with client(server, tmp_path / "near") as backend:
        model = named()
        await model.register(backend)
        await backend.train(model, [await a_group(model)])
        assert server.key not in repr(backend) + repr(model)
    _, printed = server.end()
    assert server.key not in printed
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and server.key.encode() in p.read_bytes()]


async def test_a_closed_backend_sends_nothing(named, server, tmp_path):
    backend, model = client(server, tmp_path), named()
    await model.register(backend)
    chat = model.openai_client().with_options(max_retries=0)
    await backend.close()
    await backend.close()
    with pytest.raises(openai.APIConnectionError):
        await chat.models.list()
    with pytest.raises(ServeError, match="not registered"):
        await backend.train(model, [])
    assert httpx.get(f"{server.url}/v1/models", headers=server.http.headers).status_code == 200


def test_a_client_needs_no_torch():
    source = (
        "import sys; import art_nb as art; art.ServerlessBackend(base_url='http://127.0.0.1:1/v1'); "
        "print({'torch', 'transformers'} & {*sys.modules})"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_it_is_had_by_name():
    backend = art.backend("serverless", base_url="http://127.0.0.1:1/v1")
    assert isinstance(backend, art.ServerlessBackend)
