"""Agent frameworks as programs of their own, which know only the environment variables of a session.

`make test-agents` runs those that fit into its environment, `make test-agents-full` all of them. The programs are in
the folder `programs`. The sampler follows the script of `support.agent_parts`.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from support.agent_parts import (
    ANSWER,
    ASK,
    CALL,
    EXPERT_QUESTION,
    NO_TELEMETRY,
    QUESTION,
    REASONED_QUESTION,
    RETRIED_QUESTION,
    SUBMIT,
    THOUGHT,
    Script,
    served_model,
)
from support.audit import FULL

import art_nb as art
from art_nb.tokens.rows import trajectory_rows

pytest.importorskip("dspy", reason="make test-agents installs the frameworks")
pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "programs"
QUESTIONS = {"two_agents": EXPERT_QUESTION, "retry": RETRIED_QUESTION, "reasoning": REASONED_QUESTION}
FORMS = ("whole", "stream", "thread", "two_agents", "retry")


class Program(NamedTuple):
    """A program in the folder `tests/agents/programs`."""

    environment: str
    command: str  # after the interpreter of its environment
    forms: tuple[str, ...] = FORMS
    quick: tuple[str, ...] = FORMS  # what `make test-agents` runs
    sends_reasoning: bool = True  # of earlier turns


WITHOUT_THREADS = tuple(form for form in FORMS if form != "thread")
NEW = ("stream", "two_agents", "retry")
IN_PROCESS = ("retry",)  # tests/agents/test_frameworks.py and test_langgraph.py have the other forms
PROGRAMS = {
    "curl": Program("sh", "curl_agent.sh", WITHOUT_THREADS, sends_reasoning=False),
    "ai-sdk-chat": Program("node", "node/ai_sdk_agent.mjs chat", WITHOUT_THREADS, (*WITHOUT_THREADS, "reasoning")),
    "ai-sdk-responses": Program(
        "node", "node/ai_sdk_agent.mjs responses", WITHOUT_THREADS, (*WITHOUT_THREADS, "reasoning")
    ),
    "ag2": Program("agents", "ag2_agent.py", quick=NEW, sends_reasoning=False),
    "anthropic": Program("agents", "anthropic_agent.py", quick=IN_PROCESS),
    "langgraph-agent": Program("agents", "langgraph_agent.py", quick=IN_PROCESS, sends_reasoning=False),
    "langgraph-graph": Program("agents", "langgraph_graph.py", quick=NEW, sends_reasoning=False),
    "litellm": Program("agents", "litellm_agent.py", quick=IN_PROCESS),
    "openai-agents-chat": Program("agents", "openai_agents_agent.py chat", quick=IN_PROCESS, sends_reasoning=False),
    "openai-agents-responses": Program("agents", "openai_agents_agent.py responses", quick=IN_PROCESS),
    "pydantic-ai": Program("agents", "pydantic_ai_agent.py", quick=IN_PROCESS),
    "autogen": Program("autogen", "autogen_agent.py", sends_reasoning=False),
    "crewai": Program("crewai", "crewai_agent.py", sends_reasoning=False),
    "google-adk": Program("google-adk", "google_adk_agent.py"),
    "llama-index": Program("llama-index", "llama_index_agent.py", sends_reasoning=False),
}
DSPY = {
    "auto": Program("agents", "dspy_agent.py auto", quick=("stream", "retry", "native")),
    "litellm": Program("agents", "dspy_agent.py litellm", quick=("whole",)),
}
SMOLAGENTS = Program("agents", "smolagents_agent.py", quick=IN_PROCESS)


def interpreter(environment):
    """Return the path of an interpreter. Skip the test if it is missing, with the command that creates it."""
    if environment == "sh":
        return shutil.which("sh") if shutil.which("curl") else pytest.skip("this test needs curl")
    if environment == "agents":
        return sys.executable
    if environment == "node":
        node = next(filter(None, (shutil.which("node", path=str(ROOT / ".venv/bin")), shutil.which("node"))), None)
        is_complete = node and (FOLDER / "node" / "node_modules" / "ai").exists()
        return node if is_complete else pytest.skip("make test-agents installs the packages of Node")
    python = ROOT / f".venv-agent-{environment}" / "bin" / "python"
    return str(python) if python.exists() else pytest.skip(f"make test-agents-full creates .venv-agent-{environment}")


async def rollout(model, program, form):
    """Run a program as a rollout."""
    if form not in program.quick and not FULL:
        pytest.skip("make test-agents-full runs every form")
    path, *args = program.command.split()
    scenario = {"question": QUESTIONS.get(form, QUESTION), "form": form}
    command = [interpreter(program.environment), str(FOLDER / path), *args]
    return await art.rollout_from(command, env=NO_TELEMETRY)(model, scenario)


@pytest.fixture(scope="module")
def script():
    return Script()


@pytest.fixture(scope="module")
def model(script):
    with served_model(script) as model:
        yield model


def replies(history):
    """Return the texts of the sampled tokens of a history."""
    choices = [entry for entry in history.messages_and_choices if not isinstance(entry, dict)]
    return [bytes(choice.token_ids[:-1]).decode() for choice in choices]


def check_conversation(history, question, call, result):
    """Check a question, the call of a tool, its result and the answer."""
    asked, called, returned, answered = [m for m in history.messages() if m["role"] != "system"]
    expected = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert [m["role"] for m in (asked, called, returned, answered)] == ["user", "assistant", "tool", "assistant"]
    assert question in asked["content"] and result in returned["content"] and answered["content"] == ANSWER
    (function,) = [made["function"] for made in called["tool_calls"]]
    assert (function["name"], json.loads(function["arguments"])) == (expected["name"], expected["arguments"])
    assert expected["name"] in [tool["function"]["name"] for tool in history.tools]
    assert replies(history) == [call, ANSWER]


@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name, program in PROGRAMS.items() for form in program.forms]
)
async def test_a_program_is_recorded(model, script, name, form):
    script.failed.clear()
    calls_before = len(script.calls)
    trajectory = await rollout(model, PROGRAMS[name], form)
    exchanges = trajectory.exchanges.in_order()
    assert trajectory.reward == 1.0
    if form == "two_agents":
        (expert,) = trajectory.additional_histories
        check_conversation(trajectory, EXPERT_QUESTION, ASK, ANSWER)
        check_conversation(expert, QUESTION, CALL, "sunny")
    else:
        assert not trajectory.additional_histories
        check_conversation(trajectory, QUESTIONS.get(form, QUESTION), CALL, "sunny")
    assert len(exchanges) == len(script.calls) - calls_before == (4 if form == "two_agents" else 2)
    assert len(script.failed) == (2 if form == "retry" else 0)  # each request failed once, and is recorded once
    assert bool(exchanges[-1].request.get("stream")) == (form == "stream")
    sampled = [text for history in (trajectory, *trajectory.additional_histories) for text in replies(history)]
    assert sum(row.sampled.sum() for row in trajectory_rows(trajectory)) == sum(len(text) + 1 for text in sampled)


@pytest.mark.parametrize("name", PROGRAMS)
async def test_reasoning_is_part_of_the_next_request(model, name):
    """Some frameworks leave it out. Then the next prompt does not continue the last one, and is another row."""
    trajectory = await rollout(model, PROGRAMS[name], "reasoning")
    first, last = trajectory.exchanges.in_order()
    request = json.dumps(last.request)
    assert trajectory.reward == 1.0 and not trajectory.additional_histories
    assert THOUGHT in json.dumps(first.model_dump(mode="json")["response"])
    assert (THOUGHT in request or "item_reference" in request) == PROGRAMS[name].sends_reasoning


ENGINES = pytest.mark.parametrize("engine", DSPY)


@ENGINES
@pytest.mark.parametrize("form", FORMS)
async def test_every_step_of_dspy_is_a_conversation(model, script, engine, form):
    """DSPy writes tool calls as text, and the earlier steps into the next question."""
    script.failed.clear()
    trajectory = await rollout(model, DSPY[engine], form)
    histories = [trajectory, *trajectory.additional_histories]
    steps = [[m["content"] for m in history.messages()] for history in histories]
    expert = [("weather", '{"city": "Rome"}'), ("finish", "{}"), ("answer", ANSWER)]
    asked = [("ask_expert", json.dumps({"question": QUESTION})), *expert, *expert[1:]]
    expected = asked if form == "two_agents" else expert
    assert trajectory.reward == 1.0 and len(steps) == len(expected) == len(trajectory.exchanges.in_order())
    for (system, question, reply), (name, value), history in zip(steps, expected, histories, strict=True):
        assert "[[ ## question ## ]]" in system and ("Rome" in question)
        assert name in reply and value in reply
        assert replies(history) == [reply]
    assert len(script.failed) == (3 if form == "retry" else 0)
    assert bool(trajectory.exchanges.in_order()[-1].request.get("stream")) == (form == "stream")
    assert len(trajectory_rows(trajectory)) == len(steps)


@ENGINES
async def test_dspy_with_tool_calls_is_one_conversation(model, engine):
    """Its newer agent ends with a call of a tool of its own."""
    trajectory = await rollout(model, DSPY[engine], "native")
    assert trajectory.reward == 1.0 and not trajectory.additional_histories
    roles = [m["role"] for m in trajectory.messages()]
    assert roles == ["system", "user", "assistant", "tool", "user", "assistant"]
    assert replies(trajectory) == [CALL, SUBMIT]


@pytest.mark.parametrize("form", FORMS)
async def test_every_step_of_smolagents_is_a_conversation(model, script, form):
    """It requires a call in every turn, ends with a call of its own tool, and sends earlier calls as text."""
    script.failed.clear()
    trajectory = await rollout(model, SMOLAGENTS, form)
    histories = [trajectory, *trajectory.additional_histories]
    calls = [history.messages()[-1]["tool_calls"][0]["function"] for history in histories]
    called = [(call["name"], json.loads(call["arguments"])) for call in calls]
    expert = [("weather", {"city": "Rome"}), ("final_answer", {"answer": ANSWER})]
    asked = [("ask_expert", {"question": QUESTION}), *expert, expert[-1]]
    assert trajectory.reward == 1.0 and called == (asked if form == "two_agents" else expert)
    assert len(trajectory.exchanges.in_order()) == len(called)
    assert len(script.failed) == (2 if form == "retry" else 0)
    assert bool(trajectory.exchanges.in_order()[-1].request.get("stream")) == (form == "stream")
    assert len(trajectory_rows(trajectory)) == len(called)
