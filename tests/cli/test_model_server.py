"""`art-nb serve`: an OpenAI client of another process gets replies of the trained model."""

import re
import signal
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
        ("help/models/desk-001", ["--name", "gpt-4o-mini"], "gpt-4o-mini"),
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
        url, key = (re.search(rf"export {field}=(\S+)", text)[1] for field in ("OPENAI_BASE_URL", "OPENAI_API_KEY"))
        assert text.split()[-1] == name
        client = openai.OpenAI(base_url=url, api_key=key)
        messages = [{"role": "user", "content": "free: 1"}]
        reply = client.chat.completions.create(model=name, messages=messages, max_completion_tokens=4)
        assert reply.usage.completion_tokens > 0
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
        assert (runs / "help/models/desk-001/model.json").read_text() == record
    finally:
        server.kill()
        server.wait()


def test_errors_are_one_line(runs, tmp_path, capsys):
    assert main(["serve", str(tmp_path)]) == 1
    assert "contains no run" in capsys.readouterr().err
    assert main(["serve", str(runs), "--step", "7"]) == 1
    assert capsys.readouterr().err == "art-nb: There is no checkpoint of step 7. Available steps: 0, 1.\n"
