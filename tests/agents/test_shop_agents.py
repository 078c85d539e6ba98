"""An agent in four forms: LangChain, Node, curl and the OpenAI client. Training gets the same rows.

The task and the program of Node are those of the tutorials examples/langgraph and examples/node_agent. The sampler of
the first tests follows a script, which calls both tools. The other replies are sampled with seeds, from the embedded
model after a short warm-up.
"""

import shutil
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from support.agent_parts import served_model
from support.jupyter_kernels import run_notebook, shorten_tutorial
from support.server_parts import Scripted

import art_nb as art
from art_nb.core.seeds import SeedScope, StepSeeds, seed_scope
from art_nb.reports.static_html import static_html
from art_nb.rollouts.http_capture import install
from art_nb.tokens.rows import trajectory_rows
from art_nb.training.steps import endpoint_matcher

pytestmark = pytest.mark.timeout(900)
FORMS = pytest.mark.parametrize("form", ["langchain", "node", "curl"])
PRICE = '<tool_call>\n{"name": "price", "arguments": {"item": "rice"}}\n</tool_call>'
STOCK = '<tool_call>\n{"name": "stock", "arguments": {"item": "rice"}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "weight", "arguments": {"item": ["rice"]}}\n</tool_call>'
ANSWER = "It costs\n12 euros, \\"  # shells and JSON must not change these characters
FOLDER = Path(__file__).parent / "programs" / "shop"
EXAMPLES = Path(__file__).parents[2] / "examples"
SHOP = {"rice": {"price": "12 euros", "stock": "7 left"}}
TASK = {"question": "How much is the rice?", "shop": SHOP, "tool": "price", "fact": "12 euros"}


class Script(Scripted):
    """A sampler that calls both tools and answers. The question "Loop?" gets invalid calls without an end.

    Its tokens are bytes, so the limit of the agents is too low for it.
    """

    async def generate(self, prompt_ids, params, adapter):
        prompt = bytes(prompt_ids)
        self.words = WRONG if b"Loop?" in prompt else (PRICE, STOCK, ANSWER)[prompt.count(b"<tool>")]
        async for token in super().generate(prompt_ids, replace(params, max_tokens=500), adapter):
            yield token


@pytest.fixture(scope="module")
def shop():
    folders = [str(FOLDER), str(EXAMPLES / "langgraph")]
    sys.path += folders
    import shop

    yield shop
    for folder in folders:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def client_rollout(shop):
    from client_agent import rollout

    return rollout


@pytest.fixture
def agent(form, root, shop):
    """Return the rollout of a form. Skip the test if its program or package is missing."""
    if form == "langchain":
        pytest.importorskip("langchain_openai", reason="make test-agents installs the frameworks")
        from langchain_agent import rollout

        return rollout
    programs = {"node": ["node"], "curl": ["sh", "curl", "jq"]}[form]
    path = f"{root / '.venv' / 'bin'}:{sys.exec_prefix}/bin"
    found = [shutil.which(program, path=path) or shutil.which(program) for program in programs]
    if None in found:
        pytest.skip(f"this test needs {', '.join(programs)}")
    script = EXAMPLES / "node_agent" / "agent.mjs" if form == "node" else FOLDER / "agent.sh"
    return art.rollout_from([found[0], str(script)], reward=lambda _, task, output: shop.score(output.stdout, task))


@pytest.fixture(scope="module")
def scripted():
    with served_model(Script()) as model:
        yield model


def rows_of(trajectory):
    return [(row.tokens.tolist(), row.sampled.tolist()) for row in trajectory_rows(trajectory)]


@FORMS
async def test_an_agent_calls_both_tools_and_gets_its_reward(scripted, shop, agent, client_rollout):
    trajectory, expected = await agent(scripted, TASK), await client_rollout(scripted, TASK)
    assert trajectory.reward == expected.reward == 0.5  # the answer contains more than the fact
    contents = [message["content"] for message in trajectory.messages()]
    assert contents == [shop.SYSTEM, TASK["question"], "", "12 euros", "", "7 left", ANSWER]
    assert trajectory.tools == expected.tools == shop.TOOLS
    assert rows_of(trajectory) == rows_of(expected)
    assert not trajectory.additional_histories
    page = static_html([art.TrajectoryGroup([trajectory])])  # the static form of the viewer
    assert all(text in page for text in ("price", "stock", "rice", "12 euros", "7 left"))


