"""`art-nb serve`: an OpenAI client of another process gets replies of the trained model."""

import re
import shutil
import signal
import socket
import subprocess
import sys

import openai
import pytest

import art_nb as art
from art_nb.cli.main import main


@pytest.fixture(scope="module")
async def runs(tmp_path_factory, tiny_model_dir):
    """A directory with one run, at step 1."""
    path = tmp_path_factory.mktemp("runs")
    model = art.TrainableModel(
        name="desk-001", project="help", base_model=str(tiny_model_dir), lora_config={"rank": 4, "alpha": 8}
    )
    async with art.LocalBackend(path=path, verbose=False) as backend:
        await model.register(backend)
        messages = [{"role": "user", "content": "free: 1"}, {"role": "assistant", "content": "yes"}]
        await model.train_sft([art.Trajectory(messages_and_choices=messages)])
    return path


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("place", "options", "name"),
    [
        (".", [], "desk-001"),
        ("help/models/desk-001", ["--step", "0"], "desk-001@0"),
        ("help/models/desk-001", ["--name", "gpt-4o-mini", "--temperature", "0"], "gpt-4o-mini"),
    ],
)
def test_a_client_gets_replies_of_the_checkpoint_until_ctrl_c(runs, place, options, name):
    record = (runs / "help/models/desk-001/model.json").read_text()
    code = f"import sys; from art_nb.cli.main import main; sys.exit(main({['serve', str(runs / place), *options]!r}))"
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        text = ""
        while "The name of the model" not in text:
            line = server.stdout.readline()
            assert line, f"the server ended: {text}"
            text += line
        assert "; step 1;" in text  # the backend has loaded the newest checkpoint
        assert f"Serving step {'0' if '--step' in options else '1'} until" in text
        url, key = (re.search(rf"export {field}=(\S+)", text)[1] for field in ("OPENAI_BASE_URL", "OPENAI_API_KEY"))
        assert text.split()[-1] == name
        client = openai.OpenAI(base_url=url, api_key=key)
        messages = [{"role": "user", "content": "free: 1"}]
        reply = client.chat.completions.create(model=name, messages=messages, max_completion_tokens=4)
        assert reply.usage.completion_tokens > 0
        replies = client.chat.completions.create(model=name, messages=messages, n=20, max_completion_tokens=4).choices
        assert (len({choice.message.content for choice in replies}) == 1) == ("--temperature" in options)
        with pytest.raises(openai.NotFoundError, match=r"'desk-001@7': there is no checkpoint.*steps: 0, 1\.$"):
            client.chat.completions.create(model="desk-001@7", messages=messages)
        with pytest.raises(openai.NotFoundError, match="Unknown model 'other'.*start it with `--name other`"):
            client.chat.completions.create(model="other", messages=messages)
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
        assert (runs / "help/models/desk-001/model.json").read_text() == record
    finally:
        server.kill()
        server.wait()


def test_the_served_step_is_named_if_the_newest_checkpoint_is_damaged(runs, tmp_path, monkeypatch, capsys):
    copied = shutil.copytree(runs, tmp_path / "runs")
    (copied / "help/models/desk-001/checkpoints/0001/optimizer.safetensors").write_bytes(b"damaged")
    monkeypatch.setattr("art_nb.cli.model_server.wait_for_interrupt", lambda: None)
    assert main(["serve", str(copied)]) == 0
    assert "Serving step 0 until" in capsys.readouterr().out


def test_errors_are_one_line(runs, tmp_path, capsys):
    assert main(["serve", str(tmp_path)]) == 1
    assert "contains no run" in capsys.readouterr().err
    assert main(["serve", str(runs), "--temperature", "3"]) == 1
    assert "use a number from 0 to 2" in capsys.readouterr().err
    assert main(["serve", str(runs), "--step", "7"]) == 1
    assert capsys.readouterr().err == "art-nb: There is no checkpoint of step 7. Available steps: 0, 1.\n"


HOLD = """
import sys
from art_nb.runs.locks import acquire_lock

acquire_lock(sys.argv[1], print)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_that_another_process_uses(runs, capsys):
    command = [sys.executable, "-c", HOLD, str(runs / "help/models/desk-001")]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "held\n"
        assert main(["serve", str(runs)]) == 1
    error = capsys.readouterr().err
    assert f"is in use by process {process.pid}" in error and "use its endpoint" in error
    assert "another name" not in error


def test_the_port_and_the_key_can_be_set(runs, monkeypatch, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", str(runs), "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"art-nb: Cannot serve on 127.0.0.1, port {port} (") and "Choose another port" in error

    monkeypatch.setenv("ART_NB_API_KEY", "short")
    assert main(["serve", str(runs)]) == 1
    assert capsys.readouterr().err == "art-nb: ART_NB_API_KEY has 5 characters. Use 16 or more.\n"

    def ask():
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="a-key-of-the-user")
        assert "desk-001" in [model.id for model in client.models.list()]

    monkeypatch.setenv("ART_NB_API_KEY", "a-key-of-the-user")
    monkeypatch.setattr("art_nb.cli.model_server.wait_for_interrupt", ask)
    assert main(["serve", str(runs), "--port", str(port)]) == 0
    text = capsys.readouterr().out
    assert f"OPENAI_BASE_URL=http://127.0.0.1:{port}/v1\n" in text
    assert "OPENAI_API_KEY=$ART_NB_API_KEY\n" in text and "a-key-of-the-user" not in text
