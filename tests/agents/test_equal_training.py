"""The same training run in seven forms: five frameworks, a Node program and curl give the run of the plain client.

With the same seed, all rows and the trained weights are equal, token ID by token ID and bit by bit. `make test-agents`
trains the tiny model for one step. `make test-agents-full` trains SmolLM2-135M on the task of examples/yes_no_maybe and
prints the rewards of docs/benchmarks.md.
"""

import json
import os
import runpy
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from support.agent_parts import NO_TELEMETRY
from support.registered import at_home

import art_nb as art
from art_nb.policy.adapter_files import read_adapter
from art_nb.tokens.rows import trajectory_rows

pytest.importorskip("anthropic", reason="make test-agents installs the frameworks")
os.environ |= NO_TELEMETRY
ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
YES_NO_MAYBE = runpy.run_path(str(ROOT / "examples" / "yes_no_maybe" / "yes_no_maybe.py"))
SYSTEM, LIMIT = "Answer with one word.", 5


def messages(prompt):
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]


def openai_client(session):
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)


async def anthropic_sdk(session, prompt):
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=session.address, api_key=session.api_key) as client:
        asked = {"system": SYSTEM, "messages": messages(prompt)[1:]}
        message = await client.messages.create(model="claude", max_tokens=LIMIT, **asked)
    return message.content[0].text


async def litellm(session, prompt):
    from litellm import acompletion

    address = {"api_base": session.base_url, "api_key": session.api_key}
    reply = await acompletion("openai/art-nb", messages(prompt), max_completion_tokens=LIMIT, **address)
    return reply.choices[0].message.content


async def openai_agents(session, prompt):
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner

    async with openai_client(session) as client:
        model = OpenAIChatCompletionsModel(model="art-nb", openai_client=client)
        limit = ModelSettings(max_tokens=LIMIT)
        agent = Agent(name="guide", instructions=SYSTEM, model=model, model_settings=limit)
        return (await Runner.run(agent, prompt)).final_output


async def pydantic_ai(session, prompt):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async with openai_client(session) as client:
        model = OpenAIChatModel("art-nb", provider=OpenAIProvider(openai_client=client))
        # `None` permits an empty reply. Without it, pydantic-ai would ask a second time.
        agent = Agent(model, instructions=SYSTEM, output_type=str | None, model_settings={"max_tokens": LIMIT})
        return (await agent.run(prompt)).output


def langgraph_rollout(worth):
    from langchain.agents import create_agent

    @art.langgraph.wrap_rollout
    async def rollout(model, prompt):
        chat_model = art.langgraph.init_chat_model(max_completion_tokens=LIMIT)
        agent = create_agent(chat_model, tools=[], system_prompt=SYSTEM)
        result = await agent.ainvoke({"messages": messages(prompt)[1:]})
        return art.Trajectory(reward=worth(result["messages"][-1].content))

    return rollout


def plain_rollout(worth):
    """Return the rollout of the plain client."""

    async def rollout(model, prompt):
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages(prompt), max_completion_tokens=LIMIT, logprobs=True
        )
        choice = completion.choices[0]
        entries = [*messages(prompt), choice]
        return art.Trajectory(messages_and_choices=entries, reward=worth(choice.message.content)).finish()

    return rollout


def ai_sdk_rollout(worth):
    node = shutil.which("node", path=str(ROOT / ".venv/bin")) or shutil.which("node")
    if node is None or not (PROGRAMS / "node" / "node_modules" / "ai").exists():
        pytest.skip("make test-agents installs the packages of Node")
    command = [node, str(PROGRAMS / "node" / "one_word.mjs")]
    return art.rollout_from(command, stdin=str, reward=lambda _, prompt, output: worth(output.stdout))


def curl_rollout(worth):
    if shutil.which("curl") is None:
        pytest.skip("this test needs curl")

    def reward(trajectory, prompt, output):
        return worth(json.loads(output.stdout)["choices"][0]["message"]["content"])

    return art.rollout_from(["sh", str(PROGRAMS / "one_word.sh")], stdin=str, reward=reward)


def in_session(agent):
    return lambda worth: art.rollout_from(agent, reward=lambda _, prompt, text: worth(text or ""))


