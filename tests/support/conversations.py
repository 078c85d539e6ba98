"""Choices and conversations as models give them, made from a text or at random."""

import numpy as np
from openai.types.chat.chat_completion import Choice

from art_nb.rollouts.trajectories import History, Trajectory, TrajectoryGroup


def say(text, ids=None, finish="stop", **message):
    """A choice of the model, with the tokens of its letters where asked."""
    data = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text, **message}}
    if ids is None:
        return Choice.model_validate(data)
    content = [
        {"token": c, "bytes": list(c.encode("utf-8", "replace")), "logprob": -0.5, "top_logprobs": []} for c in text
    ]
    extra = {"prompt_token_ids": [1, *range(ids)], "token_ids": [*map(ord, text)]}
    return Choice.model_validate(data | {"logprobs": {"content": content}} | extra)


def make_choice(rng, before=(), tokens=True, logprobs=True, named=False):
    ids = [rng.randrange(150_000) for _ in range(rng.randrange(0, 12))]
    prompt = [*before, *(rng.randrange(150_000) for _ in range(rng.randrange(0, 9)))]
    texts = [rng.choice(["a", " the", "é", "\ufffd", "", "日本", "🙂"]) for _ in ids]

    def cell(text):
        raw = rng.choice([None, list(text.encode()), [0xF0, 0x9F]])
        return {"token": text, "bytes": raw, "logprob": float(np.float16(-rng.random() * 20))}

    content = [
        cell(f"token_id:{token_id}" if named else text) | {"top_logprobs": [cell(" x")] * rng.randrange(3)}
        for token_id, text in zip(ids, texts, strict=True)
    ]
    calls = [{"id": "c1", "type": "function", "function": {"name": "move", "arguments": "{}"}}]
    message = {"role": "assistant", "content": rng.choice([None, "".join(texts)])}
    message["tool_calls"] = rng.choice([None, calls])
    data = {"finish_reason": "stop", "index": 0, "message": message, "logprobs": None}
    if logprobs:
        data["logprobs"] = {"content": content, "refusal": None}
    extra = {"prompt_token_ids": prompt, "token_ids": ids} if tokens else {}
    return Choice.model_validate(data | extra), prompt + ids


def make_conversation(rng):
    entries, before = [], []
    for _ in range(rng.randrange(5)):
        parts = [{"type": "text", "text": "hm"}]
        entries.append({"role": "user", "content": rng.choice(["go", "weiter, bitte: ß", parts])})
        flags = {"tokens": rng.random() < 0.8, "logprobs": rng.random() < 0.8, "named": rng.random() < 0.5}
        choice, seen = make_choice(rng, before if rng.random() < 0.8 else before[:3], **flags)
        entries.append(choice)
        before = seen if flags["tokens"] else before
    return entries


def make_groups(rng):
    def trajectory():
        further = [History(messages_and_choices=make_conversation(rng)) for _ in range(rng.randrange(2))]
        return Trajectory(
            messages_and_choices=make_conversation(rng),
            reward=rng.random(),
            metrics={"won": True, "n": 3, "f": 0.5},
            additional_histories=further,
            metadata={"seed": 7, "deep": {"a": [1, None]}},
            logs=["ein Log: ü"],
            tools=[{"type": "function"}],
        )

    sizes = [rng.randrange(4) for _ in range(4)]
    groups = [TrajectoryGroup([trajectory() for _ in range(size)], metrics={"m": 1.5}) for size in sizes]
    return [*groups, TrajectoryGroup(exceptions=[ValueError("boom")], logs=["gone"])]
