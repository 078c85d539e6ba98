"""The rules of 2048, as its tutorial has them."""

import importlib.util
import math
import sys

import pytest


@pytest.fixture(scope="module")
def game_2048(root):
    spec = importlib.util.spec_from_file_location("game_2048", root / "examples" / "2048" / "game_2048.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["game_2048"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["game_2048"]


@pytest.mark.parametrize(
    ("line", "pushed", "merges"),
    [
        ((2, 2, 2, 2), (4, 4, 0, 0), 2),
        ((2, 2, 2, 0), (4, 2, 0, 0), 1),
        ((4, 2, 2, 0), (4, 4, 0, 0), 1),
        ((0, 2, 0, 2), (4, 0, 0, 0), 1),
        ((2, 4, 2, 4), (2, 4, 2, 4), 0),
        ((0, 0, 0, 0), (0, 0, 0, 0), 0),
    ],
)
def test_2048_merges_each_tile_once(game_2048, line, pushed, merges):
    assert game_2048.slide(line) == (pushed, merges)


def test_2048_pushes_to_the_side_that_was_named(game_2048):
    board = ((2, 0, 0, 2), (0, 0, 0, 0), (2, 0, 0, 0), (4, 0, 0, 0))
    assert game_2048.push(board, "right")[0] == ((0, 0, 0, 4), (0, 0, 0, 0), (0, 0, 0, 2), (0, 0, 0, 4))
    assert game_2048.push(board, "up") == (((4, 0, 0, 2), (4, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)), 1)
    assert game_2048.push(board, "down")[0][2:] == ((4, 0, 0, 0), (4, 0, 0, 2))


def test_2048_is_the_same_game_for_the_same_seed_and_moves(game_2048):
    one, other = (game_2048.Game(game_2048.Scenario(7, opening=9)) for _ in range(2))
    assert one.board == other.board
    assert one.moves == other.moves == 9
    move = one.legal()[0]
    one.play(move)
    other.play(f" {move}\n")
    assert one.board == other.board


def test_2048_refuses_what_is_no_move_and_what_moves_nothing(game_2048):
    game = game_2048.Game(game_2048.Scenario(0))
    game.board = ((2, 4, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0))
    assert game.legal() == ["right", "down"]
    for reply in ("left", "up", "sideways", "", "right down"):
        with pytest.raises(game_2048.IllegalMove):
            game.play(reply)


def test_2048_rewards_as_art_does(game_2048):
    game = game_2048.Game(game_2048.Scenario(0, win=64))
    game.board = ((32, 16, 0, 0), (8, 4, 0, 0), (2, 0, 0, 0), (2, 0, 0, 0))
    art_says = (math.log2(32) - 1) / (math.log2(64) - 1) + 0.2 * (math.log2(64) - 1) / (math.log2(64 * 16) - 1)
    assert game_2048.reward(game) == pytest.approx(art_says)
    game.board = ((64, 0, 0, 0), *game.board[1:])
    assert game_2048.reward(game) == 2


def test_2048_shows_what_a_move_does_before_its_name(game_2048):
    game = game_2048.Game(game_2048.Scenario(0))
    game.board = ((2, 2, 4, 0), (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0))
    *rows, one, two, three = game.view().splitlines()
    assert rows == ["2 2 4 _", "_ _ _ _", "_ _ _ _", "_ _ _ _"]
    assert {one, two, three} == {"1 1 left", "1 1 right", "0 1 down"}


@pytest.mark.parametrize("asked", [{"opening": 45}, {"opening": 60}, {"win": 2}], ids=str)
def test_2048_refuses_a_game_without_a_move(game_2048, asked):
    with pytest.raises(ValueError, match="lower opening or raise win"):
        game_2048.Scenario(0, **asked)


def test_2048_refuses_an_opening_that_chance_never_survives(game_2048):
    with pytest.raises(ValueError, match="lower opening"):
        game_2048.Game(game_2048.Scenario(0, win=2048, opening=1400))


@pytest.mark.parametrize("win", [8, 64, 128])
def test_2048_practises_what_chance_can_win(game_2048, win):
    for seed in range(40):
        assert not game_2048.Game(game_2048.practice(seed, win)).over()
    assert len(game_2048.won_turns(16, win)) == 16
