"""Conversations with an environment: the context of the model ends, and an environment is closed in every case."""

import asyncio
import threading

import openai
import pytest
from support.registered import until
from support.scripted_policies import policy

from art_nb.integrations.environments import EnvironmentThread
from art_nb.integrations.policy_chat import PolicyChat, converse

pytestmark = pytest.mark.timeout(300)


async def go_on(choice):
    return [{"role": "user", "content": "Go on."}]


async def test_a_conversation_ends_at_the_context_of_the_model():
    with policy(lambda prompt: "x" * 50, max_model_len=300) as model:
        chat = PolicyChat(model, sampling={"max_completion_tokens": 60})
        chat.send("Begin.")
        assert not await converse(chat, go_on, max_turns=50)
        trajectory = chat.trajectory(1.0, {}, {})
    assert 2 <= sum(not isinstance(entry, dict) for entry in trajectory.messages_and_choices) < 10
    assert trajectory.messages()[-1] == {"role": "user", "content": "Go on."}


async def test_a_first_request_that_is_too_long_fails():
    with policy(lambda prompt: "x", max_model_len=300) as model:
        chat = PolicyChat(model)
        chat.send("Begin. " * 100)
        with pytest.raises(openai.BadRequestError, match="The model's context holds 300 tokens"):
            await converse(chat, go_on, max_turns=5)


async def test_other_errors_of_a_later_turn_are_raised():
    with policy(lambda prompt: "x") as model:
        chat = PolicyChat(model)
        chat.send("Begin.")

        async def damage(choice):
            return [{"role": "nobody", "content": "Go on."}]

        with pytest.raises(openai.BadRequestError, match="role"):
            await converse(chat, damage, max_turns=5)


class Slow:
    """An environment whose creation takes until `release` is set."""

    release, closed = threading.Event(), threading.Event()

    def __init__(self):
        self.release.wait(200)

    def close(self):
        self.closed.set()


async def test_an_environment_whose_creation_is_canceled_is_closed():
    async def rollout():
        async with EnvironmentThread() as thread, thread.environment(Slow):
            pytest.fail("The creation was canceled.")

    task = asyncio.create_task(rollout())
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not Slow.closed.is_set()
    Slow.release.set()
    await until(Slow.closed.is_set)
