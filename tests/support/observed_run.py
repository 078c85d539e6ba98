"""A run directory with tool calls, judgments and a failure, and real servers that show it."""

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from openai.types.chat.chat_completion import Choice
from support.ui import free_port

from art_nb.core.events import RolloutDone, RolloutStarted
from art_nb.rewards.journal import Journal, override
from art_nb.rewards.judges import Judgment
from art_nb.rollouts.trajectories import PydanticException, Trajectory, TrajectoryGroup
from art_nb.runs.store import RunStore

ROOT = Path(__file__).parents[2]
START_S = 1_795_000_000.0
SECRET = "sk-" + "a1B2c3D4" * 4
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Return the temperature in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def sampled(message, finish_reason, prompt_ids, token_ids):
    """A choice as the endpoint returns it."""
    choice = Choice.model_validate({"index": 0, "finish_reason": finish_reason, "message": message})
    choice.prompt_token_ids, choice.token_ids, choice.temperature, choice.policy_version = prompt_ids, token_ids, 0.7, 0
    choice.token_logprobs = [-0.5] * len(token_ids)
    return choice


def weather_rollout(name, city, reward):
    """Two turns with a tool call between them."""
    arguments = f'{{"city": "{city}", "password": "{SECRET}"}}'
    call = {"id": f"call-{name}", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    asked = {"role": "assistant", "content": "I look it up.", "reasoning_content": "A tool knows."}
    answer = {"role": "assistant", "content": f"It is 18 °C in {city}."}
    return Trajectory(
        messages_and_choices=[
            {"role": "system", "content": "You know the weather."},
            {"role": "user", "content": f"How warm is it in {city}? My key is {SECRET}."},
            sampled(asked | {"tool_calls": [call]}, "tool_calls", list(range(40)), list(range(12))),
            {"role": "tool", "tool_call_id": f"call-{name}", "content": '{"celsius": 18}'},
            sampled(answer, "stop", list(range(70)), list(range(9))),
        ],
        tools=TOOLS,
        reward=reward,
        metrics={"turns": 2},
        metadata={"rollout_id": name},
    )


def write_run(path, steps=1, groups=1, rollouts=2, name="weather-001"):
    """Write a run: in each group one rollout failed, and a judge scored the others."""
    store = RunStore(path)
    store.write_model({"name": name, "run_name": name, "project": "observed"})
    journal = Journal(path)
    for step in range(1, steps + 1):
        written = [write_group(store, journal, step, g, rollouts) for g in range(groups)]
        store.write_groups("train", step, written)
        row = {"step": step, "training_step": step, "train/reward": 0.5, "loss/train": 0.25, "time/step_wall_s": 30.0}
        store.append_history(row | {"recorded_at": f"2026-11-18T11:{step % 60:02d}:00"})
    return store


def write_group(store, journal, step, g, rollouts):
    """Write the events and judgments of a group, and return it."""
    group, started = f"group-{step}-{g}", START_S + 60 * step
    names = [f"r{step}-{g}-{i}" for i in range(rollouts)]
    for i, name in enumerate([*names, f"failed-{step}-{g}"]):
        store.append_event(RolloutStarted(rollout=name, group=group, step=step, time=started))
        error = "TimeoutError: too slow" if name.startswith("failed") else None
        done = RolloutDone(rollout=name, group=group, step=step, error=error, seconds_s=4.0 + i, time=started + 4.0 + i)
        store.append_event(done)
    scores = [i / max(1, rollouts - 1) for i in range(rollouts)]
    explanations = [f"Rollout {i} is {'complete' if i else 'short'}." for i in range(rollouts)]
    journal.append(
        Judgment(group, i, score, step, explanations[i], "gpt-4.1", rollout=names[i], time=started + 20)
        for i, score in enumerate(scores)
    )
    trajectories = [weather_rollout(name, "Rome", score) for name, score in zip(names, scores, strict=True)]
    failure = PydanticException(type="TimeoutError", message="too slow", traceback=f"api_key={SECRET}")
    metadata = {"group_id": group, "scenario_id": f"city {g}"}
    return TrajectoryGroup(trajectories, exceptions=[failure], metadata=metadata)


def overrule(store, index=0, score=0.75, reason="The answer is right.", group="group-1-0", step=1):
    """A person scores a rollout."""
    Journal(store.path).append(override(group, {index: score}, reason, step, by="Ada"))


@contextmanager
def server(environment, command, variables=None, health="/", wait_s=240, cwd=None):
    """Run a server of another environment on a free port, and end all its processes. Skip if it is not installed."""
    folder = ROOT / f".venv-observer-{environment}" / "bin"
    if not (folder / "python").exists():
        pytest.skip(f"make test-observers installs .venv-observer-{environment}")
    port, kept = free_port(), {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OTEL_"))}
    arguments = [str(part).replace("PORT", str(port)) for part in command]
    variables = {k: str(v).replace("PORT", str(port)) for k, v in (variables or {}).items()}
    process = subprocess.Popen(
        [str(folder / arguments[0]), *arguments[1:]],
        env={**kept, "DO_NOT_TRACK": "true", **variables},
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is None and httpx.get(url + health, timeout=5).status_code < 500, wait_s)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until(condition, wait_s=60.0):
    """Wait until a condition holds. Connection errors count as no."""
    end = time.monotonic() + wait_s
    while True:
        try:
            if result := condition():
                return result
        except httpx.HTTPError:
            pass
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.3)
