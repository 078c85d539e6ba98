"""Groups that ART and we both read, and a way to ask ART (`make test-art`)."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import art_nb as art

STOP = 2  # <|im_end|> of the tiny tokenizer
WORDS = ["A1", "B2 C3", "free: A1", "the move is", "<move>B2</move>", "grüß 🙂 日本", "C1 A2"]


def ask_art(task, folder):
    """Run a task of art_side.py in a process of its own."""
    env = {name: value for name, value in os.environ.items() if name not in ("WANDB_API_KEY", "PYTHONPATH")}
    script = Path(__file__).with_name("art_side.py")
    done = subprocess.run(
        [sys.executable, str(script), task, str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=env | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]


def told_groups(folder, groups):
    """Hand the groups over."""
    (folder / "groups.json").write_text(json.dumps(groups))


def choice(rng, tokenizer, prompt, known=True):
    """A reply as ART's server gives it, with our token ids; and all ids up to its end."""
    text = " ".join([*rng.choices(WORDS, k=rng.randint(1, 3)), str(rng.randrange(10_000))])
    ids = [*tokenizer.encode(text, add_special_tokens=False), STOP]
    entries = [
        {
            "token": f"token_id:{i}",
            "bytes": None,
            "top_logprobs": [],
            "logprob": -4 * rng.random() if known else float("nan"),
        }
        for i in ids
    ]
    told = {
        "finish_reason": "stop",
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "logprobs": {"content": entries, "refusal": None},
        "prompt_token_ids": prompt,
        "token_ids": ids,
    }
    return told, prompt + ids


def conversation(rng, tokenizer, turns, first):
    """So many turns; each prompt is what was there before, and the next question."""
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    entries, before = [], []
    for turn in range(turns):
        question = first if not turn else rng.choice(WORDS)
        start = "\n" if turn else ""
        prompt = before + encode(f"{start}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        reply, before = choice(rng, tokenizer, prompt, known=rng.random() < 0.8)
        entries += [{"role": "user", "content": question}, reply]
    return entries


def some_groups(tokenizer, seed=0):
    """Three groups that train and one that cannot, of one to three turns, some with a second history."""
    rng, groups = random.Random(seed), []
    for g in range(4):
        first, members = f"free: A1 B{g}", []
        for i in range(4):
            further = [{"messages_and_choices": conversation(rng, tokenizer, 1, f"and C{g}{i}")}] if i == 3 else []
            members.append(
                {
                    "messages_and_choices": conversation(rng, tokenizer, 1 + (i + g) % 3, first),
                    "additional_histories": further,
                    "reward": 1.0 if g == 3 else round(rng.random(), 3),
                }
            )
        groups.append({"trajectories": members})
    return groups


def as_ours(groups):
    """The same as TrajectoryGroup."""
    return [
        art.TrajectoryGroup([art.Trajectory.model_validate(one) for one in told["trajectories"]]) for told in groups
    ]
