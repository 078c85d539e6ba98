"""`art.mcp` with the reference servers of npm: tools, 64 rollouts at the same time, and processes after an interrupt.

`make test-agents` installs the servers. The policy follows a plan that the task contains.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from support.audit import count
from support.registered import until
from support.scripted_policies import policy

import art_nb as art

pytest.importorskip("mcp", reason="make test-agents installs the mcp package")
SERVERS = Path(__file__).parent / "programs" / "node" / "node_modules" / "@modelcontextprotocol"
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not SERVERS.exists() or shutil.which("node") is None, reason="make test-agents installs them"),
]
END = ["complete_task", {"summary": "done"}]
ROLLOUTS = count(64, 16)
START_S = 300.0  # many processes start at the same time on a machine that may be busy


def command(name, *arguments):
    return ["node", str(SERVERS / f"server-{name}" / "dist" / "index.js"), *map(str, arguments)]


def plan(*calls):
    return json.dumps([*calls, END])


def next_call(prompt):
    """Return the next call of the plan in the task."""
    task, _, rest = prompt.partition("<user>")[2].partition("<assistant>")
    name, arguments = json.loads(task)[rest.count("<assistant>")]
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def model():
    with policy(next_call) as served:
        yield served


def processes(text):
    """Return the numbers of the processes whose command line or environment contains a text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            known = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:  # it has ended, or it belongs to another user
            continue
        if text.encode() in known and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


async def test_the_memory_server(tmp_path):
    ada = {"name": "Ada", "entityType": "person", "observations": ["likes tea"]}
    async with art.mcp.connect(command("memory"), env={"MEMORY_FILE_PATH": str(tmp_path / "memory.jsonl")}) as session:
        assert {"create_entities", "open_nodes", "search_nodes"} <= {tool.name for tool in session.tools}
        assert not (await session.call("create_entities", {"entities": [ada]})).is_error
        opened = await session.call("open_nodes", {"names": ["Ada"]})
        assert json.loads(opened.text)["entities"] == [ada]
        assert (await session.call("open_nodes", {"names": "Ada"})).is_error
    assert "likes tea" in (tmp_path / "memory.jsonl").read_text()


async def test_the_filesystem_server(tmp_path):
    (tmp_path / "a.txt").write_text("apple")
    async with art.mcp.connect(command("filesystem", tmp_path), cwd=tmp_path) as session:
        assert {"read_text_file", "write_file", "list_directory"} <= {tool.name for tool in session.tools}
        assert session.resources == []  # the server has no method for resources
        assert (await session.call("read_text_file", {"path": "a.txt"})).text == "apple"
        for path, message in (("b.txt", "no such file"), ("/etc/passwd", "Access denied")):
            result = await session.call("read_text_file", {"path": path})
            assert result.is_error and message in result.text


async def test_the_everything_server(tmp_path):
    async with art.mcp.connect(command("everything", "stdio"), cwd=tmp_path) as session:
        assert len(session.tools) > 10 and session.resources
        assert (await session.call("echo", {"message": "é"})).text == "Echo: é"
        assert (await session.call("get-sum", {"a": 1, "b": 2})).text == "The sum of 1 and 2 is 3."
        assert "[image, image/png" in (await session.call("get-tiny-image")).text
        assert (await session.call("get-sum", {"a": 1})).is_error
        assert await session.read(session.resources[0].uri)


@pytest.mark.slow
async def test_many_rollouts_with_memories_of_their_own(model, tmp_path):
    def memory(scenario):
        path = {"MEMORY_FILE_PATH": str(tmp_path / f"{scenario['name']}.jsonl")}
        return art.mcp.connect(command("memory"), env=path, timeout_s=START_S)

    async def own_memory(trajectory, scenario, session):
        graph = json.loads((await session.call("read_graph")).text)
        return float([entity["name"] for entity in graph["entities"]] == [scenario["name"]])

    rollout = art.mcp.mcp_rollout(memory, reward=own_memory)
    entity = {"entityType": "note", "observations": []}
    scenarios = [
        {"name": f"n{i}", "task": plan(["create_entities", {"entities": [{"name": f"n{i}", **entity}]}])}
        for i in range(ROLLOUTS)
    ]
    trajectories = await asyncio.gather(*(rollout(model, scenario) for scenario in scenarios))
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * ROLLOUTS
    assert all(trajectory.metrics["valid_calls"] == 1 for trajectory in trajectories)
    await until(lambda: not processes(str(tmp_path)), timeout_s=30)


