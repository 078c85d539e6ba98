"""Agents that know only environment variables: their client is created when their module is imported."""

import asyncio
import importlib
import itertools
import sys

import openai
import pytest

import art_nb as art

pytestmark = pytest.mark.timeout(300)

AGENT = """
import os
from openai import {client}

client = {client}()
MODEL = os.environ["MODEL"]

{kind} answer(text):
    messages = [{{"role": "user", "content": text}}]
    reply = {wait} client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    return reply.choices[0].message.content
"""
ASYNC = {"client": "AsyncOpenAI", "kind": "async def", "wait": "await"}
SYNC = {"client": "OpenAI", "kind": "def", "wait": ""}


@pytest.fixture
async def model(local, named):
    registered = named()
    await registered.register(local)
    return registered


def module_of(folder, monkeypatch, form):
    """Import an agent from a new file."""
    name = f"agent_{form['client'].lower()}"
    (folder / f"{name}.py").write_text(AGENT.format(**form))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


@pytest.mark.parametrize("form", [ASYNC, SYNC], ids=["async", "sync"])
async def test_a_client_of_the_module_is_trained(model, tmp_path, monkeypatch, form):
    monkeypatch.setenv("OPENAI_BASE_URL", model.inference_base_url)
    monkeypatch.setenv("OPENAI_API_KEY", model.inference_api_key)
    monkeypatch.setenv("MODEL", model.get_inference_name())
    agent = module_of(tmp_path, monkeypatch, form)
    rewards = {scenario: itertools.cycle((0, 1)) for scenario in ("A1", "B1")}  # each group has both, in any order

    async def rollout(model, scenario):
        async def attempt():
            await (agent.answer(scenario) if form is ASYNC else asyncio.to_thread(agent.answer, scenario))
            art.current_trajectory(require=True).reward = next(rewards[scenario])

        return await art.trajectory(attempt())

    assert len((await rollout(model, "A1")).messages()) == 2  # on the loop of the caller
    for steps in (1, 2):  # each run has a loop of its own
        await art.train(model, rollout, ["A1", "B1"], steps=steps, groups_per_step=2, rollouts_per_group=4)
        assert await model.get_step() == steps
        assert model.store.history()[-1]["data/step_num_gradient_steps"] == 1


async def test_a_client_of_the_module_needs_a_key(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_ADMIN_KEY", raising=False)
    with pytest.raises(openai.OpenAIError, match="Missing credentials"):
        module_of(tmp_path, monkeypatch, ASYNC)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
async def test_an_asynchronous_client_in_synchronous_code(model, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    monkeypatch.setenv("MODEL", model.get_inference_name())
    agent = module_of(tmp_path, monkeypatch, SYNC)
    agent.client = model.openai_client()
    with pytest.raises(AttributeError, match="'coroutine' object has no attribute 'choices'"):
        agent.answer("A1")
    agent.client = openai.OpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key)
    assert isinstance(await asyncio.to_thread(agent.answer, "A1"), str)
