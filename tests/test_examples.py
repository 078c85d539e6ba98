"""The tutorials and the demo, shortened, as a user runs them."""
import importlib.util
import json
import math
import shutil
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient


@pytest.fixture
def tic_tac_toe(root, tmp_path):
    """A copy of the example, so that its run directory stays out of the repository."""
    example, copy = root / "examples" / "tic_tac_toe", tmp_path / "tic_tac_toe"
    return shutil.copytree(example, copy, ignore=shutil.ignore_patterns(".art"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tutorial_runs_from_top_to_bottom(tic_tac_toe, smollm2_dir, monkeypatch):
    monkeypatch.setenv("EXAMPLE_STEPS", "2")
    notebook = nbformat.read(tic_tac_toe / "tic-tac-toe.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tic_tac_toe)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    assert (tic_tac_toe / ".art" / "tic-tac-toe" / "models" / "ttt-001" / "checkpoints" / "0003").is_dir()


def test_committed_tutorial_shows_the_curve_rising(root):
    notebook = nbformat.read(root / "examples" / "tic_tac_toe" / "tic-tac-toe.ipynb", as_version=4)
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    text = "".join(str(out.get("text") or out.get("data", {})) for out in outputs)
    images = [out for out in outputs if "image/png" in out.get("data", {})]
    wins = [float(part.split()[0].rstrip(",")) for part in text.split("win ")[1:] if part[0].isdigit()]
    assert len(images) >= 2
    assert wins[0] == 0.0
    assert max(wins) > 0.75


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo_ends_with_one_line_of_json(tic_tac_toe, smollm2_dir):
    command = [sys.executable, "demo.py", "--steps", "1", "--games", "4"]
    done = subprocess.run(command, cwd=tic_tac_toe, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told.keys() == {"win_before", "win_after", "ci95", "games", "steps", "train_seconds", "illegal_after",
                           "peak_rss_gb"}
    assert told["steps"] == 1
    assert told["games"] == 4
    assert told["peak_rss_gb"] < 6


SHORT = {                                               # steps of the shortened form, and the run that it leaves
    "2048/2048.ipynb": ("2", "2048/models/2048-001/checkpoints/0003"),
    "yes_no_maybe/yes-no-maybe.ipynb": ("1", "yes-no-maybe/models/maybe-001/checkpoints/0001"),
    "own_loss/own-loss.ipynb": ("1", "own-loss/models/only-the-good/checkpoints/0001"),
    "resume_and_fork/resume-and-fork.ipynb": ("2", "resume/models/bolder/checkpoints/0002"),
    "sft_then_rl/sft-then-rl.ipynb": ("1", "sft-then-rl/models/larger-001/checkpoints/0002"),
    "self_play/self-play.ipynb": ("1", "self-play/models/self-001/checkpoints/0002"),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", SHORT)
def test_short_tutorial(path, root, tmp_path, smollm2_dir, monkeypatch):
    """In a copy, so that its run directory stays out of the repository; one borrows the game of another."""
    steps, left = SHORT[path]
    monkeypatch.setenv("EXAMPLE_STEPS", steps)
    examples = shutil.copytree(root / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns(".art"))
    notebook = nbformat.read(examples / path, as_version=4)
    resources = {"metadata": {"path": str((examples / path).parent)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    assert ((examples / path).parent / ".art" / left).is_dir()


@pytest.fixture(scope="module")
def game_2048(root):
    spec = importlib.util.spec_from_file_location("game_2048", root / "examples" / "2048" / "game_2048.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["game_2048"] = module                   # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["game_2048"]


@pytest.mark.parametrize(("line", "pushed", "merges"), [
    ((2, 2, 2, 2), (4, 4, 0, 0), 2), ((2, 2, 2, 0), (4, 2, 0, 0), 1), ((4, 2, 2, 0), (4, 4, 0, 0), 1),
    ((0, 2, 0, 2), (4, 0, 0, 0), 1), ((2, 4, 2, 4), (2, 4, 2, 4), 0), ((0, 0, 0, 0), (0, 0, 0, 0), 0)])
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
