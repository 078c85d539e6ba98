"""`art.train(seed=…)`: the same seed gives the same run, whatever finishes first."""

import asyncio
import random
import threading
from importlib.util import find_spec

import pytest
from openai import AsyncOpenAI, OpenAI
from support.registered import at_home, heard

import art_nb as art
from art_nb.core.events import Warned
from art_nb.core.seeds import SEED_HEADER, SeedScope, StepSeeds, current_seed_scope, seed_scope
from art_nb.core.types import RolloutError
from art_nb.models.clients import httpx
from art_nb.policy.adapter_files import read_adapter
from art_nb.rollouts.entries import get_messages
from art_nb.rollouts.http_capture import install
from art_nb.rollouts.trajectories import choices
from art_nb.training.steps import endpoint_matcher

SCENARIOS = list(range(5))


async def ask(model, messages, client=None, **asked):
    """A reply, as a choice."""
    reply = await (client or model.openai_client()).chat.completions.create(
        model=model.get_inference_name(), messages=messages, **{"max_tokens": 6, "logprobs": True} | asked
    )
    return reply.choices[0]


def said_by(choice):
    return choice.model_extra["token_ids"]


def restless(fails=False, **asked):
    """A rollout of two turns that takes a random time and is worth what the model said; or fails, by what it said."""

    async def rollout(model, scenario):
        entries = []
        for turn in ("free", "and now"):
            await asyncio.sleep(random.random() * 0.03)
            entries.append({"role": "user", "content": f"{turn}: {scenario}"})
            entries.append(await ask(model, get_messages(entries), **asked))
        worth = sum(said_by(entries[-1])) % 11
        if fails and worth < 3:
            raise ValueError(f"no {worth}")
        return art.Trajectory(messages_and_choices=entries, reward=worth)

    return rollout


class Told:
    """What the groups of a run hold, in their order."""

    def __init__(self):
        self.said, self.logprobs, self.rewards, self.errors = [], [], [], []

    def __call__(self, run):
        for group in run.groups:
            self.errors.append([error.message for error in group.exceptions])
            self.rewards.append([trajectory.reward for trajectory in group])
            for choice in (choice for trajectory in group for choice in choices(trajectory)):
                self.said.append(said_by(choice))
                self.logprobs.append(choice.model_extra["token_logprobs"])


async def trained(directory, path, rollout=None, steps=1, **options):
    """What a run said, and the adapter it ended with."""
    told = Told()
    async with at_home(directory, path) as (model, _):
        options = {
            "seed": 7,
            "groups_per_step": 2,
            "rollouts_per_group": 4,
            "learning_rate": 1e-2,
            "show": False,
            "on_step": told,
            "max_exceptions": 100,
        } | options
        await art.train(model, rollout or restless(), SCENARIOS, steps=steps, **options)
        return vars(told), read_adapter(model.store.checkpoint_dir(steps))


def equal(a, b):
    """Whether two adapters have the same bits."""
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


# the same and another


async def test_the_same_seed_gives_the_same_replies_rewards_and_weights(tiny_model_dir, tmp_path):
    first, adapter = await trained(tiny_model_dir, tmp_path / "a", restless(fails=True), steps=2)
    again, same = await trained(tiny_model_dir, tmp_path / "b", restless(fails=True), steps=2)
    assert first == again
    assert any(first["errors"]) and len({*sum(first["rewards"], [])}) > 2, "some fail, others differ"
    assert equal(adapter, same)


async def test_another_seed_and_no_seed_give_other_replies(tiny_model_dir, tmp_path):
    first, adapter = await trained(tiny_model_dir, tmp_path / "a")
    for seed in (8, None):
        other, unlike = await trained(tiny_model_dir, tmp_path / str(seed), seed=seed)
        assert first["said"] != other["said"]
        assert not equal(adapter, unlike)


