"""Which replies are trained, with which ratio, and what the KL is measured from."""

import numpy as np
import pytest
from openai.types.chat.chat_completion import Choice
from support.registered import QUESTION, a_group, ask

import art_nb as art
from art_nb.core.events import Warned
from art_nb.core.types import TrainSFTConfig
from art_nb.learners.checkpoints import first_policy
from art_nb.tokens.learner_records import turn_spans
from art_nb.tokens.rows import trajectory_rows


@pytest.fixture
async def model(local, tiny_model_dir):
    made = art.TrainableModel(name="ttt", project="tests", base_model=str(tiny_model_dir))
    await made.register(local)
    return made


def reply(prompt, tokens, **extra):
    return Choice.model_validate(
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "x"},
            "prompt_token_ids": prompt,
            "token_ids": tokens,
        }
        | extra
    )


def histories(*lists):
    return art.Trajectory(
        messages_and_choices=lists[0],
        additional_histories=[art.History(messages_and_choices=entries) for entries in lists[1:]],
    )


def trained(trajectory):
    rows = trajectory_rows(trajectory)
    assert sum(int(row.sampled.sum()) for row in rows) == max(span.stop for span in turn_spans(trajectory).values())
    return [row.tokens[row.sampled].tolist() for row in rows]


@pytest.mark.parametrize("extra", [{}, {"sample_id": None}], ids=["none", "null"])
def test_equal_independent_samples_all_count(extra):
    votes = histories(*([reply([1, 2], tokens, **extra)] for tokens in ([7, 2], [7, 2], [8, 2], [7, 2])))
    assert trained(votes) == [[7, 2], [7, 2], [8, 2], [7, 2]]
    named = histories(*([reply([1, 2], [7, 2], sample_id=name)] for name in "abca"))
    assert trained(named) == [[7, 2]] * 3  # a and a are one sample


def test_a_shared_turn_is_known_by_its_sample_also_after_a_copy():
    first = reply([1], [7], sample_id="a")
    for shared in (first, reply([1], [7], sample_id="a")):
        assert trained(histories([first, reply([1, 7, 2], [8])], [shared, reply([1, 7, 3], [9])])) == [[7, 8], [9]]
    old = reply([1], [7])  # of a run that gave no ids
    assert trained(histories([old, reply([1, 7, 2], [8])], [reply([1], [7]), reply([1, 7, 3], [9])])) == [[7, 8], [9]]


async def test_the_endpoint_names_each_sample(model):
    client = model.openai_client()
    told = await client.chat.completions.create(model=model.get_inference_name(), messages=QUESTION, max_tokens=4, n=3)
    assert len({choice.model_extra["sample_id"] for choice in told.choices}) == 3
    again = [await ask(model, seed=7) for _ in range(2)] + [await ask(model, seed=8)]
    assert len({choice.model_extra["sample_id"] for choice in again}) == 2  # one draw, repeated; and another


async def step_of(model, local, group, **options):
    heard = []
    forget = local.bus.subscribe(lambda event: heard.append(event.message), Warned)
    result = await local.train(model, [group], learning_rate=0.0, **options)
    forget()
    return result.metrics, " ".join(heard)


def sampled(group, i):
    return next(entry for entry in group.trajectories[i].messages_and_choices if isinstance(entry, Choice))


@pytest.mark.parametrize("how", [{"cut": True}, {"temperature": 0.5}], ids=str)
async def test_a_reply_sampled_in_another_way_loses_its_ratio_alone(model, local, how):
    group = await a_group(model)
    group.trajectories[2].reward += 0.37  # no reward is the mean
    sampled(group, 0).model_extra.update(how)
    metrics, heard = await step_of(model, local, group)
    tokens = [len(row.tokens[row.sampled]) for t in group for row in trajectory_rows(t)]
    assert metrics["offpolicy/unknown_logprobs"] == pytest.approx(tokens[0] / sum(tokens))
    assert "All other replies keep their ratio" in heard
    metrics, _ = await step_of(model, local, await a_group(model, 3))
    assert metrics["offpolicy/unknown_logprobs"] == 0


async def test_greedy_replies_are_reported_and_not_trained(model, local):
    group = await a_group(model)
    group.trajectories[2].reward += 0.37
    client = model.openai_client()
    told = await client.chat.completions.create(
        model=model.get_inference_name(), messages=QUESTION, max_tokens=4, temperature=0, logprobs=True
    )
    assert told.choices[0].model_extra["temperature"] == 0
    group.trajectories[0].messages_and_choices[1] = told.choices[0]
    metrics, heard = await step_of(model, local, group)
    tokens = [len(row.tokens[row.sampled]) for t in group for row in trajectory_rows(t)]
    assert len(tokens) == len(group) - 1
    assert metrics["data/step_trainable_assistant_tokens"] == sum(tokens)
    assert (metrics["data/step_num_greedy_replies"], metrics["offpolicy/unknown_logprobs"]) == (1, 0)
    assert "1 replies were sampled at temperature 0" in heard
    for i in range(len(group)):
        sampled(group, i).model_extra["temperature"] = 0.0
    metrics, heard = await step_of(model, local, group)
    assert metrics["data/step_num_gradient_steps"] == 0
    assert "all greedy" in heard


async def test_the_kl_is_measured_from_where_reinforcement_learning_began(model, local, tiny_model_dir):
    assert first_policy(model.store) is None
    talk = art.Trajectory(messages_and_choices=[*QUESTION, {"role": "assistant", "content": "b2"}])
    await model.train_sft([talk] * 2, TrainSFTConfig(learning_rate=2e-2, batch_size=2))
    assert first_policy(model.store) == 1
    warm, _ = await step_of(model, local, await a_group(model), kl_coef=0.1)
    base, _ = await step_of(model, local, await a_group(model), kl_coef=0.1, kl_reference="base")
    assert warm["loss/kl_policy_ref"] == pytest.approx(0, abs=1e-6)
    assert base["loss/kl_policy_ref"] > 1e-4
    await model.train_sft([talk] * 2, TrainSFTConfig(learning_rate=2e-2, batch_size=2))
    assert first_policy(model.store) == 1  # the warm-up, not a later supervised pass
    await model.delete_checkpoints()
    assert first_policy(model.store) == 1  # never pruned
    other = art.TrainableModel(name="other", project="tests", base_model=str(model.store.checkpoint_dir(1)))
    await other.register(local)
    assert first_policy(other.store) == 0
    begun, _ = await step_of(other, local, await a_group(other), kl_shaping=0.1)
    assert begun["loss/kl_policy_ref"] == pytest.approx(0, abs=1e-6)
    moved, _ = await step_of(other, local, await a_group(other), kl_coef=0.1)
    assert np.isfinite(moved["loss/kl_policy_ref"])
