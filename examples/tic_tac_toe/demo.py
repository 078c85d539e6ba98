"""`make demo`: SmolLM2-135M learns to beat a random opponent at tic-tac-toe, on this machine.

It runs the cells of tic-tac-toe.ipynb without the pictures, with a higher learning rate and fewer steps."""

import argparse
import asyncio
import json
import os
import sys
import time
from itertools import count
from pathlib import Path

from tic_tac_toe import practice, rollout, won_games

import art_nb as art

FIRST_UNSEEN = 900_000  # seeds of games that are not used in training
BASELINES = """\
For comparison: random legal moves win 44 %, and a fixed order (center, corners, edges) wins 73 %.
With the default settings, other runs of this demo won 74 to 86 %."""


def peak_rss_gb() -> float:
    """Return the peak memory of this process in GB (10^9 bytes)."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def new_model(path: str) -> art.TrainableModel:
    """Return a model whose name no earlier demo in this directory has used."""
    models = Path(path) / "tic-tac-toe" / "models"
    name = next(name for name in (f"ttt-{number:03}" for number in count(1)) if not (models / name).exists())
    return art.TrainableModel(
        name=name,
        project="tic-tac-toe",
        base_model="smollm2-135m",
        base_path=path,
        lora_config={"rank": 16, "alpha": 32},
    )


def expected_end() -> str:
    """Return how long the demo took on processors like this one, and when it should end."""
    import torch

    from art_nb.policy.kernels import multiplies_bf16

    minutes = (3, 9) if multiplies_bf16(torch.device("cpu")) else (15, 30)
    first, last = (time.strftime("%H:%M", time.localtime(time.time() + 60 * m)) for m in minutes)
    took = f"On two cores like these, the demo took {minutes[0]} to {minutes[1]} minutes."
    return f"{took} It should end between {first} and {last}, with a bell. Other programs slow it down."


def result_line(name: str, evaluation: art.Evaluation) -> str:
    """Return a line: shares of games that were won (with the interval), drawn, lost, and ended by an illegal move."""
    won, low, high, illegal = (100 * x for x in (evaluation.mean(), *evaluation.ci95(), evaluation.mean("illegal")))
    rewards = evaluation.values("reward")
    drawn, lost = (100 * rewards.count(reward) / len(rewards) for reward in (0.5, 0.0))
    won_text = f"won {won:.1f} % (95 % interval {low:.1f} to {high:.1f})"
    return f"{name:<10} {won_text:<40} drawn {drawn:.1f} %  lost {lost:.1f} %  illegal move {illegal:.1f} %"


async def main(model: art.TrainableModel, steps: int, groups: int, games: int, warm_up: int, path: str) -> dict:
    """Train the model, print its results after each stage and return them."""
    lines = []

    async def play(stage: int, who: str) -> art.Evaluation:
        print(f"Stage {stage} of 5: The {who} model plays {games} games.", flush=True)
        evaluation = await art.evaluate(model, rollout, range(FIRST_UNSEEN, FIRST_UNSEEN + games), metric="win")
        lines.append(result_line(who, evaluation))
        print(lines[-1], flush=True)
        return evaluation

    async with art.LocalBackend(path=path) as backend:
        await model.register(backend)
        print(expected_end())
        print(f"To watch stage 4, the training, in another terminal: {view_command(model, '--live')}", flush=True)
        before = await play(1, "untrained")
        start = time.time()
        text = f"In step 1 (warm-up), the model imitates {warm_up} games that were won with random moves."
        print(f"Stage 2 of 5: {text}", flush=True)
        await model.train_sft(won_games(warm_up), art.TrainSFTConfig(learning_rate=1e-3, batch_size=16))
        seconds = time.time() - start
        warmed_up = await play(3, "warmed-up")
        text = f"Steps 2 to {1 + steps} are reinforcement learning, with {groups * 8} games in each step."
        print(f"Stage 4 of 5: {text} Reward: win 1, draw 0.5, loss 0, illegal move -1.", flush=True)
        start = time.time()
        run = await art.train(
            model,
            practice,
            range(100_000),
            steps=1 + steps,
            groups_per_step=groups,
            rollouts_per_group=8,
            learning_rate=4e-4,
            entropy_coef=0.02,
        )
        seconds += time.time() - start
        after = await play(5, "trained")
    print(f"\nThe same {games} games after each stage:", *lines, BASELINES, sep="\n")
    return {
        "win_before": before.mean(),
        "win_after_warm_up": round(warmed_up.mean(), 3),
        "win_after": round(after.mean(), 3),
        "ci95": [round(x, 3) for x in after.ci95()],
        "games": games,
        "steps": run.step - 1,
        "train_seconds": round(seconds),
        "illegal_after": round(after.mean("illegal"), 3),
        "peak_rss_gb": round(peak_rss_gb(), 2),
    }


def view_command(model: art.TrainableModel, option: str = "") -> str:
    """Return the command that shows the run."""
    command = Path(sys.executable).with_name("art-nb")
    parts = [
        os.path.relpath(command) if command.is_file() else "art-nb",
        "view",
        option,
        os.path.relpath(model.store.path),
    ]
    return " ".join(filter(None, parts))


def next_commands(model: art.TrainableModel, last_step: int) -> str:
    """Return the commands that show the run, start the tutorials and delete the run."""
    run = os.path.relpath(model.store.path)
    size = sum(file.stat().st_size for file in model.store.path.rglob("*") if file.is_file())
    lines = [
        f"Read all games:  {view_command(model, '--notebook')}",
        f"                 To see only lost games, use the filter:  step = {last_step} and split = val and reward = 0",
        f"Read a report:   {view_command(model)}",
        "Train yourself:  make lab, then open tic_tac_toe/tic-tac-toe.ipynb",
        f"Delete the run:  rm -r {run}  (it takes {size / 1e6:.0f} MB, mostly checkpoints)",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=12, help="groups of eight games per step")
    parser.add_argument("--games", type=int, default=500, help="games of each evaluation")
    parser.add_argument("--warm-up", type=int, default=144, help="games of the warm-up")
    parser.add_argument("--path", default=".art", help="directory of the runs; the default is .art")
    parser.add_argument("--json", action="store_true", help="print the results as JSON in the last line")
    arguments = parser.parse_args()
    model = new_model(arguments.path)
    work = main(model, arguments.steps, arguments.groups, arguments.games, arguments.warm_up, arguments.path)
    try:
        results = asyncio.run(work)
    except KeyboardInterrupt:
        sys.exit(f"The demo was stopped with Ctrl-C. To view its finished steps: {view_command(model)}")
    print("\a" if sys.stdout.isatty() else "", next_commands(model, 1 + arguments.steps), sep="\n")
    if arguments.json:
        print(json.dumps(results))
