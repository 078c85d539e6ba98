"What is sampled and trained on: tokens, rows and conversations that both sides make alike from a seed."

import random

WORDS = """the of and to in is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so up said what its about
than into them can only other time new some could these two may first then do any like my now over such our""".split()
SYSTEM = "You answer."
TEMPLATE = 20  # tokens that the chat template and the fixed words add to those of a first prompt
TURN = 14  # and to those between two replies


def ids(seed: int, n: int) -> list[int]:
    "Random token ids."
    return random.Random(seed).choices(range(100, 40_000), k=n)


def words(seed: int, n: int) -> str:
    "So many words, each a token of its own."
    return "".join(" " + word for word in random.Random(seed).choices(WORDS, k=n))


def opening(seed: int, tokens: int) -> list[dict]:
    "The messages of a first prompt of so many tokens."
    asked = "Go on:" + words(seed, tokens - TEMPLATE)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]


def between(seed: int, tokens: int) -> dict:
    "The user's message that puts so many tokens between two replies."
    return {"role": "user", "content": "Go on:" + words(seed, tokens - TURN)}


def rows(
    groups: int, size: int, prompt: int, new: int, turns: int = 1, gap: int = 0, shared: bool = True, seed: int = 0
) -> list[dict]:
    "Token rows: a prompt, then `turns` sampled pieces with gaps between them; a group has its prompt in common or not."
    made, rng = [], random.Random(seed)
    for group in range(groups):
        first = ids(rng.getrandbits(32), prompt)
        for _ in range(size):
            own = ids(rng.getrandbits(32), prompt + turns * new + (turns - 1) * gap)
            tokens = first + own[prompt:] if shared else own
            sampled = [False] * prompt + ([True] * new + [False] * gap) * turns
            made.append({"group": group, "tokens": tokens, "sampled": sampled[: len(tokens)]})
    return made


def packed(made: list[dict], share: bool = True) -> dict[str, int]:
    "What a learner must compute: tokens, pairs of a token and one that it sees, trained tokens; prefixes once or not."
    counts, before = {"tokens": 0, "pairs": 0, "trained": 0}, None
    for row in sorted(made, key=lambda row: (row["group"], row["tokens"])):
        tokens = row["tokens"]
        last = before["tokens"] if share and before and before["group"] == row["group"] else []
        start = next((i for i, (a, b) in enumerate(zip(tokens, last)) if a != b), min(len(tokens), len(last)))
        counts["tokens"] += len(tokens) - start
        counts["pairs"] += sum(range(start + 1, len(tokens) + 1))
        counts["trained"] += sum(row["sampled"][start:])
        before = row
    return counts
