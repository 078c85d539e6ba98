"""`art-nb init --agent`: a task from an existing agent and a file of questions."""

import csv
import os
import re
import subprocess
import sys
from collections import Counter
from inspect import iscoroutinefunction
from unittest.mock import patch

import pytest
from support.warm import warm_python

from art_nb.cli.agent_task import agent_task
from art_nb.cli.main import main
from art_nb.core.types import StoreError
from art_nb.models.tiny import save_tiny_model

PRICES = {f"item{n}": n + 10 for n in range(24)}
AGENT = """
import json

import openai

client = openai.OpenAI()
PRICES = {f"item{n}": n + 10 for n in range(24)}
ARGUMENT = {"type": "object", "properties": {"thing": {"type": "string"}}, "required": ["thing"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": ARGUMENT}} for name in NAMES]


def price(thing):
    return f"{PRICES[thing]} euros"


def answer(question):
    messages = [{"role": "user", "content": question}]
    while True:
        reply = client.chat.completions.create(model="gpt-4o-mini", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            text = price(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


async def answer_async(question):
    async with openai.AsyncOpenAI() as client:
        messages = [{"role": "user", "content": question}]
        fields = {"max_tokens": 40, "temperature": 0.5}
        reply = await client.chat.completions.create(model="gpt-4o-mini", messages=messages, **fields)
    return reply.choices[0].message.content


def answer_json(question):
    return json.loads(answer_without_tools(question))["total"]


def answer_without_tools(question):
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(model="gpt-4o-mini", messages=messages).choices[0].message.content


def answer_nothing(question):
    return ""


def answer_twice(question):
    return answer_without_tools(question) + answer_without_tools(question)


def forget_the_answer(question):
    answer(question)
    return "done"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with an agent that is imported only in this test."""
    (tmp_path / "price_agent.py").write_text(AGENT.replace("NAMES", '["find_price"]'))
    (tmp_path / "stock_agent.py").write_text(AGENT.replace("NAMES", '["find_price", "find_stock"]'))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with patch.dict(os.environ):  # the source of a task sets keys
        os.environ.pop("OPENAI_API_KEY", None)
        yield tmp_path
    for name in ("price_agent", "stock_agent"):
        sys.modules.pop(name, None)


