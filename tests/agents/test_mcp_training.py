"""A model learns to call a real MCP server that stores something: every rollout has a directory of its own.

Run it with `ART_NB_TESTS=full make test-agents`. Its figures are in docs/how-to/mcp.md.
"""

import random
import shutil
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import art_nb as art

pytest.importorskip("mcp", reason="make test-agents installs the mcp package")
MODULES = Path(__file__).parent / "programs" / "node" / "node_modules"
SERVER = MODULES / "@modelcontextprotocol" / "server-filesystem" / "dist" / "index.js"
NOUNS = {
    "train": "apple bridge cloud dream eagle flame grape house island jungle kettle lemon mirror needle orange",
    "test": "anchor basket candle desert engine forest garden hammer insect jacket knife ladder museum nurse oven",
}
COLORS = "black blue brown gray green pink red white".split()


def file_task(split, seed):
    """Return a task about one of four files. The nouns in the names differ between training and test."""
    draw = random.Random(f"{split} {seed}")
    nouns, endings = draw.sample(NOUNS[split].split(), 4), draw.choices(["txt", "md", "csv"], k=4)
    names = [f"{draw.choice(COLORS)}-{noun}.{ending}" for noun, ending in zip(nouns, endings, strict=True)]
    return {"task": f"Show the file {names[0]}.", "files": names}


@asynccontextmanager
async def new_directory(scenario):
    with tempfile.TemporaryDirectory() as directory:
        for name in scenario["files"]:
            Path(directory, name).write_text(f"The content of {name}.")
        async with art.mcp.connect(["node", str(SERVER), directory], cwd=directory, timeout_s=300.0) as session:
            yield session


def reward(trajectory, scenario, session):
    """Return the share of valid calls. A call is valid if the file exists, and right if it is the one in the task."""
    results = [message["content"] for message in trajectory.messages() if message["role"] == "tool"]
    is_right = f"The content of {scenario['files'][0]}." in results
    valid = trajectory.metrics["valid_calls"] == 1
    return {
        "reward": art.mcp.valid_call_share(trajectory, scenario, session),
        "metrics": {"valid": valid, "right": is_right},
    }


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not SERVER.exists() or shutil.which("node") is None, reason="make test-agents installs the server")
async def test_the_share_of_valid_calls_rises(smollm2_dir, tmp_path):
    model = art.TrainableModel(name="reader", project="files", base_model=str(smollm2_dir))
    backend = art.LocalBackend(path=str(tmp_path), verbose=False)
    await model.register(backend)
    rollout = art.mcp.mcp_rollout(
        new_directory,
        tools=["read_text_file"],
        reward=reward,
        max_turns=1,
        complete=None,
        tool_choice="required",
        max_completion_tokens=32,
    )
    unseen = [file_task("test", i) for i in range(64)]
    before = await art.evaluate(model, rollout, unseen, step=0, metric="valid", concurrency=16)
    tasks = [file_task("train", i) for i in range(200)]
    options = {"steps": 8, "groups_per_step": 3, "rollouts_per_group": 8, "learning_rate": 5e-4, "show": False}
    run = art.train(model, rollout, tasks, **options)
    await run
    after = await art.evaluate(model, rollout, unseen, metric="valid", concurrency=16)
    await backend.close()
    print(before, after, f"right: {before.mean('right'):.3f}, {after.mean('right'):.3f}", sep="\n")
    print([round(row["train/valid"], 2) for row in run.history if "train/valid" in row])
    assert after.ci95()[0] > before.ci95()[1]
    assert after.ci95("right")[0] > before.ci95("right")[1]