async def test_a_resumed_run_equals_an_uninterrupted_run(tiny_model_dir, tmp_path):
    whole, adapter = await trained(tiny_model_dir, tmp_path / "a", steps=3)
    begun, _ = await trained(tiny_model_dir, tmp_path / "b", steps=1)
    rest, same = await trained(tiny_model_dir, tmp_path / "b", steps=3)
    assert whole == {name: begun[name] + rest[name] for name in whole}
    assert equal(adapter, same)


async def test_a_seed_of_the_request_wins(tiny_model_dir, tmp_path):
    first, _ = await trained(tiny_model_dir, tmp_path / "a", restless(seed=3), groups_per_step=5)
    again, _ = await trained(tiny_model_dir, tmp_path / "b", restless(seed=3), groups_per_step=5, seed=8)
    assert sorted(first["said"]) == sorted(again["said"]), "the order of the scenarios is that of the run's seed"


# where a request comes from


async def by_http(model, messages):
    async with AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key) as client:
        return await ask(model, messages, client)


async def on_a_thread(model, messages):
    def work():
        with OpenAI(
            base_url=model.inference_base_url.replace("127.0.0.1", "localhost"), api_key=model.inference_api_key
        ) as client:
            return client.chat.completions.create(
                model=model.get_inference_name(), messages=messages, max_tokens=6, logprobs=True
            ).choices[0]

    return await asyncio.to_thread(work)


async def by_requests(model, messages):
    import requests

    head = {"Authorization": f"Bearer {model.inference_api_key}"}
    body = {"model": model.get_inference_name(), "messages": messages, "max_tokens": 6, "logprobs": True}
    reply = await asyncio.to_thread(
        requests.post, f"{model.inference_base_url}/chat/completions", json=body, headers=head
    )
    return type(await ask(model, messages)).model_validate(reply.json()["choices"][0])


async def by_aiohttp(model, messages):
    import aiohttp

    head = {"Authorization": f"Bearer {model.inference_api_key}"}
    body = {"model": model.get_inference_name(), "messages": messages, "max_tokens": 6, "logprobs": True}
    async with (
        aiohttp.ClientSession(headers=head) as session,
        session.post(f"{model.inference_base_url}/chat/completions", json=body) as reply,
    ):
        found = await reply.json()
    return type(await ask(model, messages)).model_validate(found["choices"][0])


async def test_every_client_sends_the_seed(tiny_model_dir, tmp_path):
    ways = [ask, by_http, on_a_thread]
    ways += [way for name, way in (("requests", by_requests), ("aiohttp", by_aiohttp)) if find_spec(name)]

    async def said(model, way):
        with seed_scope(SeedScope(StepSeeds(7, 0, endpoint_matcher(model)))):
            return said_by(await way(model, [{"role": "user", "content": "free: 1"}]))

    install()
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        found = [await said(model, way) for way in ways]
    assert found == found[:1] * len(ways)


async def test_who_gets_a_seed(tiny_model_dir, tmp_path):
    sent = {}

    async def rollout(model, scenario):
        create = model.openai_client().chat.completions.with_raw_response.create
        messages = [{"role": "user", "content": f"free: {scenario}"}]

        async def one():
            raw = await create(model=model.get_inference_name(), messages=messages, max_tokens=2)
            headers = raw.http_response.request.headers
            sent.setdefault(run.options.seed, []).append(headers.get(SEED_HEADER))
            return art.Trajectory(messages_and_choices=[*messages, raw.parse().choices[0]], reward=random.random())

        inside = [await art.gather_trajectories([one(), one()], pbar_desc=None) for _ in range(2)]
        client = httpx.AsyncClient(transport=httpx.MockTransport(lambda request: httpx.Response(200)))
        async with client:
            other = await client.post("https://api.example/v1/chat/completions", json={})
        assert SEED_HEADER not in other.request.headers
        assert len(inside) == 2
        return await one()

    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        warned = heard(backend, Warned)
        for steps, seed in ((1, None), (2, 7)):
            run = art.train(
                model, rollout, SCENARIOS, steps=steps, seed=seed, groups_per_step=2, rollouts_per_group=3, show=False
            )
            await run
    assert {*sent[None]} == {None}
    assert None not in sent[7] and len({*sent[7]}) == len(sent[7]) == 2 * 3 * 5
    assert not [event for event in warned if "seed" in event.message], "nothing to be said here"
    assert current_seed_scope() is None


