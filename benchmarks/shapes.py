"""Synthetic tokens, rows and conversations, which both sides create identically from a seed."""

import random

WORDS = """the of and to in is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so up said what its about
than into them can only other time new some could these two may first then do any like my now over such our""".split()
SYSTEM = "You answer."
TEMPLATE = 20  # tokens of the chat template and the fixed words in a first prompt
TURN = 14  # the same between two replies


def ids(seed: int, n: int) -> list[int]:
    """Return random token IDs."""
    return random.Random(seed).choices(range(100, 40_000), k=n)


def words(seed: int, n: int) -> str:
    """Return `n` random words of one token each."""
    return "".join(" " + word for word in random.Random(seed).choices(WORDS, k=n))


def opening(seed: int, tokens: int) -> list[dict]:
    """Return the messages of a first prompt with this number of tokens."""
    text = "Go on:" + words(seed, tokens - TEMPLATE)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def between(seed: int, tokens: int) -> dict:
    """Return a user message that adds this number of tokens between two replies."""
    return {"role": "user", "content": "Go on:" + words(seed, tokens - TURN)}


def rows(
    groups: int, size: int, prompt: int, new: int, turns: int = 1, gap: int = 0, shared: bool = True, seed: int = 0
) -> list[dict]:
    """Return token rows.

    A row is a prompt, followed by `turns` sampled parts with gaps between them. The rows of a group
    share their prompt if `shared`.
    """
    token_rows, rng = [], random.Random(seed)
    for group in range(groups):
        first = ids(rng.getrandbits(32), prompt)
        for _ in range(size):
            random_ids = ids(rng.getrandbits(32), prompt + turns * new + (turns - 1) * gap)
            tokens = first + random_ids[prompt:] if shared else random_ids
            sampled = [False] * prompt + ([True] * new + [False] * gap) * turns
            token_rows.append({"group": group, "tokens": tokens, "sampled": sampled[: len(tokens)]})
    return token_rows


def packed(token_rows: list[dict], share: bool = True) -> dict[str, int]:
    """Count the tokens, attention pairs and trained tokens that a learner must compute.

    Common prefixes count once if `share`.
    """
    counts, previous = {"tokens": 0, "pairs": 0, "trained": 0}, None
    for row in sorted(token_rows, key=lambda row: (row["group"], row["tokens"])):
        tokens = row["tokens"]
        previous_tokens = previous["tokens"] if share and previous and previous["group"] == row["group"] else []
        start = next(
            (i for i, (a, b) in enumerate(zip(tokens, previous_tokens)) if a != b),
            min(len(tokens), len(previous_tokens)),
        )
        counts["tokens"] += len(tokens) - start
        counts["pairs"] += sum(range(start + 1, len(tokens) + 1))
        counts["trained"] += sum(row["sampled"][start:])
        previous = row
    return counts
