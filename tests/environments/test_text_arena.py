"""`art.environments.textarena` with real games: opponents, self-play, invalid moves, seeds, boards and failures."""

import asyncio
import random

import pytest
from support.scripted_policies import policy

import art_nb as art
from art_nb.integrations.text_games import TextGame, candidate_moves, random_move
from art_nb.models.tiny import save_tiny_model
from art_nb.tokens.rows import trajectory_rows
from art_nb.views.boards import board_of

ta = pytest.importorskip("textarena", reason="make test-environments installs the packages")

pytestmark = pytest.mark.timeout(300)
TWO_PLAYERS = (
    "TicTacToe-v0 ConnectFour-v0 KuhnPoker-v0 Nim-v0 Othello-v0 WildTicTacToe-v0 SimpleTak-v0 PigDice-v0 Snake-v0 "
    "IteratedRockPaperScissors-v0 IteratedMatchingPennies-v0 IteratedPrisonersDilemma-v0 TicTacToe-v0-train "
    "TicTacToe-v0-raw SimpleNegotiation-v0"
).split()
ONE_PLAYER = "GuessTheNumber-v0 TowerOfHanoi-v0 FrozenLake-v0 2048-v0-ultra-easy Blackjack-v0 Minesweeper-v0".split()


@pytest.fixture
def model():
    """A policy that plays random moves, as far as it can see them."""
    draw = random.Random(0)
    with policy(lambda prompt: next(iter(candidate_moves(prompt, draw)), "[1]")) as served:
        yield served


@pytest.fixture
def silly():
    with policy(lambda prompt: "I pass.") as served:
        yield served


@pytest.mark.parametrize("env_id", [*TWO_PLAYERS, *ONE_PLAYER])
async def test_a_game_ends(env_id, model):
    environment = art.environments.textarena(env_id, size=4, max_turns=150)
    players = {scenario["player"] for scenario in environment.scenarios}
    assert players == ({0, 1} if env_id in TWO_PLAYERS else {0})
    for trajectory in await asyncio.gather(*(environment.rollout(model, s) for s in environment.scenarios[:2])):
        metrics = trajectory.metrics
        assert not metrics["reached_max_turns"] and -1.0 <= trajectory.reward <= 1.0
        assert metrics["turns"] == sum(m["role"] == "assistant" for m in trajectory.messages()) > 0
        assert metrics["opponent_invalid_moves"] == 0
        assert trajectory.logs and trajectory.metadata["env_id"] == env_id


async def test_a_group_gets_the_same_game_and_parallel_games_do_not_mix(model):
    """The game deals cards with Python's global random numbers."""
    environment = art.environments.textarena("KuhnPoker-v0", size=6)
    groups = await asyncio.gather(
        *(environment.rollout(model, scenario) for scenario in environment.scenarios for _ in range(4))
    )
    for i, scenario in enumerate(environment.scenarios):
        openings = {trajectory.messages()[0]["content"] for trajectory in groups[4 * i : 4 * i + 4]}
        assert len(openings) == 1, scenario


async def test_an_invalid_move_is_data(silly):
    environment = art.environments.textarena("TicTacToe-v0", size=1)
    trajectory = await environment.rollout(silly, environment.scenarios[0])
    assert trajectory.reward == -1.0
    assert trajectory.metrics["invalid"] and trajectory.metrics["invalid_moves"] == trajectory.metrics["turns"] == 2
    assert "invalid move" in trajectory.messages()[2]["content"]
    assert not trajectory.metrics["won"]


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_opponent_is_a_function_of_the_observation(model, is_async):
    seen = []

    def first_free(observation):
        seen.append(observation)
        return candidate_moves(observation, random.Random(0))[0]

    async def async_first_free(observation):
        return first_free(observation)

    environment = art.environments.textarena("TicTacToe-v0", async_first_free if is_async else first_free, size=2)
    trajectory = await environment.rollout(model, environment.scenarios[1])
    assert trajectory.metadata["player"] == 1
    assert seen[0].startswith("You are Player 0") and seen[1].startswith(seen[0])


async def test_the_opponent_is_another_model(model, silly):
    environment = art.environments.textarena("TicTacToe-v0", silly, size=1)
    trajectory = await environment.rollout(model, environment.scenarios[0])
    assert trajectory.reward == 1.0 and trajectory.metrics["opponent_invalid_moves"] == 2
    environment = art.environments.textarena("TicTacToe-v0", silly, size=2)
    trajectory = await environment.rollout(model, environment.scenarios[1])
    assert (trajectory.reward, trajectory.metrics["turns"]) == (1.0, 0)  # the other side loses with its first turns


async def test_self_play_gives_both_sides_to_the_group(model):
    environment = art.environments.textarena("TicTacToe-v0", "self", size=2)
    trajectories = await asyncio.gather(*(environment.rollout(model, environment.scenarios[0]) for _ in range(8)))
    assert [trajectory.metadata["player"] for trajectory in trajectories] == [0, 1] * 4
    for first, second in zip(trajectories[::2], trajectories[1::2], strict=True):
        assert first.reward == -second.reward
        assert first.metrics["turns"] - second.metrics["turns"] in (0, 1)
        assert first.messages()[0]["content"].startswith("You are Player 0")
        assert second.messages()[0]["content"].startswith("You are Player 1")
        rows = [row for trajectory in (first, second) for row in trajectory_rows(trajectory)]
        assert all(row.sampled.any() for row in rows)
    alone = await environment.rollout(model, environment.scenarios[0])
    assert alone.metadata["player"] == 0


