"""`art.environments.environment_factory`: classes as TRL uses them, with the real tool calls of an endpoint."""

import asyncio
import json
import sqlite3
from typing import Literal

import pytest
from support.scripted_policies import policy

import art_nb as art
from art_nb.integrations.tool_environments import argument_docs, tool_methods, tool_schema

pytestmark = pytest.mark.timeout(300)


class Bank:
    """An account in a database, which only one thread may use."""

    def __init__(self):
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table moves (amount integer)")

    def reset(self, goal, **row):
        self.goal = goal
        self.database.execute("delete from moves")
        return f" Reach a balance of {goal}."

    def deposit(self, amount: int, note: str | None = None) -> str:
        """
        Put money into the account.

        Args:
            amount (int): The amount in dollars,
                always positive.
            note: A text.

        Returns:
            The new balance.
        """
        self.database.execute("insert into moves values (?)", (amount,))
        return f"balance {self._balance()}"

    async def history(self, order: Literal["up", "down"] = "up") -> list[int]:
        """List all deposits."""
        await asyncio.sleep(0)
        return [1, 2]

    def fail(self) -> str:
        """Fail."""
        raise OSError("the bank is closed")

    def _balance(self):
        return self.database.execute("select coalesce(sum(amount), 0) from moves").fetchone()[0]

    def get_reward(self):
        return float(self._balance() == self.goal)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def follow(replies):
    """Return a policy that gives the replies in order."""
    return lambda prompt: replies[min(prompt.count("<assistant>") - 1, len(replies) - 1)]


def test_schemas_have_types_defaults_and_descriptions():
    assert [*tool_methods(Bank)] == ["deposit", "fail", "history"]
    function = tool_schema(Bank.deposit)["function"]
    assert function["description"] == "Put money into the account."
    amount, note = function["parameters"]["properties"].values()
    assert amount == {"type": "integer", "description": "The amount in dollars, always positive."}
    assert note["description"] == "A text." and note["default"] is None
    assert function["parameters"]["required"] == ["amount"]
    assert tool_schema(Bank.history)["function"]["parameters"]["properties"]["order"]["enum"] == ["up", "down"]


def test_docstrings_of_numpy():
    summary, docs = argument_docs("""Move a piece.

    To a square.

    Parameters
    ----------
    square : str
        The square,
        like B2.
    count : int

    Returns
    -------
    str
        The board.
    """)
    assert summary == "Move a piece. To a square."
    assert docs["square"] == "The square, like B2." and docs["count"] == ""


async def test_a_rollout_calls_tools_and_the_errors_go_to_the_model():
    replies = [
        call("deposit", amount="many"),
        call("fail") + call("deposit", amount=3),
        call("withdraw", amount=1),
        call("history", order="down"),
        call("deposit", amount=4),
        "Done.",
    ]
    environment = art.environments.environment_factory(Bank, [{"prompt": "You have an account.", "goal": 7}])
    with policy(follow(replies)) as model:
        trajectory = await environment.rollout(model, environment.scenarios[0])
    messages = trajectory.messages()
    assert messages[0]["content"] == "You have an account. Reach a balance of 7."
    results = [message["content"] for message in messages if message["role"] == "tool"]
    assert "Invalid arguments of deposit. amount: Input should be a valid integer" in json.loads(results[0])["error"]
    assert json.loads(results[1])["error"] == "the bank is closed"
    assert results[2] == "balance 3"
    assert "no tool 'withdraw'. The tools are deposit, fail, history" in json.loads(results[3])["error"]
    assert results[4:] == ["[1, 2]", "balance 7"]
    assert trajectory.reward == 1.0
    expected = {"turns": 6, "tool_calls": 6, "tool_errors": 3, "reached_max_turns": False}
    assert {name: trajectory.metrics[name] for name in expected} == expected
    assert len(trajectory.logs) == 3 and len(trajectory.tools) == 3


async def test_parallel_rollouts_have_instances_of_their_threads():
    environment = art.environments.environment_factory(Bank, [{"prompt": "Go.", "goal": n} for n in range(16)])
    with policy(lambda prompt: "Done." if "<tool>" in prompt else call("deposit", amount=5)) as model:
        trajectories = await asyncio.gather(*(environment.rollout(model, s) for s in environment.scenarios))
    assert [trajectory.reward for trajectory in trajectories] == [float(n == 5) for n in range(16)]


async def test_a_loop_of_calls_ends_at_max_turns():
    environment = art.environments.environment_factory(Bank, [{"goal": 1}], max_turns=3, prompt="Go.")
    with policy(lambda prompt: call("deposit", amount=1)) as model:
        trajectory = await environment.rollout(model, environment.scenarios[0])
    assert trajectory.metrics["reached_max_turns"] and trajectory.metrics["turns"] == 3 and trajectory.reward == 0.0


async def test_a_reward_function_gets_the_instance_the_row_and_the_messages():
    async def reward(bank, row, messages):
        return bank.goal + row["bonus"] + len(messages)

    environment = art.environments.environment_factory(Bank, [{"goal": 1, "bonus": 10}], reward=reward)
    with policy(lambda prompt: "Done.") as model:
        assert (await environment.rollout(model, environment.scenarios[0])).reward == 13.0


class Silent(Bank):
    def reset(self, **row):
        return row.get("text")

    def get_reward(self):
        return None


async def test_failures_are_failed_rollouts():
    environment = art.environments.environment_factory(Silent, [{}, {"text": 3}, {"text": "Go."}])
    words = ["has no user message", "`reset` returned int", "The reward is None"]
    with policy(lambda prompt: "Done.") as model:
        for scenario, text in zip(environment.scenarios, words, strict=True):
            with pytest.raises(art.RolloutError, match=text):
                await environment.rollout(model, scenario)


def test_classes_that_cannot_be_used_are_errors():
    class NoReward:
        def reset(self):
            return "Go."

    class Untyped(Bank):
        def move(self, square):
            return square

    with pytest.raises(TypeError, match="NoReward has no method `get_reward`. Add it, or pass `reward`"):
        art.environments.environment_factory(NoReward)
    with pytest.raises(TypeError, match="parameter `square` needs a type hint"):
        art.environments.environment_factory(Untyped)


class Bell:
    """A class with a short schema, for the small context of the tiny model."""

    def reset(self, prompt, goal):
        self.rings = 0

    def ring(self, times: int) -> int:
        """Ring."""
        self.rings += times
        return self.rings


async def test_a_run_trains_on_tools(local, named):
    """The tiny model rarely writes a call, so a turn is enough. Its reward is the length of its reply."""
    environment = art.environments.environment_factory(
        Bell,
        [{"prompt": "Go.", "goal": n} for n in range(4)],
        reward=lambda bell, row, messages: len(messages[-1].message.content or ""),
        max_turns=1,
        sampling={"max_completion_tokens": 6},
    )
    model = named()
    await model.register(local)
    run = art.train(
        model, environment.rollout, environment.scenarios, steps=2, groups_per_step=2, rollouts_per_group=4, show=False
    )
    await run
    assert await model.get_step() == 2
