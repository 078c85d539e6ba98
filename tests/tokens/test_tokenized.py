"""Token views: exact where choices carry ids, printed by the chat template where they do not."""

import math

import pytest
from openai.types.chat.chat_completion import Choice

import art_nb as art
from art_nb import TokenFlag
from art_nb.models.gguf import CHATML_TURNS
from art_nb.models.tiny import tiny_tokenizer
from art_nb.tokens.chat import ChatFormat
from art_nb.tokens.rows import trajectory_rows

GO, MORE = {"role": "user", "content": "go"}, {"role": "user", "content": "and?"}
EXACT, DRAWN = TokenFlag.EXACT, TokenFlag.EXACT | TokenFlag.SAMPLED | TokenFlag.OUTPUT | TokenFlag.ASSISTANT


def choice(prompt, sampled, finish="stop", logprobs=True):
    told = [-float(token) for token in sampled] if logprobs else None
    return Choice.model_validate(
        {
            "index": 0,
            "finish_reason": finish,
            "message": {"role": "assistant", "content": "b2"},
            "prompt_token_ids": prompt,
            "token_ids": sampled,
            "token_logprobs": told,
        }
    )


def game(**fields):
    return art.Trajectory(
        messages_and_choices=[GO, choice([1, 2], [7, 8]), MORE, choice([1, 2, 7, 8, 4], [9], "length", logprobs=False)],
        **fields,
    )


def test_the_values_are_arts():
    assert [int(flag) for flag in TokenFlag] == [1, 2, 4, 8, 16, 32, 64]


def test_a_game_is_one_sequence():
    t = game(reward=0.5, metrics={"won": True}, metadata={"seed": 1})
    one = t.tokenize(model="ttt")
    (row,) = trajectory_rows(t)
    assert one.tokens == row.tokens.tolist() == [1, 2, 7, 8, 4, 9]
    assert [bool(flag & TokenFlag.SAMPLED) for flag in one.flags] == row.sampled.tolist()
    told = DRAWN | TokenFlag.PROCESSED_LOGPROBS
    assert one.flags == [EXACT, EXACT, told, told | TokenFlag.STOP, EXACT, DRAWN]
    assert one.logprobs[2:4] == [-7, -8]
    assert all(map(math.isnan, one.logprobs[:2] + one.logprobs[4:]))
    assert (one.model, one.trajectory is t, one.reward, one.metrics, one.metadata) == (
        "ttt",
        True,
        0.5,
        {"won": True},
        {"seed": 1},
    )
    one.reward = 2
    assert t.reward == 2.0


def test_several_sequences_are_asked_for():
    t = game()
    t.additional_histories = [art.History(messages_and_choices=[GO, choice([1, 2], [7, 8]), choice([5], [6])])]
    with pytest.raises(ValueError, match="3 sequences of tokens"):
        t.tokenize()
    several = t.tokenize(multi_history=True)
    assert [one.tokens for one in several.histories] == [[1, 2, 7, 8, 4, 9], [1, 2, 7, 8], [5, 6]]
    masks = several.first_occurrence_masks(where=TokenFlag.SAMPLED)
    assert masks == [[False, False, True, True, False, True], [False] * 4, [False, True]]
    assert masks == several.tensorize().first_occurrence_masks(where=TokenFlag.SAMPLED)
    assert several.first_occurrence_masks()[1] == [False] * 4
    assert sum(map(sum, masks)) == sum(row.sampled.sum() for row in trajectory_rows(t))


async def test_tensors_have_their_kinds():
    import torch

    one = game().tensorize(device="cpu")
    assert (one.tokens.dtype, one.logprobs.dtype, one.flags.dtype) == (torch.int64, torch.float32, torch.int32)
    group = art.TrajectoryGroup([game(), game()], metadata={"scenario_id": 3})
    made, single = await art.tensorize([group]), await art.tensorize(game())
    assert torch.equal(made[0].trajectories[1].tokens, single.tokens)
    assert (made[0].metadata, made[0].trajectory_group is group) == ({"scenario_id": 3}, True)
    assert isinstance(await art.tokenize(group), art.TokenizedTrajectoryGroup)
    assert [type(one) for one in await art.tokenize([game(), group])] == [
        art.TokenizedTrajectory,
        art.TokenizedTrajectoryGroup,
    ]


def test_a_conversation_without_ids_is_printed(tiny_model_dir):
    said = {"role": "assistant", "content": "A1 B2"}
    t = art.Trajectory(messages_and_choices=[GO, said, MORE, said])
    with pytest.raises(ValueError, match="Pass `base_model` or `tokenizer`"):
        t.tokenize()
    tokenizer = tiny_tokenizer()
    one = t.tokenize(tokenizer=tokenizer)
    assert tokenizer.decode(one.tokens) == ChatFormat(tokenizer).render(t.messages(), prompt=False).rstrip("\n")
    spoken = [token for token, flag in zip(one.tokens, one.flags, strict=True) if flag & TokenFlag.ASSISTANT]
    assert tokenizer.decode(spoken) == "A1 B2<|im_end|>" * 2
    assert not any(flag & (EXACT | TokenFlag.SAMPLED) for flag in one.flags)
    assert t.tokenize(base_model=str(tiny_model_dir)).tokens == one.tokens
    assert art.get_tokenizer(str(tiny_model_dir))("go")["input_ids"] == tokenizer("go")["input_ids"]
    asked = art.Trajectory(messages_and_choices=[GO]).tokenize(tokenizer=tokenizer)
    assert tokenizer.decode(asked.tokens) == ChatFormat(tokenizer).render([GO])


async def test_a_template_of_ones_own_prints_it():
    t = art.Trajectory(messages_and_choices=[GO, {"role": "assistant", "content": "A1"}])
    tokenizer, template = tiny_tokenizer(), "{{ mark | default('-') }}" + CHATML_TURNS
    usual = tokenizer.decode(t.tokenize(tokenizer=tokenizer).tokens)
    for more, mark in (({}, "-"), ({"chat_template_kwargs": {"mark": "!"}}, "!")):
        how = {"tokenizer": tokenizer, "chat_template": template} | more
        one, group = t.tokenize(**how), await art.tokenize(art.TrajectoryGroup([t]), **how)
        assert tokenizer.decode(one.tokens) == mark + usual
        assert group.trajectories[0].tokens == one.tokens


def test_choices_of_one_model_are_selected():
    def exchange(model, prompt):
        reply = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": model,
            "choices": [choice(prompt, [7]).model_dump()],
        }
        return {
            "request": {"model": model, "messages": [{"role": "user", "content": model}]},
            "response": reply,
            "start_time": "2026-01-01T00:00:00Z",
            "end_time": "2026-01-01T00:00:01Z",
        }

    t = art.Trajectory.model_validate({"exchanges": {"chat_completions": [exchange("a@1", [1]), exchange("b", [2])]}})
    assert (t.tokenize(model="a@*").tokens, t.tokenize(model="a@*").model) == ([1, 7], "a@1")
    assert [one.model for one in t.tokenize(multi_history=True).histories] == ["a@1", "b"]
