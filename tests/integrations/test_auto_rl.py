"""AutoRL: stages that are stored, a judge that is tested, a pilot without signal, and a blind comparison."""

import json
import math

import pytest

import art_nb as art
from art_nb.core.types import JudgeError, StoreError, TrainError

TASK = "Use many different letters."
pytestmark = pytest.mark.timeout(300)


class Rule:
    """A writer that follows a rule and counts its requests."""

    def __init__(self, **texts):
        self.texts, self.requests = texts, 0

    def __call__(self, messages, schema):
        self.requests += 1
        (name,) = schema["properties"]
        count = schema["properties"][name]["minItems"]
        return {name: self.texts.get(name) or [f"{name} {self.requests}.{i}" for i in range(count)]}


def letters(trajectory):
    return len(set(trajectory.messages()[-1]["content"])) / 40


@pytest.fixture
async def model(local, named):
    registered = named()
    await registered.register(local)
    return registered


def stages(model, writer=None, judge=letters, task=TASK, **options):
    writer = writer or Rule(answers=["abcdefgh", "abc", "a"], prompts=["Use letters."])
    options = {"n": 6, "n_test": 2, "max_completion_tokens": 8} | options
    return art.auto(model, task, judge=judge, writer=writer, **options)


async def test_all_stages_run_once(model):
    writer = Rule(answers=["abcdefgh", "abc", "a"], prompts=["Use letters."])
    result = await stages(model, writer).run(steps=2, rollouts_per_group=4, show=False)
    assert result["step"] == 2 and 0 <= result["preferred"] <= 1 and len(result["replies"]) == 2
    requests, files = writer.requests, {path.name for path in stages(model).files.path.iterdir()}
    assert requests == 3  # inputs, prompt, answers
    assert files >= {"inputs.json", "system_prompt.txt", "calibration.json", "pilot.json", "comparison.json"}
    again = await stages(model, writer).run(steps=2, rollouts_per_group=4, show=False)
    assert again == result and writer.requests == requests
    judgments = (model.store.path / "judgements.jsonl").read_text().splitlines()
    assert len(judgments) >= 2 * 4 * 4


async def test_edited_inputs_are_used(model):
    auto = stages(model)
    inputs = await auto.inputs()
    assert len(inputs.train) == 4 and len(inputs.test) == 2 and not {*inputs.train} & {*inputs.test}
    (auto.files.path / "inputs.json").write_text(json.dumps({"train": ["My own input"], "test": ["Another one"]}))
    assert (await auto.inputs()).train == ["My own input"]
    (auto.files.path / "system_prompt.txt").write_text("Say it in few words.")
    trajectory = await auto.rollout(model, "My own input")
    assert [message["content"] for message in trajectory.messages()[:2]] == ["Say it in few words.", "My own input"]


async def test_a_judge_that_ranks_known_answers_wrong_is_refused(model):
    auto = stages(model, judge=lambda trajectory: -letters(trajectory))
    with pytest.raises(JudgeError, match="another judge or a clearer rubric"):
        await auto.calibrate()
    stored = json.loads((auto.files.path / "calibration.json").read_text())
    assert stored["answers"] == ["abcdefgh", "abc", "a"] and len(stored["scores"]) == 3
    (auto.files.path / "calibration.json").unlink()
    assert math.isclose((await stages(model).calibrate())["scores"][0], 8 / 40)


async def test_a_pilot_without_different_rewards_is_refused(model):
    auto = stages(model, judge=lambda trajectory: 0.5)
    with pytest.raises(TrainError, match="No group of the pilot has different rewards"):
        await auto.pilot(groups=2, rollouts=3)
    assert json.loads((auto.files.path / "pilot.json").read_text())["rewards"] == [[0.5] * 3] * 2


async def test_a_directory_has_one_task(model):
    await stages(model).inputs()
    with pytest.raises(StoreError, match="another task"):
        await stages(model, task="Be brief.").inputs()


async def test_a_writer_that_repeats_itself_is_asked_again_and_then_refused(model):
    with pytest.raises(ValueError, match="wrote 1 of 6 different inputs in 5 replies"):
        await stages(model, Rule(inputs=["Always", "always "])).inputs()
    with pytest.raises(ValueError, match="n_test"):
        stages(model, n=2, n_test=2)


async def test_a_model_writes_in_the_format(model):
    """The tiny model writes nonsense, so the inputs are not different. Its requests are not part of a rollout."""
    with art.Trajectory() as rollout, pytest.raises(ValueError, match="different inputs"):
        await stages(model, writer=model).inputs()
    assert not rollout.exchanges
