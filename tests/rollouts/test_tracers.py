"""Tracers see each rollout with its step, group and result, and cannot break it."""

import asyncio
import sys
import warnings
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import pytest

import art_nb as art
from art_nb.core.events import Bus
from art_nb.rollouts import tracers
from art_nb.rollouts.gather import gather_trajectories, gather_trajectory_groups

inside: ContextVar[str] = ContextVar("inside", default="")


class Recording:
    """A tracer that records what it sees."""

    def __init__(self):
        self.seen, self.error = [], None

    def prepare(self):
        """Nothing to do."""

    @contextmanager
    def trace(self, rollout):
        token = inside.set(rollout.rollout)
        try:
            if self.error == "start":
                raise OSError("no connection")
            yield
            self.seen.append(rollout)
            if self.error == "end":
                raise OSError("no connection")
        finally:
            inside.reset(token)


@pytest.fixture
def tracer(monkeypatch):
    """A tracer of a package that is imported."""
    monkeypatch.setitem(sys.modules, "probe_tool", ModuleType("probe_tool"))
    monkeypatch.setitem(tracers.known_tracers(), "probe_tool", None)
    monkeypatch.setattr(tracers, "_warned", set())
    recording = Recording()
    monkeypatch.setitem(tracers._loaded, "probe_tool", recording)
    return recording


async def rollout(reward=1.0):
    await asyncio.sleep(0)
    return art.Trajectory(reward=reward, metadata={"inside": await asyncio.create_task(current())})


async def current():
    return inside.get()


async def failing():
    raise TimeoutError("too slow")


async def test_a_tracer_sees_the_step_the_group_and_the_result(tracer):
    metadata = {"scenario_id": "game 7"}
    with tracers.rollout_labels(model="agent-001"):
        (group,) = await gather_trajectory_groups(
            [art.TrajectoryGroup([rollout(), rollout(0.5), failing()], metadata=metadata)],
            pbar_desc=None,
            max_exceptions=1,
            bus=Bus(),
            step=4,
        )
    assert {(seen.step, seen.scenario, seen.labels["model"]) for seen in tracer.seen} == {(4, "game 7", "agent-001")}
    assert {seen.group for seen in tracer.seen} == {group.metadata["group_id"]}
    results = {seen.rollout: seen.trajectories for seen in tracer.seen}
    for trajectory in group:
        assert results[trajectory.metadata["rollout_id"]] == [trajectory]
        assert trajectory.metadata["inside"] == trajectory.metadata["rollout_id"]  # also in a task of the rollout
    assert [type(seen.error) for seen in tracer.seen].count(TimeoutError) == 1
    assert inside.get() == ""


async def test_the_step_of_a_loop_without_a_bus_is_unknown(tracer):
    await gather_trajectories([rollout()], pbar_desc=None)
    assert [seen.step for seen in tracer.seen] == [None]


@pytest.mark.parametrize("error", ["start", "end"])
async def test_an_error_of_a_tracer_is_one_warning(tracer, error):
    tracer.error = error
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = await gather_trajectories([rollout() for _ in range(5)], pbar_desc=None)
    assert [trajectory.reward for trajectory in results] == [1.0] * 5
    (warning,) = [str(each.message) for each in caught if "probe_tool" in str(each.message)]
    assert "OSError: no connection" in warning and "Training continues" in warning


@pytest.mark.filterwarnings("error")
async def test_a_warning_that_is_an_error_does_not_end_a_rollout(tracer):
    tracer.error = "start"
    (trajectory,) = await gather_trajectories([rollout()], pbar_desc=None)
    assert trajectory.reward == 1.0


def test_only_addresses_of_known_hosts_become_links(monkeypatch):
    monkeypatch.setattr(tracers, "LINK_HOSTS", {"wandb.ai"})
    addresses = {
        "weave_url": "https://wandb.ai/tests/2048/r/call/1",
        "a_url": "https://wandb.ai.example.com/1",
        "b_url": "https://example.com/?wandb.ai",
        "c_url": "https://wandb.ai@example.com/",
        "d_url": "javascript://wandb.ai/%0aalert(1)",
        "e_url": "https://[",
        "f_url": "https://wandb.ai/" + 500 * "x",
        "g": "https://wandb.ai/1",
        "h_url": 7,
        "i_url": "https://example.com\\@wandb.ai/x",  # a browser opens example.com
        "j_url": "https://someone@wandb.ai/x",
    }
    assert tracers.trusted_links(addresses) == [["weave", addresses["weave_url"]]]