def questions(path, columns=("question", "answer", "thing"), **values):
    """Write three questions about each item."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        for form in ("Price of {}?", "What does {} cost?", "How expensive is {}?"):
            for thing, price in PRICES.items():
                row = {"question": form.format(thing), "answer": f"{price} euros", "thing": thing}
                writer.writerow(row | values)
    return path


def names_of(task, folder):
    """Return what the source of a task defines."""
    names = {"__file__": str(folder / "train.py")}
    exec("\n".join((task.task, task.environment, task.rollout.replace("SCORE", task.environment_score))), names)
    return names


def test_a_tool_and_its_column(folder):
    task = agent_task("price_agent.py:answer", questions(folder / "questions.csv"), folder)
    first, tools, held_out, conversation, results = task.summary.splitlines()
    columns = "questions from `question`, answers from `answer`, arguments of the right calls from `thing`."
    assert first == f"questions.csv: {columns}"
    assert tools == "Tools of price_agent.py: find_price(thing)."
    assert held_out == "Held out: 30 of 72 questions. Their tool calls do not occur in the training questions."
    assert "→ find_price({'thing': 'item" in conversation and "euros' → '" in conversation
    assert results == "The tools return the right answer in 20 of 20 conversations."
    names = names_of(task, folder)
    assert names["EVAL_OVERRIDES"] == {"max_completion_tokens": 64, "temperature": 0.2} and names["N_EXAMPLES"] == 40
    clusters = [{scenario["calls"] for scenario in names[part]} for part in ("scenarios", "held_out")]
    assert not clusters[0] & clusters[1] and len(names["held_out"]) == 30 and len(names["scenarios"]) == 42
    scenario = next(scenario for scenario in names["scenarios"] + names["held_out"] if scenario["answer"] == "12 euros")
    assert scenario["replies"] == [("find_price", {"thing": "item2"}), "12 euros"]
    rewards = {
        "It costs 12 Euros!": 1,
        "12": 0,
        "112 euros": 0,
        "12.5 euros": 0,
        "12 euros or 13 euros": 0,
        "-12 euros": 0,
        None: 0,
    }
    assert {reply: names["reward"](reply, scenario) for reply in rewards} == rewards


def test_an_agent_without_tools_in_another_folder(folder):
    (folder / "runs").mkdir()
    file = questions(folder / "questions.csv", ("question", "answer"))
    task = agent_task("price_agent.py:answer_async", file, folder / "runs")
    assert "Tools of price_agent.py: none.\nHeld out: 18 of 72 questions.\n" in task.summary
    names = names_of(task, folder / "runs")
    assert (
        names["TOOLS"] == names["EVAL_OVERRIDES"] == {}
        and not task.serve_options
        and iscoroutinefunction(names["answer"])
    )
    assert names["CLUSTER"] == "question" and len(names["held_out"]) == 18


def test_a_column_names_the_tool(folder):
    file = questions(folder / "questions.csv", ("question", "answer", "thing", "tool"), tool="find_stock")
    names = names_of(agent_task("stock_agent.py:answer", file, folder), folder)
    assert {scenario["replies"][0][0] for scenario in names["scenarios"]} == {"find_stock"}
    assert names["N_EXAMPLES"] == 54  # three quarters of the rows
    with pytest.raises(
        StoreError, match="contains 'find_prices'. The tools that the rows can call: find_price, find_stock"
    ):
        agent_task(
            "stock_agent.py:answer",
            questions(file, ("question", "answer", "thing", "tool"), tool="find_prices"),
            folder,
        )


def test_optional_arguments_and_rows_without_a_call(folder):
    """A row without an optional argument keeps its call. Spaces around cells do not matter."""
    source = AGENT.replace("NAMES", '["find_price"]').replace(
        '"properties": {', '"properties": {"unit": {"type": ["integer", "null"]}, '
    )
    (folder / "price_agent.py").write_text(source.replace("def price(thing):", "def price(thing, unit=None):"))
    file = questions(folder / "questions.csv", ("question", "answer", "thing", "unit"))
    lines = file.read_text().splitlines()
    lines[1::4] = [line + " 5 " for line in lines[1::4]]
    lines[2::4] = [line.rsplit(",", 2)[0] + ",," for line in lines[2::4]]
    file.write_text("\n".join(lines))
    task = agent_task("price_agent.py:answer", file, folder)
    assert "18 of 72 questions have no tool call." in task.summary
    names = names_of(task, folder)
    assert names["OPTIONAL"] == {"unit"}
    kinds = Counter(tuple(reply[1]) for each in names["all_scenarios"] for reply in each["replies"][:-1])
    assert kinds == {("thing",): 36, ("unit", "thing"): 18}
    assert {
        reply[1]["unit"] for each in names["all_scenarios"] for reply in each["replies"][:-1] if "unit" in reply[1]
    } == {5}


def test_a_lambda_is_an_agent(folder):
    (folder / "stock_agent.py").write_text(
        AGENT.replace("NAMES", "[]") + "\nshort = lambda text: answer_without_tools(text)\n"
    )
    task = agent_task("stock_agent.py:short", questions(folder / "questions.csv", ("question", "answer")), folder)
    assert "agent.short(question)" in task.rollout


def test_rows_that_no_reward_can_compare(folder):
    file = questions(folder / "questions.csv")
    file.write_text(file.read_text().replace(",12 euros,", ",??,"))
    with pytest.raises(StoreError, match=r"The answer '\?\?' has no words"):
        agent_task("price_agent.py:answer", file, folder)


def test_results_without_the_right_answer_are_counted(folder):
    file = questions(folder / "questions.csv", thing="item0")
    assert "the right answer in 0 of 20 conversations" in agent_task("price_agent.py:answer", file, folder).summary


@pytest.mark.parametrize(
    ("agent", "columns", "error"),
    [
        ("price_agent", ("question", "answer"), "write FILE.py:FUNCTION"),
        ("my-agent.py:answer", ("question", "answer"), "Python cannot import my-agent.py: rename it"),
        ("other.py:answer", ("question", "answer"), "Could not find other.py"),
        ("price_agent.py:reply", ("question", "answer"), "has no function 'reply'"),
        ("broken.py:answer", ("question", "answer"), "Could not import broken.py: ZeroDivisionError"),
        ("json.py:answer", ("question", "answer"), "There is another module 'json'"),
        ("price_agent.py:answer", ("question", "answer"), "has the tools find_price(thing). Add a column"),
        ("stock_agent.py:answer", ("question", "answer", "thing"), "add a column `tool`"),
        ("price_agent.py:answer_nothing", ("question", "answer"), "sent no request to a model"),
        ("price_agent.py:price", ("question", "answer"), "sent no request to a model: KeyError"),
        ("price_agent.py:answer_twice", ("question", "answer"), "the agent sent more requests than there are replies"),
        ("price_agent.py:answer_json", ("question", "answer"), "must return the text of its last reply"),
        ("price_agent.py:forget_the_answer", ("question", "answer", "thing"), "must return the text of its last reply"),
    ],
)
def test_errors(agent, columns, error, folder, capsys):
    (folder / "broken.py").write_text("1 / 0")
    (folder / "json.py").write_text("")
    questions(folder / "questions.csv", columns)
    before = {*folder.glob("*.*")}
    assert main(["init", "--agent", agent, "--data", "questions.csv", "train.py"]) == 1
    assert error in capsys.readouterr().err
    assert {*folder.glob("*.*")} == before


def test_arguments_that_are_not_numbers(folder):
    source = AGENT.replace("NAMES", '["find_price"]').replace('"type": "string"', '"type": "integer"')
    (folder / "price_agent.py").write_text(source)
    with pytest.raises(StoreError, match="questions.csv are not numbers: invalid literal"):
        agent_task("price_agent.py:answer", questions(folder / "questions.csv"), folder)
    sys.modules.pop("price_agent")
    (folder / "price_agent.py").write_text(source.replace("integer", "array"))
    with pytest.raises(StoreError, match=r"argument of find_price\(thing\) that is a list"):
        agent_task("price_agent.py:answer", questions(folder / "questions.csv"), folder)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--agent", "price_agent.py:answer"), "--agent needs --data FILE"),
        (
            ("--agent", "price_agent.py:answer", "--data", "a.csv", "--task", "agent"),
            "Pass --agent or --task, not both",
        ),
    ],
)
def test_options(options, error, folder, capsys):
    assert main(["init", *options]) == 1
    assert error in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["answer", "answer_async"])
def test_the_script_and_its_test_run(agent, folder):
    """With a tiny model whose rewards are all 0, except in the test, which gives it the right replies."""
    questions(folder / "questions.csv")
    tiny = save_tiny_model(folder / "tiny", context=2048)
    assert (
        main(
            ["init", "--agent", f"price_agent.py:{agent}", "--data", "questions.csv", "--model", str(tiny), "train.py"]
        )
        == 0
    )
    line = [warm_python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "test_train.py"]
    output = subprocess.run(line, capture_output=True, text=True, check=False).stdout
    assert "2 passed" in output, output
    source = (folder / "train.py").read_text()
    for old, new in (
        ("steps=7, groups_per_step=8, rollouts_per_group=6", "steps=2, groups_per_step=2, rollouts_per_group=2"),
        ("scenarios[:N_EXAMPLES]", "scenarios[:2]"),
        ("][:100]", "][:4]"),
    ):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (folder / "train.py").write_text(re.sub("\nEVAL_OVERRIDES = .*", '\nEVAL_OVERRIDES = {"max_tokens": 200}', source))
    result = subprocess.run([warm_python(), "train.py"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("EvaluationDifference(price-agent-001 step 2 against step") == 2


def test_the_notebook_is_valid(folder):
    questions(folder / "questions.csv")
    assert main(["init", "--agent", "price_agent.py:answer", "--data", "questions.csv", "train.ipynb"]) == 0
    line = [warm_python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "test_train.py"]
    output = subprocess.run(line, capture_output=True, text=True, check=False).stdout
    assert "2 passed" in output, output
