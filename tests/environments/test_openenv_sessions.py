"""`art.environments.openenv` with real servers over WebSocket: parallel sessions, capacity, killed servers, classes."""

import asyncio
import json
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager

import pytest
from support.scripted_policies import policy

import art_nb as art

pytest.importorskip("openenv", reason="make test-environments installs the packages")

pytestmark = pytest.mark.timeout(300)
MODULE = """
import sys
import time
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Hint(Observation):
    text: str


class GuessNumber(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.current = State(step_count=0)

    def reset(self, seed=None, episode_id=None, low=0, **options):
        self.secret = low + seed % 5
        self.current = State(episode_id=episode_id, step_count=0)
        return Hint(text=f"Guess a number from {low}.")

    def step(self, action, timeout_s=None, **options):
        self.current.step_count += 1
        if action.number == 13:
            raise ZeroDivisionError("thirteen")
        is_right = action.number == self.secret
        return Hint(text="right" if is_right else "no", reward=float(is_right), done=is_right)

    @property
    def state(self):
        return self.current


class OneSession(GuessNumber):
    SUPPORTS_CONCURRENT_SESSIONS = False


if __name__ == "__main__":
    import uvicorn

    port, sessions = map(int, sys.argv[1:])
    kind = GuessNumber if sessions > 1 else OneSession
    app = create_fastapi_app(kind, Guess, Hint, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("openenv") / "guessing_environment.py"
    path.write_text(textwrap.dedent(MODULE))
    return path


@contextmanager
def server(script, sessions):
    """Start a server in another process. Yield its address and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(script), str(port), str(sessions)])
    try:
        end = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < end, "the server did not start"
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def counting(prompt):
    """Return the guesses 0, 1, 2, …"""
    return json.dumps({"number": prompt.count("<assistant>") - 1})


def replying(*replies):
    return lambda prompt: replies[min(prompt.count("<assistant>") - 1, len(replies) - 1)]


async def test_16_parallel_sessions(script):
    with server(script, 16) as (url, _), policy(counting) as model:
        environment = art.environments.openenv(url, size=16)
        for _ in range(2):  # the sessions of the first round were closed
            trajectories = await asyncio.gather(*(environment.rollout(model, s) for s in environment.scenarios))
            assert [t.metrics["turns"] for t in trajectories] == [1 + seed % 5 for seed in range(16)]
            assert all(t.reward == 1.0 and not t.metrics["reached_max_turns"] for t in trajectories)
    messages = trajectories[2].messages()
    assert messages[0]["content"] == '{"text": "Guess a number from 0."}'
    assert messages[2]["content"] == '{"text": "no"}'


async def test_a_server_with_one_session_says_what_to_set(script):
    with server(script, 1) as (url, _), policy(counting) as model:
        environment = art.environments.openenv(url, size=4)
        results = await asyncio.gather(
            *(environment.rollout(model, environment.scenarios[3]) for _ in range(4)), return_exceptions=True
        )
        alone = await environment.rollout(model, environment.scenarios[1])
    errors = [result for result in results if isinstance(result, Exception)]
    assert errors and all(isinstance(error, art.RolloutError) for error in errors)
    for word in ("no free session", "CAPACITY_REACHED", "SUPPORTS_CONCURRENT_SESSIONS = True", "max_concurrent_envs"):
        assert word in str(errors[0])
    assert alone.reward == 1.0


async def test_a_killed_server_makes_failed_rollouts_and_the_run_continues(script, local, named):
    """The server dies during the second step. Half of the rollouts do not use it, so the run reaches its last step."""
    model = named()
    await model.register(local)
    with server(script, 16) as (url, process):
        environment = art.environments.openenv(url, size=4, max_turns=2, sampling={"max_completion_tokens": 4})
        count = 0

        async def rollout(model, scenario):
            nonlocal count
            count += 1
            if count == 9:
                process.kill()
                process.wait()
            if count % 2:
                trajectory = await environment.rollout(model, scenario)
            else:
                chat = [{"role": "user", "content": "Guess."}]
                reply = await model.openai_client().chat.completions.create(
                    model=model.get_inference_name(), messages=chat, max_completion_tokens=4
                )
                trajectory = art.Trajectory(messages_and_choices=[*chat, reply.choices[0]])
            trajectory.reward = len(trajectory.messages()[-1]["content"])
            return trajectory

        run = art.train(
            model,
            rollout,
            environment.scenarios,
            steps=3,
            groups_per_step=2,
            rollouts_per_group=4,
            max_exceptions=0.9,
            show=False,
        )
        await run
    assert await model.get_step() == 3
    failures = [error for group in run.groups for error in group.exceptions]
    assert failures and {failure.type for failure in failures} == {"art_nb.types.RolloutError"}
    assert f"The OpenEnv server at {url} failed" in failures[0].message


async def test_invalid_actions_and_errors_of_a_server(script):
    with server(script, 2) as (url, _):
        environment = art.environments.openenv(url, size=2, low=3)
        assert environment.scenarios[0] == {"low": 3, "seed": 0}
        with policy(replying("I do not know.", '{"number": "many"}', '{"guess": 1}', '{"number": 3}')) as model:
            trajectory = await environment.rollout(model, environment.scenarios[0])
        assert trajectory.reward == 1.0 and trajectory.metrics["invalid"] == 3 and trajectory.metrics["turns"] == 4
        with policy(replying('{"number": 13}')) as model, pytest.raises(art.RolloutError, match="thirteen"):
            await environment.rollout(model, environment.scenarios[0])


async def test_a_server_that_does_not_exist():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    environment = art.environments.openenv(url, size=1)
    with policy(counting) as model, pytest.raises(art.RolloutError, match=f"server at {url} failed: ConnectionError"):
        await environment.rollout(model, environment.scenarios[0])


@pytest.fixture
def module(script, monkeypatch):
    monkeypatch.syspath_prepend(script.parent)
    import guessing_environment

    return guessing_environment


async def test_a_class_needs_no_server(module):
    environment = art.environments.openenv(module.OneSession, size=16, action_class=module.Guess)
    with policy(counting) as model:
        trajectories = await asyncio.gather(*(environment.rollout(model, s) for s in environment.scenarios))
    assert [t.metrics["turns"] for t in trajectories] == [1 + seed % 5 for seed in range(16)]


async def test_the_type_of_step_reads_the_action(module):
    class Typed(module.GuessNumber):
        def step(self, action: module.Guess, timeout_s=None, **options):
            return super().step(action)

    environment = art.environments.openenv(Typed, size=1)
    with policy(replying('{"number": "many"}', '{"number": 1, "x": 2}', '{"number": 0}')) as model:
        trajectory = await environment.rollout(model, environment.scenarios[0])
    assert trajectory.reward == 1.0 and trajectory.metrics["invalid"] == 2
    assert trajectory.messages()[2]["content"].startswith("Invalid action: number: Input should be a valid integer")


def test_an_instance_is_an_error(module):
    with pytest.raises(TypeError, match="Each rollout needs its own"):
        art.environments.openenv(module.GuessNumber())
