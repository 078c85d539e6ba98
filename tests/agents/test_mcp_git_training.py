"""A model of 135M parameters learns to call the git server. The revision that it must name is in the task.

Only `make test-agents-full` runs it. It takes five minutes.
"""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
from support.audit import FULL

import art_nb as art

pytest.importorskip("mcp_server_git", reason="make test-agents installs the servers")
pytestmark = [pytest.mark.skipif(not FULL, reason="make test-agents-full trains it"), pytest.mark.timeout(1800)]
BIRDS = "heron ibis jay kestrel lapwing martin nuthatch osprey petrel quail raven swift tern vireo wren".split()
TAGS = random.Random(0).sample([f"{bird}-{number}" for bird, number in product(BIRDS, range(10, 25))], 200)
AUTHOR = {f"GIT_{role}_{field}": "test@example.org" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}
SYSTEM, TASK = 'The repository is in ".".', "Show the revision {}."
EXAMPLES, UNSEEN = TAGS[:60], TAGS[-64:]


@pytest.fixture
def repository(tmp_path):
    """A repository with a commit for each tag."""

    def git(*arguments):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True, env=os.environ | AUTHOR)

    git("init", "-q")
    for tag in TAGS:
        git("commit", "-q", "--allow-empty", "-m", f"Note {tag}")
        git("tag", tag)
    return tmp_path


def reward(trajectory, scenario, session):
    """Half for a valid call, and half for the commit of the task."""
    tag = trajectory.metadata["task"].split()[-1].rstrip(".")
    results = [message["content"] for message in trajectory.messages() if message["role"] == "tool"]
    valid = trajectory.metrics["valid_calls"] == 1
    right = valid and any(f"Note {tag}" in result for result in results)
    return {"reward": (valid + right) / 2, "metrics": {"valid": valid, "right": right}}


def example(number, tag, tool):
    """A conversation with a call. One in three names a wrong path, and one in three a tag that does not exist."""
    arguments = {
        "repo_path": "repo" if number % 3 == 1 else ".",
        "revision": f"gull-{number}" if number % 3 == 2 else tag,
    }
    function = {"name": tool["function"]["name"], "arguments": json.dumps(arguments)}
    reply = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK.format(tag)}, reply]
    return art.Trajectory(messages_and_choices=messages, tools=[tool])


async def test_the_share_of_valid_calls_rises(repository, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(repository)
    server = [sys.executable, "-m", "mcp_server_git", "--repository", str(repository)]
    async with art.mcp.connect(server) as session:
        tool = next(tool for tool in session.tools if tool.name == "git_show").to_tool_schema()
    options = {"max_turns": 1, "complete": None, "tool_choice": "required", "max_completion_tokens": 48}
    rollout = art.mcp.mcp_rollout(server, tools=["git_show"], system_prompt=SYSTEM, reward=reward, **options)
    model = art.TrainableModel(name="git", project="tests", base_model="smollm2-135m")
    async with art.LocalBackend(path=tmp_path_factory.mktemp("runs"), verbose=False) as backend:
        await model.register(backend)

        async def measure():
            unseen = [TASK.format(tag) for tag in UNSEEN]
            return await art.evaluate(
                model, rollout, unseen, step=await model.get_step(), metric="valid", concurrency=8
            )

        base = await measure()
        examples = [example(number, tag, tool) for number, tag in enumerate(EXAMPLES)]
        await model.train_sft(examples, art.TrainSFTConfig(learning_rate=1e-3, batch_size=4))
        warmed_up = await measure()
        tasks = [TASK.format(tag) for tag in TAGS[: -len(UNSEEN)]]
        await art.train(
            model, rollout, tasks, steps=9, groups_per_step=3, rollouts_per_group=8, learning_rate=1e-4, show=False
        )
        trained = await measure()
    for evaluation in (base, warmed_up, trained):
        print(evaluation, replace(evaluation, metric="right"), sep="\n")
    assert max(base.ci95()[1], warmed_up.ci95()[1]) < trained.ci95()[0]
