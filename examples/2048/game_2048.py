"""The game 2048: the board, the model's view of it, a rollout with ART's reward, and positions for the warm-up."""

import itertools
import math
import random
from dataclasses import dataclass, field

import art_nb as art

MOVES = ("left", "right", "up", "down")
SYSTEM = "You play 2048. Reply with one of the moves."
Board = tuple[tuple[int, ...], ...]  # four rows of four; 0 is an empty cell


class IllegalMove(ValueError):
    """The reply is not a move, or the move does not change the board."""


def slide(line: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Return a line pushed to its front, and the number of merged pairs. A tile merges at most once."""
    tiles, pushed = [tile for tile in line if tile], []
    while tiles:
        twice = 2 if tiles[:1] == tiles[1:2] else 1
        pushed.append(tiles[0] * twice)
        del tiles[:twice]
    merges = len(line) - line.count(0) - len(pushed)
    return (*pushed, *(0,) * (len(line) - len(pushed))), merges


def push(board: Board, move: str) -> tuple[Board, int]:
    """Return the board after a move, before the next tile appears, and the number of merged pairs."""
    across, to_the_end = move in ("left", "right"), move in ("right", "down")
    lines = board if across else tuple(zip(*board))
    pushed, merges = zip(*(slide(line[::-1] if to_the_end else line) for line in lines))
    lines = tuple(line[::-1] if to_the_end else line for line in pushed)
    return (lines if across else tuple(zip(*lines))), sum(merges)


def pairs(board: Board) -> int:
    """Return the number of pairs that the next move could merge, horizontally and vertically."""
    return push(board, "left")[1] + push(board, "up")[1]


@dataclass(frozen=True)
class Scenario:
    """A game to play. The seed fixes the tiles that appear and the random opening moves."""

    seed: int
    win: int = 64  # the tile to reach
    opening: int = 0  # random moves before the model's first move

    def __post_init__(self):
        if self.win < 4 or self.opening >= self.moves:
            raise ValueError(f"{self} leaves no move to the player: lower opening or raise win.")

    @property
    def moves(self) -> int:
        """The number of moves of a game, including its opening."""
        return round(0.7 * self.win)


@dataclass
class Game:
    """One game. In the same scenario, the same moves get the same tiles."""

    scenario: Scenario
    board: Board = field(init=False)
    moves: int = field(init=False)  # number of moves so far

    def __post_init__(self):
        self.random = random.Random(self.scenario.seed)
        for _ in range(100):  # if an opening ends the game, try another one
            self.begin()
            if not self.over():
                return
        raise ValueError(f"{self.scenario}: 100 random openings ended the game before it began; lower opening.")

    def begin(self) -> None:
        """Add two tiles and play the opening."""
        self.board, self.moves = ((0,) * 4,) * 4, 0
        self.add_tile()
        self.add_tile()
        while self.moves < self.scenario.opening and not self.over():
            self.play(self.random.choice(self.legal()))

    def add_tile(self) -> None:
        """Add a 2, or one time in ten a 4, to an empty cell."""
        empty = [(r, c) for r in range(4) for c in range(4) if not self.board[r][c]]
        tile, place = 4 if self.random.random() < 0.1 else 2, int(self.random.random() * len(empty))
        rows = [[*line] for line in self.board]
        rows[empty[place][0]][empty[place][1]] = tile
        self.board = tuple(map(tuple, rows))

    def legal(self) -> list[str]:
        """Return the moves that change the board."""
        return [move for move in MOVES if push(self.board, move)[0] != self.board]

    def tiles(self) -> list[int]:
        """Return all tiles."""
        return [tile for row in self.board for tile in row if tile]

    def won(self) -> bool:
        """Return whether the tile of the goal was reached."""
        return max(self.tiles()) >= self.scenario.win

    def over(self) -> bool:
        """Return whether the game is won, has no moves left, or is stuck."""
        return self.won() or self.moves >= self.scenario.moves or not self.legal()

    def play(self, reply: str) -> None:
        """Make a move and add a tile. Raise `IllegalMove` if the move is not legal."""
        move = reply.strip()
        if move not in self.legal():
            raise IllegalMove(f"{reply!r} is no move here: legal are {', '.join(self.legal())}")
        self.board, self.moves = push(self.board, move)[0], self.moves + 1
        if not self.won():
            self.add_tile()

    def drawn(self) -> str:
        """Return the board as text."""
        return "\n".join(" ".join(str(tile or "_") for tile in row) for row in self.board)

    def view(self) -> str:
        """Return the prompt: the board and the legal moves, each after its merged pairs and the pairs left after it."""
        listed = random.Random(str(self.board)).sample(self.legal(), len(self.legal()))
        after = [(*push(self.board, move), move) for move in listed]
        return "\n".join([self.drawn(), *(f"{merges} {pairs(board)} {move}" for board, merges, move in after)])


def reward(game: Game) -> float:
    """Return the reward of ART's 2048 example.

    A win has reward 2. Otherwise, the largest tile gives up to 1 and the sum of all tiles up to 0.2, both on a
    logarithmic scale.
    """
    if game.won():
        return 2.0
    grade = lambda value, full: (math.log2(value) - 1) / (math.log2(full) - 1)
    win = game.scenario.win
    return grade(max(game.tiles()), win) + 0.2 * grade(sum(game.tiles()), 16 * win)


async def rollout(model: art.Model, scenario: Scenario) -> art.Trajectory:
    """Play one game. Each turn is a separate conversation, because the board contains all information."""
    game, client, turns, logs = Game(scenario), model.openai_client(), [], []
    legal = True
    while legal and not game.over():
        messages: art.Messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": game.view()}]
        completion = await client.chat.completions.create(
            model=model.get_inference_name(), messages=messages, max_completion_tokens=4, logprobs=True
        )
        turns.append([*messages, completion.choices[0]])
        try:
            game.play(completion.choices[0].message.content or "")
        except IllegalMove as illegal:
            logs.append(str(illegal))
            legal = False
    turns[-1].append({"role": "user", "content": f"{game.drawn()}\n{'won' if game.won() else 'lost'}"})
    first, *further = turns
    trajectory = art.Trajectory(
        messages_and_choices=first,
        additional_histories=[art.History(messages_and_choices=turn) for turn in further],
        reward=reward(game) if legal else -1.0,
        metadata={"seed": scenario.seed},
        logs=logs,
    )
    trajectory.metrics.update(
        win=game.won(), illegal=not legal, moves=game.moves, max_value=max(game.tiles()), board_value=sum(game.tiles())
    )
    return trajectory.finish()


def practice(seed: int, win: int = 64) -> Scenario:
    """Return a game to train on.

    The game begins after a random opening. Three of four games have half of `win` as their goal, so they are short.
    """
    tile, share_played = ((win // 2, 0.55), (win // 2, 0.65), (win // 2, 0.75), (win, 0.75))[seed % 4]
    return Scenario(seed, tile, opening=int(share_played * Scenario(seed, tile).moves))


def random_game(scenario: Scenario, mover: random.Random) -> tuple[Game, list[tuple[str, str]]]:
    """Play a game of random legal moves. Return the game and its turns as pairs of view and move."""
    game, turns = Game(scenario), []
    while not game.over():
        turns.append((game.view(), mover.choice(game.legal())))
        game.play(turns[-1][1])
    return game, turns


def won_turns(count: int, win: int = 64) -> list[art.Trajectory]:
    """Return turns of won random practice games, in random order, in the form that the model should write."""
    mover = random.Random(0)
    games = (random_game(practice(seed, win), mover) for seed in itertools.count(200_000))
    turns = itertools.chain.from_iterable(turns for game, turns in games if game.won())
    chosen = [*itertools.islice(turns, count)]
    mover.shuffle(chosen)
    return [
        art.Trajectory(
            messages_and_choices=[
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": view},
                {"role": "assistant", "content": move},
            ]
        )
        for view, move in chosen
    ]
