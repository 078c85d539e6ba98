"""`art.environments.reasoning_gym` with all datasets, extracted answers, parallel rollouts, and a short run."""

import asyncio
import json
import random
import re

import numpy as np
import pytest
from support.scripted_policies import policy

import art_nb as art
from art_nb.integrations.environments import RandomStream
from art_nb.integrations.reasoning_tasks import _score, _task, tagged_answer

pytest.importorskip("reasoning_gym", reason="make test-environments installs the packages")
from reasoning_gym.factory import DATASETS, create_dataset

pytestmark = pytest.mark.timeout(300)
NAMES = sorted({*DATASETS} - {"composite"})
# Their tasks have many solutions. Three contain an example of one in their metadata, and two contain none.
EXAMPLES = {
    "graph_color": lambda metadata: json.dumps(metadata["possible_answer"]),
    "propositional_logic": lambda metadata: metadata["example_answer"],
    "rubiks_cube": lambda metadata: metadata["example_correct_answer"],
}
WITHOUT_ANSWER = {"boxnet", "rush_hour"}


def sum_of(prompt):
    """Return a policy's answer to the last sum in a prompt."""
    *_, question = re.findall(r"<user>(.*?)<assistant>", prompt, re.DOTALL)
    terms = re.findall(r"[-+]?\d+", re.sub(r"[^-+\d]", "", question))
    return f"Let me see. <answer>{sum(map(int, terms))}</answer>"


def test_there_are_105_datasets():
    assert len(NAMES) == 105


@pytest.mark.parametrize("name", NAMES)
def test_every_dataset_gives_scenarios_and_scores_its_answer(name):
    environment = art.environments.reasoning_gym(name, size=3, seed=5)
    assert environment.scenarios == [{"dataset": name, "seed": 5, "index": i} for i in range(3)]
    dataset = create_dataset(name, size=3, seed=5)
    task, again = (_task(dataset, environment.scenarios[1]) for _ in range(2))
    assert task["question"] == again["question"] and task["answer"] == again["answer"]
    if name in WITHOUT_ANSWER:
        assert task["answer"] is None
        assert _score(dataset, "I do not know.", task)[0] < 1.0
    else:
        answer = EXAMPLES[name](task["metadata"]) if name in EXAMPLES else task["answer"]
        reward, metrics, logs = _score(dataset, tagged_answer(f"Well. <answer>{answer}</answer>"), task)
        assert (reward, metrics["solved"], logs) == (1.0, True, [])


@pytest.mark.parametrize("name", NAMES)
def test_no_answer_raises_an_error(name):
    dataset = create_dataset(name, size=1, seed=1)
    task = _task(dataset, {"seed": 1, "index": 0})
    for answer in (None, "", "x" * 50, "1/0", "[[[", "{", "nan", "1e999", "None", "a b\n1 2", "[1, 2]", "٣"):
        reward, metrics, _ = _score(dataset, answer, task)
        assert 0.0 <= reward <= 1.0
        assert metrics["answered"] == (answer is not None)


def test_global_random_numbers_stay_as_they_are():
    dataset = create_dataset("pool_matrix", size=4, seed=1)
    before, arrays = random.getstate(), np.random.get_state()[1].tolist()
    tasks = [_task(dataset, {"seed": 1, "index": i}) for i in (0, 1, 0)]
    assert tasks[0]["question"] == tasks[2]["question"] != tasks[1]["question"]
    assert random.getstate() == before and np.random.get_state()[1].tolist() == arrays


def test_tasks_with_global_random_numbers_are_equal_in_every_thread():
    """`list_functions` draws from the global generator, also while other threads use it."""
    dataset = create_dataset("list_functions", size=2, seed=3)

    async def questions():
        return await asyncio.gather(
            *(asyncio.to_thread(lambda: _task(dataset, {"seed": 3, "index": 1})["question"]) for _ in range(16))
        )

    assert len({*asyncio.run(questions())}) == 1


async def test_a_rollout_scores_the_answer_of_the_model():
    environment = art.environments.reasoning_gym("chain_sum", 8, 2, min_terms=2, max_terms=2, max_digits=2)
    assert environment.scenarios[0]["difficulty"] == {"min_terms": 2, "max_terms": 2, "max_digits": 2}
    with policy(sum_of) as model:
        trajectories = await asyncio.gather(*(environment.rollout(model, s) for s in environment.scenarios))
    for trajectory in trajectories:
        assert trajectory.reward == 1.0 and trajectory.metrics["solved"]
        assert trajectory.messages()[0]["role"] == "system" and trajectory.messages_and_choices[2].token_ids
        assert trajectory.metadata["difficulty"]["num_terms"]
    with policy(lambda prompt: "It is 7.") as model:
        trajectory = await environment.rollout(model, environment.scenarios[0])
    assert trajectory.reward == 0.0 and not trajectory.metrics["answered"]
    assert trajectory.logs == ["The reply contains no answer in the expected format."]


async def test_an_answer_is_extracted_by_a_function():
    environment = art.environments.reasoning_gym("coin_flip", 2, extract=str.strip, system=None)
    with policy(lambda prompt: " 0.5 ") as model:
        trajectory = await environment.rollout(model, environment.scenarios[0])
    assert trajectory.metrics["answered"] and trajectory.messages()[0]["role"] == "user"


async def test_an_answer_that_cannot_be_scored_gets_nothing():
    class Broken:
        def score_answer(self, answer, task):
            raise ZeroDivisionError(answer)

    reward, metrics, logs = _score(Broken(), "7", {})
    assert (reward, metrics["score_error"], metrics["solved"]) == (0.0, True, False)
    assert logs == ["The answer could not be scored: ZeroDivisionError: 7"]


def test_unknown_names_and_options_are_errors():
    with pytest.raises(ValueError, match="no dataset 'chain_sums'. Did you mean 'chain_sum'"):
        art.environments.reasoning_gym("chain_sums")
    with pytest.raises(ValueError, match="no option 'min_term'. Did you mean 'min_terms'"):
        art.environments.reasoning_gym("chain_sum", min_term=2)
    with pytest.raises(ValueError, match="size=0"):
        art.environments.reasoning_gym("chain_sum", size=0)


def test_a_stream_can_be_repeated():
    stream = RandomStream(1)
    with stream.active(keep=False):
        first = random.random()
    assert stream.call(random.random) == first != stream.call(random.random)


async def test_a_run_trains_on_a_dataset(local, named):
    """Two steps with the tiny model, whose replies are random text: the reward is the number of different letters."""
    environment = art.environments.reasoning_gym(
        "letter_counting", 8, extract=str.strip, system=None, sampling={"max_completion_tokens": 6}
    )

    async def rollout(model, scenario):
        trajectory = await environment.rollout(model, scenario)
        trajectory.reward += len({*trajectory.messages()[-1]["content"]})
        return trajectory

    model = named()
    await model.register(local)
    run = art.train(model, rollout, environment.scenarios, steps=2, groups_per_step=2, rollouts_per_group=4, show=False)
    await run
    assert await model.get_step() == 2
