"""Tic-tac-toe against a random opponent: the game, the model's view of it, a rollout, and games for the warm-up."""

import itertools
import random
import re
from dataclasses import dataclass, field

import art_nb as art

SQUARES = [row + column for row in "ABC" for column in "123"]
LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
REWARDS: dict[str | None, float] = {"x": 1.0, "draw": 0.5, "o": 0.0}
SYSTEM = "You play tic-tac-toe as x. Reply with one free square, like B2."


class IllegalMove(ValueError):
    """The reply does not name a free square."""


@dataclass
class Game:
    """One game. The seed fixes who begins, the random opening moves, and the replies of the opponent."""

    seed: int
    plies: int = 0  # opening moves, x and o alternately; then x is to move
    board: list[str] = field(init=False)
    last_answer: int | None = field(init=False, default=None)  # the square of the opponent's last move

    def __post_init__(self):
        self.random = random.Random(self.seed)
        opponent_begins = self.random.random() < 0.5
        while True:
            self.board = ["_"] * 9
            if opponent_begins:
                self.answer()
            for ply in range(self.plies):
                self.board[self.random.choice(self.free())] = "xo"[ply % 2]
            if self.winner() is None:
                return

    def free(self) -> list[int]:
        """Return the indices of the free squares."""
        return [i for i, mark in enumerate(self.board) if mark == "_"]

    def winner(self) -> str | None:
        """Return x, o or draw, or `None` while the game is open."""
        for a, b, c in LINES:
            if self.board[a] != "_" and self.board[a] == self.board[b] == self.board[c]:
                return self.board[a]
        return None if self.free() else "draw"

    def answer(self) -> None:
        """Take a random free square for the opponent."""
        self.last_answer = self.random.choice(self.free())
        self.board[self.last_answer] = "o"

    def play(self, reply: str) -> None:
        """Make the model's move and the opponent's reply. Raise `IllegalMove` if the square is not free."""
        move = re.fullmatch(r"\s*([ABC][123])\s*", reply)
        if move is None or SQUARES.index(move[1]) not in self.free():
            raise IllegalMove(f"{reply!r} is no move: the free squares are {' '.join(SQUARES[i] for i in self.free())}")
        self.board[SQUARES.index(move[1])] = "x"
        if self.winner() is None:
            self.answer()

    def view(self) -> str:
        """Return the prompt: the board, and each free square after the other two marks of every line through it."""
        rows = "\n".join("ABC"[r] + " " + " ".join(self.board[3 * r : 3 * r + 3]) for r in range(3))
        listed = random.Random("".join(self.board)).sample(self.free(), len(self.free()))
        return f"{rows}\nfree:\n" + "\n".join(f"{self.lines_through(i)} {SQUARES[i]}" for i in listed)

    def lines_through(self, square: int) -> str:
        """Return the other two marks of every line: `xx` if the square completes three, `oo` if it blocks."""
        others = [sorted(self.board[i] for i in line if i != square) for line in LINES if square in line]
        return " ".join("".join(marks) for marks in others)


async def rollout(model: art.Model, seed: int, plies: int = 0) -> art.Trajectory:
    """Play one game. The reward is 1 for a win, 0.5 for a draw, 0 for a loss, and -1 for an illegal move."""
    game, client = Game(seed, plies), model.openai_client()
    trajectory = art.Trajectory(messages_and_choices=[{"role": "system", "content": SYSTEM}], metadata={"seed": seed})
    while game.winner() is None:
        trajectory.messages_and_choices.append({"role": "user", "content": game.view()})
        completion = await client.chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages(), max_completion_tokens=8, logprobs=True
        )
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        try:
            game.play(choice.message.content or "")
        except IllegalMove as illegal:
            trajectory.log(str(illegal))
            break
    if game.winner() == "o" and game.last_answer is not None:
        trajectory.log(f"The opponent took {SQUARES[game.last_answer]} and won.")
    trajectory.reward = REWARDS.get(game.winner(), -1.0)
    trajectory.metrics.update(win=game.winner() == "x", illegal=game.winner() is None)
    return trajectory.finish()


async def practice(model: art.Model, seed: int) -> art.Trajectory:
    """Play tic-tac-toe as x. The reward is 1 for a win, 0.5 for a draw, 0 for a loss, and -1 for an illegal move.

    One in four games has no opening moves. The others begin after random opening moves, so that they are shorter.
    """
    return await rollout(model, seed, plies=(0, 2, 4, 4)[seed % 4])


def random_game(seed: int) -> art.Trajectory:
    """Return a game of random legal moves, in the form that the model should write."""
    game, mover = Game(seed), random.Random(-seed)
    messages: art.MessagesAndChoices = [{"role": "system", "content": SYSTEM}]
    while game.winner() is None:
        move = SQUARES[mover.choice(game.free())]
        messages.extend([{"role": "user", "content": game.view()}, {"role": "assistant", "content": move}])
        game.play(move)
    return art.Trajectory(messages_and_choices=messages, reward=REWARDS[game.winner()])


def won_games(count: int) -> list[art.Trajectory]:
    """Return the first `count` random games that x won."""
    games = map(random_game, itertools.count(10_000))
    return list(itertools.islice((game for game in games if game.reward == 1), count))