async def test_a_judge_in_this_kernel_is_repeated(tiny_model_dir, tmp_path):
    async def judged(group):
        question = [{"role": "user", "content": "the move"}]
        for trajectory in group:
            trajectory.reward = sum(said_by(await ask(judged.model, question))) % 13
        return group

    async def rollout(model, scenario):
        judged.model = model
        return await restless()(model, scenario)

    first, _ = await trained(tiny_model_dir, tmp_path / "a", rollout, after_each=judged)
    again, _ = await trained(tiny_model_dir, tmp_path / "b", rollout, after_each=judged)
    assert first == again


async def test_a_wrong_header_is_an_error_of_the_request(tiny_model_dir, tmp_path):
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        for wrong in ("x", "-1", str(2**63), "9" * 5000):
            with pytest.raises(Exception, match="400.*Invalid header"):
                await ask(model, [{"role": "user", "content": "free"}], extra_headers={SEED_HEADER: wrong})


# what cannot be repeated is said


async def test_what_cannot_be_repeated_is_said_once(tiny_model_dir, tmp_path, capsys):
    async def at_once(model, scenario):
        messages = [{"role": "user", "content": f"free: {scenario}"}]
        found = await asyncio.gather(*(ask(model, messages) for _ in range(3)))
        return art.Trajectory(messages_and_choices=[*messages, found[0]], reward=said_by(found[0])[0])

    async def from_a_thread(model, scenario):
        made = []
        thread = threading.Thread(target=lambda: made.append(asyncio.run(by_http(model, messages))))
        messages = [{"role": "user", "content": f"free: {scenario}"}]
        thread.start()
        await asyncio.to_thread(thread.join)
        return art.Trajectory(messages_and_choices=[*messages, made[0]], reward=said_by(made[0])[0])

    for rollout, options, reason in (
        (at_once, {}, "several requests at the same time"),
        (from_a_thread, {}, "did not reach the requests"),
        (restless(), {"max_staleness": 1}, "the time of a request decides"),
    ):
        await trained(tiny_model_dir, tmp_path / rollout.__name__, rollout, steps=2, **options)
        assert capsys.readouterr().out.count(reason) == 1
        await trained(tiny_model_dir, tmp_path / f"{rollout.__name__}2", rollout, seed=None, **options)
        assert "seed" not in capsys.readouterr().out


@pytest.mark.parametrize("limits", [None, lambda self, model: "its engine counts stars"])
async def test_a_backend_says_what_its_engine_can(tiny_model_dir, tmp_path, limits, monkeypatch, capsys):
    monkeypatch.setattr(art.LocalBackend, "seed_limits", limits)
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        art.train(model, restless(), SCENARIOS, steps=1, seed=7, show=False, start=False)
    said = capsys.readouterr().out
    assert ("counts stars" if limits else "does not say whether its engine takes a seed") in said


# order


async def test_groups_have_the_order_of_their_input():
    async def one(reward, pause_s, error=None):
        await asyncio.sleep(pause_s)
        if error:
            raise error
        return art.Trajectory(reward=reward)

    group = art.TrajectoryGroup(one(i, 0.05 - i / 100, RolloutError(str(i)) if i % 2 else None) for i in range(5))
    [made] = await art.gather_trajectory_groups([group], pbar_desc=None, max_exceptions=5)
    assert [trajectory.reward for trajectory in made] == [0, 2, 4]
    assert [error.message for error in made.exceptions] == ["1", "3"]