FORMS = {
    "Anthropic SDK": in_session(anthropic_sdk),
    "LangGraph": langgraph_rollout,
    "LiteLLM": in_session(litellm),
    "OpenAI Agents SDK": in_session(openai_agents),
    "pydantic-ai": in_session(pydantic_ai),
    "Vercel AI SDK": ai_sdk_rollout,
    "curl": curl_rollout,
}
EACH_FORM = pytest.mark.parametrize("form", FORMS)


@dataclass
class Trained:
    """What a run sampled and learned."""

    rows: list  # of each trajectory: token IDs, and which of them were sampled
    rewards: list
    adapter: dict
    evaluation: art.Evaluation
    shown: list  # the last message of each trajectory that the run directory contains


async def trained(base_model, path, rollout, unseen, **options):
    """Train a new model with a seed, and evaluate it without one."""
    rows, rewards = [], []

    def keep(run):
        for trajectory in (trajectory for group in run.groups for trajectory in group):
            rows.append([(row.tokens.tolist(), row.sampled.tolist()) for row in trajectory_rows(trajectory)])
            rewards.append(trajectory.reward)

    prompts = YES_NO_MAYBE["prompts"]
    async with at_home(base_model, path) as (model, _):
        await art.train(model, rollout, prompts, seed=7, show=False, on_step=keep, max_exceptions=0, **options)
        evaluation = await art.evaluate(model, rollout, unseen, show_progress=False)
        groups = [group for step in model.store.steps("train") for group in model.store.read_groups("train", step)]
        shown = [trajectory.messages()[-1]["content"] for group in groups for trajectory in group]
        return Trained(rows, rewards, read_adapter(model.store.checkpoint_dir(options["steps"])), evaluation, shown)


def check_equal(run, plain):
    """Check that two runs sampled the same tokens, got the same rewards and learned the same weights."""
    assert run.rows == plain.rows and run.shown == plain.shown
    assert run.rewards == plain.rewards and len({*plain.rewards}) > 1
    assert run.adapter.keys() == plain.adapter.keys()
    assert all((run.adapter[name] == plain.adapter[name]).all() for name in plain.adapter)


# one step of the tiny model

QUICK = {"steps": 1, "groups_per_step": 2, "rollouts_per_group": 4, "learning_rate": 1e-2}


def any_worth(text):
    """Return a reward that differs between random texts."""
    return sum(map(ord, text.strip())) % 7


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain_step(tiny_model_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("plain")
    return await trained(tiny_model_dir, path, plain_rollout(any_worth), YES_NO_MAYBE["prompts"][:2], **QUICK)


@pytest.mark.asyncio(loop_scope="module")
@EACH_FORM
async def test_one_step_is_that_of_the_plain_client(plain_step, form, tiny_model_dir, tmp_path):
    rollout = FORMS[form](any_worth)
    check_equal(await trained(tiny_model_dir, tmp_path, rollout, YES_NO_MAYBE["prompts"][:2], **QUICK), plain_step)


# yes, no, maybe with SmolLM2-135M

WHOLE = {"steps": 5, "groups_per_step": 4, "rollouts_per_group": 8, "learning_rate": 5e-4, "entropy_coef": 0.05}
UNTRAINED = 0.35  # above the interval of the untrained model


def worth_of_word(text):
    return YES_NO_MAYBE["REWARDS"].get(text.strip(" .!\n").lower(), 0.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain_run(smollm2_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("plain")
    run = await trained(smollm2_dir, path, plain_rollout(worth_of_word), YES_NO_MAYBE["prompts"] * 4, **WHOLE)
    print(f"\nOpenAI client: {run.evaluation}")
    return run


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.asyncio(loop_scope="module")
@EACH_FORM
async def test_a_run_learns_what_that_of_the_plain_client_learns(plain_run, form, smollm2_dir, tmp_path):
    """The weights are equal. The evaluation has no seed, so its rewards are equal within their intervals only."""
    rollout = FORMS[form](worth_of_word)
    run = await trained(smollm2_dir, tmp_path, rollout, YES_NO_MAYBE["prompts"] * 4, **WHOLE)
    print(f"\n{form}: {run.evaluation}")
    check_equal(run, plain_run)
    (low, high), (plain_low, plain_high) = run.evaluation.ci95(), plain_run.evaluation.ci95()
    assert low <= plain_high and plain_low <= high
    assert low > UNTRAINED
