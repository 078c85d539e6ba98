"""2048 as ART's notebooks of 2026 have it: backend.train, model.log with its metrics, a raw client, a shaped reward."""

import asyncio
import math
import os
import random

from openai import AsyncOpenAI
from pydantic import BaseModel

import art_nb as art

WINNING_VALUE = 16
random.seed(42)


class Scenario2048(BaseModel):
    step: int


def slide(line):
    tiles = [tile for tile in line if tile]
    merged = []
    while tiles:
        if len(tiles) > 1 and tiles[0] == tiles[1]:
            merged.append(tiles[0] * 2)
            tiles = tiles[2:]
        else:
            merged.append(tiles.pop(0))
    return merged + [0] * (len(line) - len(merged))


def move(board, direction):
    lines = [list(line) for line in (zip(*board) if direction in ("up", "down") else board)]
    back = direction in ("right", "down")
    lines = [slide(line[::-1])[::-1] if back else slide(line) for line in lines]
    return [list(line) for line in (zip(*lines) if direction in ("up", "down") else lines)]


def spawn(board):
    free = [(r, c) for r in range(4) for c in range(4) if not board[r][c]]
    if free:
        r, c = random.choice(free)
        board[r][c] = 2 if random.random() < 0.9 else 4


def total(board):
    return sum(map(sum, board))


def best(board):
    return max(map(max, board))


@art.retry(max_attempts=2)
async def rollout(model: art.Model, scenario: Scenario2048) -> art.Trajectory:
    client = AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key)
    board = [[0] * 4 for _ in range(4)]
    for _ in range(2):
        spawn(board)
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "system", "content": "Play 2048. Answer left, right, up or down."}],
        metadata={"game_id": random.getrandbits(32), "notebook-id": "2048", "step": scenario.step},
        reward=0,
    )
    for moves in range(3):
        trajectory.messages_and_choices.append(
            {"role": "user", "content": "\n".join("|".join(str(tile or "_") for tile in row) for row in board)}
        )
        completion = await client.chat.completions.create(
            max_completion_tokens=4,
            messages=trajectory.messages(),
            model=model.get_inference_name(),
            stream=False,
            logprobs=True,
        )
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        word = (choice.message.content or "").strip().lower()
        direction = next((d for d in ("left", "right", "up", "down") if d in word), None)
        if direction is None or move(board, direction) == board:
            trajectory.reward = -1 + moves / 10 + random.random() / 10
            break
        board = move(board, direction)
        spawn(board)
        if best(board) >= WINNING_VALUE:
            trajectory.reward = 2
            break
    else:
        trajectory.reward = (math.log2(best(board)) - 1) / (math.log2(WINNING_VALUE) - 1)
    trajectory.metrics |= {"max_value": best(board), "board_value": total(board), "win": best(board) >= WINNING_VALUE}
    return trajectory


async def main():
    model = art.TrainableModel(name="agent-001", project="2048", base_model=os.environ["IDIOM_MODEL"])
    with art.LocalBackend() as backend:
        await model.register(backend)
        for i in range(await model.get_step(), 2):
            train_groups = await art.gather_trajectory_groups(
                (art.TrajectoryGroup(rollout(model, Scenario2048(step=i)) for _ in range(6)) for _ in range(2)),
                pbar_desc="gather",
                max_exceptions=6,
            )
            result = await backend.train(model, train_groups, learning_rate=1e-5)
            await model.log(train_groups, metrics=result.metrics, step=result.step, split="train")
            await model.delete_checkpoints("train/reward")
        print("step", await model.get_step())


if __name__ == "__main__":
    asyncio.run(main())
