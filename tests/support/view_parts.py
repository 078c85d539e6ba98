"""Rollouts made by hand, for the tests of the panels: exact tokens, tools, thinking, boards, failures."""

import random
import zlib

from openai.types.chat.chat_completion import Choice

import art_nb as art

CALLS = [
    {
        "id": "call-a",
        "type": "function",
        "function": {"name": "look_up", "arguments": '{"query": "forks", "limit": 3}'},
    },
    {"id": "call-b", "type": "function", "function": {"name": "evaluate", "arguments": "{}"}},
]
RESULTS = [
    {"role": "tool", "tool_call_id": "call-a", "content": "\n".join(f"{n}. a rule about forks" for n in range(40))},
    {"role": "tool", "tool_call_id": "call-b", "content": "Error: no such position"},
]


def words(text: str) -> list[str]:
    """Tokens of a text: words with the space before them."""
    return [word if i == 0 else f" {word}" for i, word in enumerate(text.split(" "))]


class Talk:
    """A conversation that keeps its token ids, as a sampler does."""

    def __init__(self, seed: object = 0):
        self.entries, self.ids, self.random = [], [], random.Random(f"{seed}")

    def add(self, role: str, content: str, **more) -> "Talk":
        """Add a message that nobody sampled."""
        self.entries.append({"role": role, "content": content, **more})
        self.ids += [hash_of(word) for word in words(content)]
        return self

    def say(self, text: str, logprobs: list[float] | None = None, finish: str = "stop", **message) -> "Talk":
        """Add what the model said."""
        tokens = words(text)
        logprobs = logprobs or [round(-self.random.expovariate(1.2), 3) for _ in tokens]
        content = [
            {"token": token, "logprob": value, "bytes": list(token.encode("utf-8", "replace")), "top_logprobs": []}
            for token, value in zip(tokens, logprobs, strict=True)
        ]
        sampled = [hash_of(token) for token in tokens]
        self.entries.append(
            Choice.model_validate(
                {
                    "index": 0,
                    "finish_reason": finish,
                    "message": {"role": "assistant", "content": text, **message},
                    "logprobs": {"content": content},
                    "prompt_token_ids": [*self.ids],
                    "token_ids": sampled,
                }
            )
        )
        self.ids += sampled
        return self

    def end(self, reward: float, **fields) -> art.Trajectory:
        """Give the trajectory."""
        return art.Trajectory(messages_and_choices=self.entries, reward=reward, **fields)


def hash_of(word: str) -> int:
    """A token id of a word, the same in every process."""
    return zlib.crc32(word.encode("utf-8", "replace")) % 30000


def grid(moves: list[tuple[int, int]]) -> str:
    """A tic-tac-toe board as text."""
    cells = [["."] * 3 for _ in range(3)]
    for n, (row, column) in enumerate(moves):
        cells[row][column] = "XO"[n % 2]
    return "\n".join(" ".join(row) for row in cells)


def game(index: int, seed: int = 0, reward: float | None = None, tools: bool = False) -> art.Trajectory:
    """A game of three moves; the first is the same in every rollout of a group."""
    talk, moves = Talk(f"{seed} {index}"), []
    talk.add("system", "You play tic-tac-toe.\nAnswer with one move, as in <move>b2</move>.")
    cells = [(r, c) for r in range(3) for c in range(3)]
    random.Random(seed).shuffle(cells)
    first = cells.pop(0)
    random.Random(f"{seed} {index}").shuffle(cells)
    for turn in range(3):
        talk.add("user", f"Board:\n{grid(moves)}\nYour move.")
        row, column = first if turn == 0 else cells.pop(0)
        said = f"I take {'abc'[column]}{row + 1} now\n<move>{'abc'[column]}{row + 1}</move>"
        if turn == 1 and tools:
            talk.say(said, reasoning_content="First I look for a fork, then for a block.", tool_calls=CALLS)
            for result in RESULTS:
                talk.add(**result)
        else:
            talk.say(said)
        moves += [(row, column), cells.pop(0)]
    reward = random.Random(f"{seed} {index}").choice([0.0, 0.25, 0.5, 1.0]) if reward is None else reward
    return talk.end(
        reward,
        metrics={"win": reward > 0.5, "moves": 5, "reward/result": reward - 0.1, "reward/form": 0.1},
        metadata={"seed": seed, "opening": "corner"},
        logs=[f"game {seed}, rollout {index}"],
    )


