"""An agent in four forms: LangChain, Node, curl and the OpenAI client. Training gets the same rows.

The forms without LangChain also run in `make test`. The sampler of the first test follows a script, which calls both
tools. The replies of the second test are sampled with seeds, from the embedded model after a short warm-up.
"""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from support.agent_parts import served_model
from support.server_parts import Scripted

import art_nb as art
from art_nb.tokens.rows import trajectory_rows

pytestmark = pytest.mark.timeout(900)
FORMS = pytest.mark.parametrize("form", ["langchain", "node", "curl"])
PRICE = '<tool_call>\n{"name": "price", "arguments": {"item": "rice"}}\n</tool_call>'
STOCK = '<tool_call>\n{"name": "stock", "arguments": {"item": "rice"}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "weight", "arguments": {"item": ["rice"]}}\n</tool_call>'
ANSWER = "12 euros,\n7 left, \\"  # shells and JSON must not change these characters
FOLDER = Path(__file__).parent / "programs" / "shop"
SHOP = {"rice": {"price": "12 euros", "stock": "7 left"}}
TASK = {"question": "How much is the rice?", "shop": SHOP, "facts": ["12 euros", "7 left"]}


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
    sys.path.append(str(FOLDER))
    import shop

    yield shop
    sys.path.remove(str(FOLDER))


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
    script = "agent.mjs" if form == "node" else "agent.sh"
    return art.rollout_from([found[0], str(FOLDER / script)], reward=lambda _, task, out: shop.score(out.stdout, task))


@pytest.fixture(scope="module")
def scripted():
    with served_model(Script()) as model:
        yield model


def rows_of(trajectory):
    return [(row.tokens.tolist(), row.sampled.tolist()) for row in trajectory_rows(trajectory)]


@FORMS
async def test_an_agent_calls_both_tools_and_gets_its_reward(scripted, shop, agent):
    trajectory, expected = await agent(scripted, TASK), await shop.rollout(scripted, TASK)
    assert trajectory.reward == expected.reward == 1.0 and trajectory.metrics["right"]
    contents = [message["content"] for message in trajectory.messages()]
    assert contents == [shop.SYSTEM, TASK["question"], "", "12 euros", "", "7 left", ANSWER]
    assert trajectory.tools == expected.tools == shop.TOOLS
    assert rows_of(trajectory) == rows_of(expected)
    assert not trajectory.additional_histories


@FORMS
async def test_an_agent_that_only_makes_invalid_calls_has_no_reward(scripted, shop, agent):
    task = TASK | {"question": "Loop?"}
    trajectory, expected = await agent(scripted, task), await shop.rollout(scripted, task)
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


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@FORMS
async def test_seeds_give_the_rows_of_the_openai_client(warmed_up, shop, agent):
    tasks = [shop.task(seed) | {"seed": seed} for seed in (1, 2)]
    rows = [rows_of(await agent(warmed_up, task)) for task in tasks]
    assert rows == [rows_of(await shop.rollout(warmed_up, task)) for task in tasks]
    assert [len(one) for one in rows] == [1, 1]  # a conversation is one row
    turns = [np.diff(sampled, prepend=False, append=False).sum() / 2 for ((_, sampled),) in rows]
    assert max(turns) > 1  # with a call and the result of a tool


def test_the_reward_counts_right_needless_and_missing_facts(shop):
    score = lambda answer: shop.score(answer, TASK)["reward"]
    assert score(ANSWER) == score("It costs 12 euros. There are 7 left.") == 1.0
    assert score("12 euros") == 0.5 and score("12 euros, 8 left") == pytest.approx(1 / 3)
    assert score("7 euros, 12 left") == score("") == score("I do not know.") == 0.0


def test_test_tasks_have_items_of_their_own(shop):
    assert not {*shop.ITEMS} & {*shop.UNSEEN_ITEMS}
    tasks = [shop.task(seed, shop.UNSEEN_ITEMS) for seed in range(900_000, 900_080)]
    assert {len(task["facts"]) for task in tasks} == {1, 2}
    assert all(task["question"].count(next(iter(task["shop"]))) == 1 for task in tasks)
    assert not {task["question"] for task in tasks} & {shop.task(seed)["question"] for seed in range(1000)}
