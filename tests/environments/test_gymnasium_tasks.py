"""`art.environments.gymnasium` with real environments."""

import asyncio
import time

import pytest
from support.registered import until
from support.scripted_policies import policy

import art_nb as art

gym = pytest.importorskip("gymnasium", reason="make test-environments installs the packages")

pytestmark = pytest.mark.timeout(300)
SYSTEM = "Walk on ice from square 0 to 15. 0: left, 1: down, 2: right, 3: up."
PATH = [2, 2, 1, 1, 1, 2]


def walk(prompt):
    return f"I take {PATH[prompt.count('<assistant>') - 1]}."


@pytest.fixture
def lake():
    """The frozen lake without slipping."""
    return art.environments.gymnasium(
        "FrozenLake-v1", render="You are on square {}.".format, system=SYSTEM, size=4, is_slippery=False
    )


async def test_a_rollout_reaches_the_goal(lake):
    assert lake.scenarios[1] == {"env_id": "FrozenLake-v1", "seed": 1}
    with policy(walk) as model:
        trajectories = await asyncio.gather(*(lake.rollout(model, scenario) for scenario in lake.scenarios))
    for trajectory in trajectories:
        metrics = trajectory.metrics
        assert trajectory.reward == 1.0 and metrics["turns"] == 6 and not metrics["reached_max_turns"]
        assert trajectory.messages()[3]["content"] == "You are on square 1."


async def test_invalid_actions_are_data(lake):
    replies = ["I wait.", "9", "1", "2"]
    with policy(lambda prompt: replies[prompt.count("<assistant>") - 1]) as model:
        trajectory = await lake.rollout(model, lake.scenarios[0])
    contents = [message["content"] for message in trajectory.messages()]
    assert contents[3] == "Invalid action: the reply contains no number. Reply with the number of an action."
    assert contents[5] == "Invalid action: 9 is not in the action space Discrete(4)."
    assert trajectory.metrics["invalid"] == 2 and trajectory.reward == 0.0


async def test_random_environments_repeat_with_the_seed():
    """A slippery lake draws random numbers. The rollouts of a scenario get the same ones."""
    lake = art.environments.gymnasium("FrozenLake-v1", render=str, size=8)
    with policy(lambda prompt: "1") as model:
        paths = [
            [message["content"] for message in trajectory.messages()]
            for trajectory in await asyncio.gather(*(lake.rollout(model, s) for s in lake.scenarios * 2))
        ]
    assert paths[:8] == paths[8:]
    assert len({*map(str, paths)}) > 1


class Broken(gym.Env):
    action_space = gym.spaces.Discrete(2)
    closed = 0

    def reset(self, seed=None, options=None):
        return 0, {}

    def step(self, action):
        raise SystemExit("the simulator died")

    def close(self):
        Broken.closed += 1


class Hanging(Broken):
    def step(self, action):
        time.sleep(8)
        return 0, 0.0, True, False, {}


async def test_a_timeout_does_not_wait_for_an_environment_that_hangs():
    environment = art.environments.gymnasium(Hanging, render=str, size=1)
    start_s = time.monotonic()
    with policy(lambda prompt: "1") as model, pytest.raises(TimeoutError):
        await asyncio.wait_for(environment.rollout(model, environment.scenarios[0]), timeout=1)
    assert time.monotonic() - start_s < 6


async def test_an_error_is_a_failed_rollout_and_the_environment_is_closed():
    environment = art.environments.gymnasium(Broken, render=str, size=1)
    with policy(lambda prompt: "1") as model, pytest.raises(art.RolloutError, match="the simulator died"):
        await environment.rollout(model, environment.scenarios[0])
    await until(lambda: Broken.closed)