def games(
    seed: int = 0, size: int = 4, reward: float | None = None, failed: int = 0, tools: bool = False
) -> art.TrajectoryGroup:
    """A group of games of one scenario."""
    return art.TrajectoryGroup(
        [game(i, seed, reward, tools) for i in range(size)] + [TimeoutError("the endpoint did not answer")] * failed,
        metadata={"scenario_id": f"game {seed}"},
    )


def steps(count: int = 3, groups: int = 3, size: int = 4) -> dict[int, list[art.TrajectoryGroup]]:
    """Several steps of the same scenarios; in the last, one group has no variance and one rollout failed."""
    made = {}
    for step in range(1, count + 1):
        made[step] = [games(seed, size) for seed in range(groups)]
        for group in made[step]:
            for i, one in enumerate(group):
                one.reward = round(min(1.0, 0.2 * step + 0.1 * i), 2)
                one.metrics |= {"reward/result": one.reward - 0.1}
                one.messages_and_choices.append({"role": "user", "content": f"The end of step {step}."})
    made[count][1] = games(1, size, reward=0.75)
    made[count][2] = games(2, size, failed=1, tools=True)
    return made


def crowd(count: int, group: int = 8) -> list[art.TrajectoryGroup]:
    """Very many small rollouts."""
    made = []
    for n in range(count // group):
        one = [
            art.Trajectory.model_construct(
                messages_and_choices=[
                    {"role": "user", "content": f"question {n}"},
                    {"role": "assistant", "content": f"answer {i}"},
                ],
                reward=(n * 7 + i) % 11 / 10,
                metrics={},
                metadata={},
                logs=[],
                tools=None,
                additional_histories=[],
            )
            for i in range(group)
        ]
        made.append(art.TrajectoryGroup(one, metadata={"scenario_id": f"scenario {n}"}))
    return made


def recorded_run(path) -> "art.RunStore":
    """A run on disk whose last step has a record of what the loss saw."""
    import numpy as np

    from art_nb.tokens.advantages import advantages
    from art_nb.tokens.learner_records import LearnerRecord, token_checksum, write_record
    from art_nb.tokens.rows import group_rows

    store, rng = art.RunStore(path), np.random.default_rng(0)
    for step, groups in steps().items():
        store.write_groups("train", step, groups)
    groups = steps()[3]
    places, rows, given = [], [], []
    for g, group in enumerate(groups):
        (values,) = advantages([np.array([one.reward for one in group], np.float64)])
        for row in group_rows(group) if g != 1 else ():
            places.append((g, row.trajectory, 0))
            rows.append(row)
            given.append(float(values[row.trajectory]))
    old = [row.logprobs[row.sampled].astype(np.float32) for row in rows]
    sizes = [len(values) for values in old]
    write_record(
        store,
        3,
        LearnerRecord(
            place_R=np.array(places, np.int32),
            check_R=np.array([token_checksum(row.tokens) for row in rows], np.uint32),
            size_R=np.array(sizes, np.int32),
            coef_R=np.ones(len(rows), np.float32),
            old_E=np.concatenate(old),
            new_E=np.concatenate(old) + rng.normal(0, 0.25, sum(sizes)).astype(np.float32),
            advantage_E=np.repeat(given, sizes).astype(np.float32),
            entropy_E=rng.uniform(0, 3, sum(sizes)).astype(np.float32),
            reference_E=np.zeros(0, np.float32),
            config={"loss": "ppo", "loss_options": {}, "reduction": "token"},
        ),
    )
    return store