@pytest.mark.slow
async def test_many_rollouts_with_directories_of_their_own(model, tmp_path):
    @asynccontextmanager
    async def new_directory(scenario):
        with tempfile.TemporaryDirectory(dir=tmp_path) as directory:
            session = art.mcp.connect(command("filesystem", directory), cwd=directory, timeout_s=START_S)
            async with session:
                yield session
            scenario["left"].append({path.name: path.read_text() for path in Path(directory).iterdir()})

    rollout = art.mcp.mcp_rollout(new_directory)
    scenarios = [
        {"left": [], "task": plan(["write_file", {"path": "note.txt", "content": f"note {i}"}])} for i in range(64)
    ]
    trajectories = await asyncio.gather(*(rollout(model, scenario) for scenario in scenarios))
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 64
    assert [scenario["left"] for scenario in scenarios] == [[{"note.txt": f"note {i}"}] for i in range(64)]
    await until(lambda: not processes(str(tmp_path)), timeout_s=30)


def answers(url):
    try:
        urllib.request.urlopen(url, timeout=5)
    except urllib.error.HTTPError:  # it does not accept GET without a session
        return True
    except OSError:
        return False
    return True


@asynccontextmanager
async def everything_over_http(folder):
    """Start the server on a free port."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open(folder / "log", "w") as log:
        program = subprocess.Popen(
            command("everything", "streamableHttp"),
            env=os.environ | {"PORT": str(port)},
            stdout=log,
            stderr=log,
            start_new_session=True,  # some distributions of Node start a second process
        )
    try:
        url = f"http://127.0.0.1:{port}/mcp"
        await until(lambda: answers(url) or program.poll() is not None, timeout_s=60)
        assert program.poll() is None, (folder / "log").read_text()
        yield url
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()


async def test_64_rollouts_over_http(model, tmp_path):
    async with everything_over_http(tmp_path) as url:
        rollout = art.mcp.mcp_rollout(lambda scenario: art.mcp.connect(url, timeout_s=START_S))
        tasks = [plan(["get-sum", {"a": i, "b": 1}]) for i in range(64)]
        trajectories = await asyncio.gather(*(rollout(model, task) for task in tasks))
    results = [next(m["content"] for m in t.messages() if m["role"] == "tool") for t in trajectories]
    assert results == [f"The sum of {i} and 1 is {i + 1}." for i in range(64)]
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 64


PROGRAM = """
import asyncio, sys
import art_nb as art

async def main():
    async with art.mcp.connect(sys.argv[2:]) as session:
        print("ready", flush=True)
        if sys.argv[1] == "busy":
            await session.call("trigger-long-running-operation", {"duration": 600, "steps": 2})
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.skipif(not os.path.exists("/proc"), reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "state"),
    [(signal.SIGINT, "busy"), (signal.SIGINT, "idle"), (signal.SIGTERM, "idle"), (signal.SIGKILL, "idle")],
)
async def test_an_interrupt_leaves_no_process(tmp_path, number, state):
    """After an interrupt, the session ends its server. A killed program cannot, but an idle server ends by itself."""
    mark = str(tmp_path / "mark")  # an argument that the server ignores
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, state, *command("everything", "stdio", mark)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert program.stdout.readline() == b"ready\n"
    assert len(processes(mark)) >= 2  # the program and its server; some distributions of Node start a third process
    program.send_signal(number)
    program.communicate(timeout=60)
    await until(lambda: not processes(mark), timeout_s=30)