async def test_a_failed_game_of_self_play_fails_on_both_sides():
    with policy(lambda prompt: 1 / 0) as broken:
        environment = art.environments.textarena("TicTacToe-v0", "self", size=1)
        results = await asyncio.gather(
            *(environment.rollout(broken, environment.scenarios[0]) for _ in range(2)), return_exceptions=True
        )
    assert all(isinstance(result, Exception) for result in results)
    assert "other side failed" in str(results[1])


async def test_a_canceled_side_does_not_disturb_the_other(model):
    environment = art.environments.textarena("TicTacToe-v0", "self", size=1)
    first, second = (asyncio.ensure_future(environment.rollout(model, environment.scenarios[0])) for _ in range(2))
    await asyncio.sleep(0)
    second.cancel()
    assert (await first).metadata["player"] == 0
    with pytest.raises(asyncio.CancelledError):
        await second


async def test_a_game_that_is_too_long_ends_at_max_turns(model):
    environment = art.environments.textarena("PigDice-v0", size=1, max_turns=2)
    trajectory = await environment.rollout(model, environment.scenarios[0])
    assert trajectory.reward == 0.0 and trajectory.metrics["reached_max_turns"] and trajectory.metrics["turns"] == 2


async def test_boards_are_shown(model):
    for env_id, name in {
        "TicTacToe-v0": "tic-tac-toe",
        "ConnectFour-v0": "text grid",
        "2048-v0-ultra-easy": "2048",
        "Snake-v0": "text grid",
    }.items():
        environment = art.environments.textarena(env_id, size=1)
        trajectory = await environment.rollout(model, environment.scenarios[0])
        renderer, frames, problem = board_of(trajectory)
        assert (renderer, problem) == (name, ""), env_id
        assert len(frames) >= trajectory.metrics["turns"] - trajectory.metrics["invalid_moves"]


async def test_an_error_of_a_game_is_a_failed_rollout(model, monkeypatch):
    environment = art.environments.textarena("TicTacToe-v0", size=1)

    def broken(self, action):
        raise SystemExit(3)

    monkeypatch.setattr("textarena.envs.TicTacToe.env.TicTacToeEnv.step", broken)
    group = art.TrajectoryGroup([environment.rollout(model, environment.scenarios[0]) for _ in range(3)])
    [group] = await art.gather_trajectory_groups([group], pbar_desc=None, max_exceptions=10)
    assert [error.type for error in group.exceptions] == ["art_nb.types.RolloutError"] * 3
    assert "SystemExit" in group.exceptions[0].message


def test_a_random_opponent_needs_a_move_to_start_from():
    game = TextGame(ta, "TicTacToe-v0", {}, 2, seed=1)
    draw = random.Random(1)
    moves = {random_move(game, 0, game.observe()[1] if i == 0 else "[4]", draw) for i in range(20)}
    assert moves <= {f"[{square}]" for square in range(9)} and len(moves) > 3
    assert game.core.state.turn == 0
    with pytest.raises(art.types.RolloutError, match="knows no valid move of TicTacToe-v0"):
        random_move(game, 0, "Say something.", draw)


def test_wrong_arguments_are_errors():
    with pytest.raises(ValueError, match="no game 'TicTacToe'. Similar names: .*TicTacToe-v0"):
        art.environments.textarena("TicTacToe")
    with pytest.raises(ValueError, match="Invalid `opponent='best'`"):
        art.environments.textarena("TicTacToe-v0", "best")
    with pytest.raises(ValueError, match="Wordle-v0 does not start"):
        art.environments.textarena("Wordle-v0")
    with pytest.raises(ValueError, match="TicTacToe-v0 does not start"):
        art.environments.textarena("TicTacToe-v0", players=5)


async def test_token_ids_of_a_game_are_one_row(local, named, tmp_path):
    """The tiny model writes random text, so the game ends with its second invalid move."""
    model = named(base_model=str(save_tiny_model(tmp_path / "tiny", context=4096)))
    await model.register(local)
    environment = art.environments.textarena("TicTacToe-v0", size=1, sampling={"max_completion_tokens": 6})
    trajectory = await environment.rollout(model, environment.scenarios[0])
    rows = trajectory_rows(trajectory)
    ids = [token for choice in trajectory.messages_and_choices[1::2] for token in getattr(choice, "token_ids", [])]
    assert len(rows) == 1 and rows[0].tokens[rows[0].sampled].tolist() == ids


async def test_a_run_trains_by_self_play(local, named, tmp_path):
    """The tiny model loses as the first player, so the other side has no reply to train."""
    model = named(base_model=str(save_tiny_model(tmp_path / "tiny", context=4096)))
    await model.register(local)
    environment = art.environments.textarena("TicTacToe-v0", "self", size=4, sampling={"max_completion_tokens": 4})
    run = art.train(
        model, environment.rollout, environment.scenarios, steps=2, groups_per_step=2, rollouts_per_group=4, show=False
    )
    await run
    assert await model.get_step() == 2
    for group in run.groups:
        assert sorted(trajectory.metadata["player"] for trajectory in group) == [0, 0, 1, 1]
        assert [trajectory.reward for trajectory in group] == [-1.0, 1.0] * 2 and not group.exceptions
