"""`make demo`: SmolLM2-135M learns to beat a random opponent at tic-tac-toe, on this machine.

It runs the cells of tic-tac-toe.ipynb without the pictures, with a higher learning rate and fewer steps. The last line
is JSON."""

import argparse
import asyncio
import json
import sys
import tempfile
import time

from tic_tac_toe import practice, rollout, won_games

import art_nb as art

FIRST_UNSEEN = 900_000  # seeds of games that are not used in training


def peak_rss_gb() -> float:
    """Return the peak memory of this process in GB."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e9 if sys.platform == "darwin" else 1e6)


async def main(steps: int, groups: int, games: int, warm_up: int, path: str) -> None:
    unseen = range(FIRST_UNSEEN, FIRST_UNSEEN + games)
    model = art.TrainableModel(
        name="ttt-001", project="tic-tac-toe", base_model="smollm2-135m", lora_config={"rank": 16, "alpha": 32}
    )
    async with art.LocalBackend(path=path) as backend:
        await model.register(backend)
        print(f"The untrained model plays {games} games.", flush=True)
        before = await art.evaluate(model, rollout, unseen, metric="win")
        print(f"before: {before}", flush=True)
        start = time.time()
        print(
            f"Training: step 1 imitates {warm_up} games. Then {steps} steps of {groups * 8} games follow.", flush=True
        )
        if await model.get_step() == 0:
            await model.train_sft(won_games(warm_up), art.TrainSFTConfig(learning_rate=1e-3, batch_size=16))
        run = art.train(
            model,
            practice,
            range(100_000),
            steps=1 + steps,
            groups_per_step=groups,
            rollouts_per_group=8,
            learning_rate=4e-4,
            entropy_coef=0.02,
        )
        await run
        seconds = time.time() - start
        print(f"The trained model plays {games} games.", flush=True)
        after = await art.evaluate(model, rollout, unseen, metric="win")
        print(f"after: {after}")
    print(
        json.dumps(
            {
                "win_before": before.mean(),
                "win_after": round(after.mean(), 3),
                "ci95": [round(x, 3) for x in after.ci95()],
                "games": games,
                "steps": run.step - 1,
                "train_seconds": round(seconds),
                "illegal_after": round(after.mean("illegal"), 3),
                "peak_rss_gb": round(peak_rss_gb(), 2),
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=12, help="groups of eight games per step")
    parser.add_argument("--games", type=int, default=500, help="games of the evaluation before and after training")
    parser.add_argument("--warm-up", type=int, default=144, help="games of the warm-up")
    parser.add_argument("--path", help="directory of the run; by default a temporary directory")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            asyncio.run(
                main(arguments.steps, arguments.groups, arguments.games, arguments.warm_up, arguments.path or temporary)
            )
    except KeyboardInterrupt:
        sys.exit("The demo was stopped with Ctrl-C. Without --path, its run is deleted.")
