"""The official clients and LiteLLM through `art-nb record`: what is read back is the conversation of the client.

Each client has the same conversation with a tool. The provider is our endpoint with a script. The files are also read
without its additional fields, as another provider sends them. `.venv-litellm` has the older openai client and the
packages of LiteLLM's proxy.
"""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.agent_parts import NO_TELEMETRY, Script, served_model
from support.client_loops import (
    EXPECTED,
    anthropic_messages,
    chat_loop,
    litellm_in_process,
    openai_chat,
    openai_responses,
    openai_stored_responses,
    summary,
)
from support.registered import until

import art_nb as art
from art_nb.runs.recordings import read_records

os.environ |= NO_TELEMETRY
pytest.importorskip("anthropic", reason="make test-agents installs the frameworks")

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
OLDER = ROOT / ".venv-litellm" / "bin" / "python"
COMMAND = (sys.executable, "-c", "import sys; from art_nb.cli.main import main; sys.exit(main())")
CLIENTS = (openai_chat, openai_responses, openai_stored_responses, anthropic_messages, litellm_in_process)


@contextmanager
def running(command, **env):
    """A process that ends with the block."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | env
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as one:
        try:
            yield one
        finally:
            one.send_signal(signal.SIGINT)
            try:
                one.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                one.kill()


@pytest.fixture(scope="module")
def upstream():
    with served_model(Script()) as model:
        yield model


@pytest.fixture(scope="module")
def proxy(upstream, tmp_path_factory):
    """`art-nb record` in a process of its own. Its value is the base URL and the file."""
    path = tmp_path_factory.mktemp("recording") / "traffic.jsonl"
    line = [*COMMAND, "record", "--upstream", upstream.inference_base_url, "--port", "0", "--path", str(path)]
    with running(line) as process:
        url = next(line.partition("=")[2].strip() for line in process.stdout if "BASE_URL=" in line)
        yield url, path


def without_own_fields(path, folder):
    """A copy of a recording as of another provider: without the token IDs and the exact turn of our endpoint."""
    copy = folder / "other.jsonl"
    with copy.open("w") as file:
        for record in read_records(path):
            reply = record["reply"]
            reply.pop("art_nb", None)
            for choice in reply.get("choices", ()):
                for name in ("prompt_token_ids", "token_ids", "logprobs"):
                    choice.pop(name, None)
            file.write(json.dumps(record) + "\n")
    return copy


def read_conversation(path, name, n=2):
    """The one conversation of a session, as soon as its requests are written."""
    asyncio.run(until(lambda: path.exists() and len(of_session(path, name)) >= n))
    (trajectory,) = (one for one in art.read_conversations(path) if one.metadata["session"] == name)
    assert not trajectory.additional_histories
    return trajectory


def of_session(path, name):
    return [record for record in read_records(path) if record["session"] == name]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("client", CLIENTS)
def test_the_recording_is_the_conversation_of_the_client(upstream, proxy, tmp_path, client, stream):
    (url, path), name = proxy, f"{client.__name__}-{stream}"
    messages = client(url, upstream.inference_api_key, name, stream)
    assert summary(messages) == EXPECTED
    trajectory = read_conversation(path, name)
    assert summary(trajectory.messages()) == EXPECTED
    assert [tool["function"]["name"] for tool in trajectory.tools] == ["weather"]
    other = read_conversation(without_own_fields(path, tmp_path), name)
    assert summary(other.messages()) == EXPECTED
    assert [tool["function"]["name"] for tool in other.tools] == ["weather"]
    assert upstream.inference_api_key.encode() not in path.read_bytes()


@pytest.mark.skipif(not OLDER.exists(), reason="make test-agents-full installs .venv-litellm")
def test_the_older_openai_client(upstream, proxy):
    url, path = proxy
    line = [str(OLDER), str(ROOT / "tests" / "support" / "client_loops.py"), url, upstream.inference_api_key]
    subprocess.run(line, check=True, timeout=200)
    for client in ("openai_chat", "openai_responses"):
        for stream in (False, True):
            assert summary(read_conversation(path, f"older-{client}-{stream}").messages()) == EXPECTED


CONFIG = """
model_list:
  - model_name: ttt@3
    litellm_params: {model: openai/ttt@3, api_base: URL, api_key: os.environ/UPSTREAM_KEY}
litellm_settings:
  callbacks: art_recorder.recorder
general_settings:
  master_key: os.environ/PROXY_KEY
"""


@pytest.fixture(scope="module")
def litellm_proxy(upstream, proxy, tmp_path_factory):
    """LiteLLM's proxy in a process of its own, with our proxy as its upstream and with our callback."""
    if not OLDER.exists():
        pytest.skip("make test-agents-full installs .venv-litellm")
    folder = tmp_path_factory.mktemp("litellm")
    (folder / "config.yaml").write_text(CONFIG.replace("URL", proxy[0]))
    (folder / "art_recorder.py").write_text("from art_nb.integrations.litellm_logger import recorder\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(OLDER.parent / "litellm"), "--config", str(folder / "config.yaml"), "--host", "127.0.0.1"]
    keys = {"UPSTREAM_KEY": upstream.inference_api_key, "PROXY_KEY": "sk-litellm-0123456789"}
    path = folder / "litellm.jsonl"
    with running([*command, "--port", str(port)], ART_NB_RECORD=str(path), **keys) as process:
        url = f"http://127.0.0.1:{port}"

        def is_up():
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.3)  # it starts while other tests need the processor
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            try:
                connection.request("GET", "/health/liveliness")
                return connection.getresponse().status == 200
            except OSError:
                return False
            finally:
                connection.close()

        asyncio.run(until(is_up, 120))
        yield url, keys["PROXY_KEY"], path


@pytest.mark.parametrize("stream", [False, True])
def test_the_proxy_of_litellm(proxy, litellm_proxy, stream):
    url, key, path = litellm_proxy
    (_, upstream_path), name = proxy, f"visit-{stream}"

    def create(**body):
        import openai

        with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
            reply = client.chat.completions.create(**body, extra_body={"litellm_session_id": name})
            return [chunk.model_dump(exclude_none=True) for chunk in reply] if stream else reply.model_dump()

    assert summary(chat_loop(create, stream)) == EXPECTED
    assert summary(read_conversation(path, name).messages()) == EXPECTED
    before = [one for one in art.read_conversations(upstream_path) if one.metadata["session"].startswith("key-")]
    assert summary(before[-1].messages()) == EXPECTED
    content = path.read_bytes()
    assert key.encode() not in content and b"ttt-key" not in content
