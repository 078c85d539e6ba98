"""The win rate of the tic-tac-toe demo after each step, and the seconds of training until then.

Run `examples/tic_tac_toe/demo.py --path DIRECTORY` first, then this script with the same directory. The games of the
evaluation are those of the demo, which training does not use. Each step is a line of JSON."""

import argparse
import asyncio
import json
import sys
from datetime import datetime
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples" / "tic_tac_toe"))
from demo import FIRST_UNSEEN
from tic_tac_toe import rollout

import art_nb as art


def training_seconds(history: list[dict]) -> dict[int, float]:
    """Return the seconds from the end of the evaluation of step 0 to the end of each training step."""
    begin = next(row["recorded_at"] for row in history if row["step"] == 0)
    ends = {row["step"]: row["recorded_at"] for row in history if "train/reward" in row}
    return {
        step: (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()
        for step, end in ends.items()
    }


async def main(path: str, games: int, first: int) -> None:
    model = art.TrainableModel(
        name="ttt-001", project="tic-tac-toe", base_model="smollm2-135m", lora_config={"rank": 16, "alpha": 32}
    )
    async with art.LocalBackend(path=path) as backend:
        await model.register(backend)
        seconds = training_seconds(model.store.history())
        for step in [step for step in sorted(seconds) if step >= first]:
            unseen = range(FIRST_UNSEEN, FIRST_UNSEEN + games)
            result = await art.evaluate(model, rollout, unseen, step=step, metric="win", log=False)
            interval = [round(bound, 3) for bound in result.ci95()]
            line = {"step": step, "seconds": round(seconds[step]), "win": round(result.mean(), 3), "ci95": interval}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="directory of the demo's run")
    parser.add_argument("--games", type=int, default=500, help="games per step")
    parser.add_argument("--first", type=int, default=2, help="first step; step 1 is the warm-up")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.path, arguments.games, arguments.first))
