"""Every notebook and script that `art-nb init` can write runs with a tiny model for one step, and so does its test."""

import ast
import inspect
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from support.remote_parts import MAIN
from support.warm import warm_python

from art_nb.cli.main import main
from art_nb.cli.starter import StarterAnswers, check_base_model, read_answers, write_starter
from art_nb.cli.starter_tasks import TASKS, scorings_of
from art_nb.core.types import StoreError
from art_nb.models.tiny import save_tiny_model

ROOT = Path(__file__).parents[2]
COMBINATIONS = [(task, reward) for task in TASKS for reward in scorings_of(TASKS[task])]
ONE_STEP = "steps=1, groups_per_step=2, rollouts_per_group=2"
MORE_TOKENS = 'EVAL_OVERRIDES = {"max_tokens": 200}'  # the tokens of the tiny model are short


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The tiny model with a context that is long enough for the schema of a tool."""
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model", context=2048))


async def execute(source, names):
    """Execute a cell as a notebook does."""
    code = compile(source, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if inspect.iscoroutine(result):
        await result


@pytest.mark.parametrize(("task", "reward"), COMBINATIONS)
def test_it_is_a_notebook(task, reward, tmp_path):
    notebook, *_ = write_starter(tmp_path / "toy.ipynb", StarterAnswers(task, reward))
    nbformat.validate(nbformat.read(notebook, as_version=4))


@pytest.fixture
def import_agent(tmp_path, monkeypatch):
    """Import the agent from the folder of the test, and from there only in this test."""
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("shelf_agent", None)


@pytest.mark.slow
@pytest.mark.usefixtures("import_agent")
@pytest.mark.parametrize(("task", "reward"), COMBINATIONS)
async def test_the_notebook_runs(task, reward, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    notebook, *_ = write_starter("toy.ipynb", StarterAnswers(task, reward, tiny))
    names, one_step = {}, ONE_STEP.replace("steps=1", "steps=2") if task in ("answer", "agent") else ONE_STEP
    try:
        for cell in json.loads(notebook.read_text())["cells"]:
            if cell["cell_type"] == "code":
                source = "".join(cell["source"]).replace(TASKS[task].settings, one_step)
                await execute(source.replace("EVAL_OVERRIDES = {}", MORE_TOKENS), names)
    finally:
        if "model" in names:
            await names["model"].backend().close()
    (rewards,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert len(json.loads(rewards)) == 1
    (row,) = names["run"].history
    assert row["train/exception_rate"] == 0
    assert sum(len(group) for group in names["run"].groups) == 4


def outcome_of(folder, *options):
    """What pytest says about a folder."""
    line = [warm_python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", *options, str(folder)]
    return subprocess.run(line, cwd=folder, env=environment(), capture_output=True, text=True, check=False).stdout


def test_the_tests_pass(tmp_path):
    """Those of all notebooks, and of a script for each task."""
    for task, reward in COMBINATIONS:
        write_starter(tmp_path / f"{task}-{reward}.ipynb", StarterAnswers(task, reward))
    scripts = dict.fromkeys(TASKS, "environment") | {"single": "rule", "tools": "judge"}
    for task, reward in scripts.items():
        write_starter(tmp_path / f"{task}_script.py", StarterAnswers(task, reward))
    said = outcome_of(tmp_path)
    assert "32 passed" in said, said


def run_script(task, tiny, folder, *changes):
    """Run a changed script. It has two steps, and two examples in the warm-up."""
    file = folder / "train.py"
    assert main(["init", "--task", task, "--model", tiny, str(file), "-y"]) == 0
    fewer = (TASKS[task].settings, "steps=2, groups_per_step=2, rollouts_per_group=2")
    source = file.read_text()
    for old, new in (fewer, ("scenarios[:N_EXAMPLES]", "scenarios[:2]"), *changes):
        assert source.count(old) == 1
        source = source.replace(old, new)
    file.write_text(source)
    return subprocess.run([warm_python(), file], cwd=folder, env=environment(), capture_output=True, text=True)


def output_of_script(*arguments):
    """Return what a changed script prints."""
    result = run_script(*arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_script_of_an_agent_runs(tiny, tmp_path, capsys):
    output = output_of_script("agent", tiny, tmp_path, ("EVAL_OVERRIDES = {}", MORE_TOKENS))
    assert f"python {tmp_path / 'train.py'}" in capsys.readouterr().out
    assert output.count("EvaluationDifference(shelves-001 step 2 against step") == 2
    assert re.search(r"The model: art-nb serve \S+/shelves-001 --name", output)


@pytest.mark.slow
def test_a_script_ends_if_the_warm_up_suffices(tiny, tmp_path):
    always_right = ("return float(reply == answer)", "return 1.0")
    output = output_of_script("answer", tiny, tmp_path, always_right, ("MAX_TOKENS = 24", "MAX_TOKENS = 99"))
    assert "step 1: right 1.000" in output and "Nearly all answers are right: training ends." in output
    assert "Step 2 of 2" not in output and output.count("EvaluationDifference") == 1  # the end prints more of them
    assert "step 1 against step 0" in output and "All rollouts: art-nb view" in output


@pytest.mark.slow
def test_a_script_ends_if_a_right_answer_gets_a_low_reward(tiny, tmp_path):
    half = ("return float(reply == answer)", "return 0.5")
    result = run_script("answer", tiny, tmp_path, half, ("MAX_TOKENS = 24", "MAX_TOKENS = 99"))
    assert result.returncode == 1 and "Check the reward: a right answer gets 0.5, " in result.stderr
    assert "step 1" not in result.stdout


@pytest.mark.parametrize(
    ("task", "old", "new", "failure"),
    [
        ("agent", '("find_shelf", {"item": item})', '("find_shelf", {"thing": item})', "assert not any"),
        ("agent", '{"item": item}), f"', '{"item": item}), "Wait.", f"', "sent 2 requests to the model, but 3 replies"),
        ("agent", 'f"They are on shelf {agent.find_shelf(item)}."', '"unknown"', "example.reward == 1"),
        ("agent", "return agent.answer(question)", "return question", "No reply of the model was recorded"),
        ("answer", 'FORMAT = "[0-9]{4}', 'FORMAT = "[0-9]{2}', "does not have the format"),
        ("answer", 'reward(choice.message.content, scenario["answer"])', "0.0", "example.reward == 1"),
    ],
)
def test_the_test_notices_wrong_scenarios(task, old, new, failure, tmp_path):
    write_starter(tmp_path / "train.py", StarterAnswers(task, "environment"))
    source = (tmp_path / "train.py").read_text()
    assert source.count(old) == 1
    (tmp_path / "train.py").write_text(source.replace(old, new))
    said = outcome_of(tmp_path, "-k", "rollout")
    assert failure in said and "1 failed" in said, said


def test_the_file_of_an_agent_is_not_overwritten(tmp_path):
    answers = StarterAnswers("agent", "environment")
    with pytest.raises(StoreError, match="is the name of the agent's file"):
        write_starter(tmp_path / "shelf_agent.py", answers)
    (tmp_path / "shelf_agent.py").write_text("mine")
    with pytest.raises(StoreError, match="shelf_agent.py already exists: use another folder"):
        write_starter(tmp_path / "toy.py", answers)
    assert [path.name for path in tmp_path.iterdir()] == ["shelf_agent.py"]


@pytest.mark.parametrize("task", ["single", "tools", "game"])
def test_the_test_fails_if_the_reward_is_wrong(task, tmp_path):
    notebook, *_ = write_starter(tmp_path / "toy.ipynb", StarterAnswers(task))
    notebook.write_text(notebook.read_text().replace("return score", "return -score"))
    assert "assert reward(good) > reward(bad)" in outcome_of(tmp_path, "-k", "reward")


# questions


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def test_questions_in_a_terminal(tmp_path):
    """In a real terminal: a word, a typo and a number, an empty answer."""
    terminal, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "init"], cwd=tmp_path, env=environment(), stdin=other, stdout=other, stderr=other
    )
    os.close(other)
    os.write(terminal, b"tools\nrobot\n3\n\n")
    shown = b""
    while part := _read(terminal):
        shown += part
    assert process.wait() == 0, shown.decode()
    assert b"Invalid answer 'robot'" in shown
    notebook = (tmp_path / "first-run.ipynb").read_text()
    assert "def reward(boxes)" in notebook
    assert "smollm2-135m" in notebook
    assert b"pytest test_first_run.py" in shown


def _read(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux: the other end is closed
        return b""


def test_options_are_answers(tmp_path, capsys):
    assert read_answers({}, None) == StarterAnswers("single", "rule", "smollm2-135m")
    lines = iter(["judge"])
    known = {"task": "game", "model": "Org/Name-1"}
    assert read_answers(known, lambda prompt: next(lines)) == StarterAnswers("game", "judge", "Org/Name-1")
    assert read_answers({"task": "agent"}, None) == StarterAnswers("agent", "environment")
    shown = iter(["agent", "game", ""])  # the task agent has no judge
    assert read_answers({"reward": "judge"}, lambda prompt: next(shown)) == StarterAnswers("game", "judge")
    with pytest.raises(StoreError, match="has its own reward"):
        read_answers({"task": "agent", "reward": "rule"}, None)
    assert check_base_model(str(tmp_path)) == str(tmp_path)
    with pytest.raises(StoreError, match="Did you mean 'smollm2-135m'"):
        check_base_model("smolm2-135m")


def test_an_existing_test_is_not_overwritten(tmp_path):
    (tmp_path / "test_toy.py").write_text("mine")
    with pytest.raises(StoreError, match="test_toy.py already exists"):
        write_starter(tmp_path / "toy.ipynb")
    assert [path.name for path in tmp_path.iterdir()] == ["test_toy.py"]