@FORMS
async def test_an_agent_that_only_makes_invalid_calls_has_no_reward(scripted, agent, client_rollout):
    task = TASK | {"question": "Loop?"}
    trajectory, expected = await agent(scripted, task), await client_rollout(scripted, task)
    assert trajectory.reward == expected.reward == 0.0 and not trajectory.metrics["right"]
    sampled = [sum(sum(sampled) for _, sampled in rows_of(one)) for one in (trajectory, expected)]
    assert sampled == [3 * (len(WRONG) + 1)] * 2  # three replies


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def warmed_up(shop, smollm2_dir, tmp_path_factory):
    """The embedded model after a few examples: it makes calls, often wrong ones."""
    model = art.TrainableModel(name="clerk", project="tests", base_model=str(smollm2_dir))
    async with art.LocalBackend(path=tmp_path_factory.mktemp("runs"), verbose=False) as backend:
        await model.register(backend)
        config = art.TrainSFTConfig(learning_rate=2e-3, batch_size=2)
        await model.train_sft([shop.example(seed) for seed in range(16)], config)
        yield model


@contextmanager
def seeded(model, seed):
    """Give each request of a rollout a seed, as `art.train` does."""
    install()
    with seed_scope(SeedScope(StepSeeds(seed, 0, endpoint_matcher(model)))):
        yield


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@FORMS
async def test_seeds_give_the_rows_of_the_openai_client(warmed_up, shop, agent, client_rollout):
    rows, expected = [], []
    for seed in (1, 2):
        with seeded(warmed_up, seed):
            rows.append(rows_of(await agent(warmed_up, shop.new_task(seed))))
        with seeded(warmed_up, seed):
            expected.append(rows_of(await client_rollout(warmed_up, shop.new_task(seed))))
    assert rows == expected
    assert [len(one) for one in rows] == [1, 1]  # a conversation is one row
    turns = [np.diff(sampled, prepend=False, append=False).sum() / 2 for ((_, sampled),) in rows]
    assert max(turns) > 1  # with a call and the result of a tool


def test_the_reward_requires_the_right_fact_and_no_other(shop):
    score = lambda answer: shop.score(answer, TASK)["reward"]
    assert score("12 euros") == score("12 euros\n") == 1.0
    assert score(ANSWER) == score("The price is 12 euros.") == 0.5
    assert score("12 euros, 7 left") == score("7 left") == score("") == score("I do not know.") == 0.0


def test_test_tasks_have_items_of_their_own(shop):
    assert not {*shop.ITEMS} & {*shop.UNSEEN_ITEMS}
    tasks = [shop.new_task(seed, shop.UNSEEN_ITEMS) for seed in range(900_000, 900_080)]
    assert {task["tool"] for task in tasks} == {*shop.QUESTIONS}
    assert all(task["question"].count(next(iter(task["shop"]))) == 1 for task in tasks)
    assert not {task["question"] for task in tasks} & {shop.new_task(seed)["question"] for seed in range(2000)}


def test_a_third_of_the_warm_up_has_the_wrong_tool(shop):
    examples = [shop.example(number).messages() for number in range(90)]
    asked = [shop.new_task(number // 3) for number in range(90)]
    called = [messages[2]["tool_calls"][0]["function"]["name"] for messages in examples]
    assert sum(tool == task["tool"] for tool, task in zip(called, asked, strict=True)) == 60
    assert all(messages[1]["content"] == task["question"] for messages, task in zip(examples, asked, strict=True))


@pytest.mark.slow
def test_the_tutorial_of_langgraph_runs_from_top_to_bottom(tmp_path, smollm2_dir, monkeypatch):
    pytest.importorskip("langchain_openai", reason="make test-agents installs the frameworks")
    monkeypatch.setenv("EXAMPLE_STEPS", "1")
    folder = shutil.copytree(EXAMPLES / "langgraph", tmp_path / "langgraph", ignore=shutil.ignore_patterns(".art"))
    run_notebook(shorten_tutorial(folder / "langgraph.ipynb"), folder)
    assert (folder / ".art" / "langgraph" / "models" / "clerk-001" / "checkpoints" / "0002").is_dir()
