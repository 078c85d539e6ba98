"""Tic-tac-toe as it was written for ART in the summer of 2025: settings assigned later, model.train."""

import asyncio
import math
import os
import random
import xml.etree.ElementTree as ET

import openai
from art_nb.local import LocalBackend
from openai import AsyncOpenAI

import art_nb as art

random.seed(42)
LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def winner(board):
    for a, b, c in LINES:
        if board[a] and board[a] == board[b] == board[c]:
            return board[a]
    return None if None in board else "draw"


def render(board):
    rows = [" ".join(square or "_" for square in board[i : i + 3]) for i in (0, 3, 6)]
    return "  1 2 3\n" + "\n".join(f"{name} {row}" for name, row in zip("ABC", rows))


def apply_agent_move(board, reply, symbol):
    try:
        move = ET.fromstring(reply).text.strip()
        square = "ABC".index(move[0]) * 3 + int(move[1]) - 1
    except (ET.ParseError, AttributeError, IndexError, ValueError) as error:
        raise ValueError("that is no move") from error
    if not 0 <= square < 9 or board[square]:
        raise ValueError("that square cannot be taken")
    board[square] = symbol


@art.retry(exceptions=(openai.LengthFinishReasonError, openai.APITimeoutError))
async def rollout(model: art.Model, iteration: int) -> art.Trajectory:
    client = AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key)
    board, symbol, moves = [None] * 9, random.choice("xo"), 0
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "system", "content": f"Play tic-tac-toe as {symbol}. Answer <move>A1</move>."}],
        reward=0,
        metadata={"iteration": iteration},
    )
    if symbol == "o":
        board[random.randrange(9)] = "x"
    while winner(board) is None:
        trajectory.messages_and_choices.append({"role": "user", "content": render(board)})
        completion = await client.chat.completions.create(
            messages=trajectory.messages(), model=model.name, max_completion_tokens=8
        )
        choice = completion.choices[0]
        assert isinstance(choice.message.content, str)
        trajectory.messages_and_choices.append(choice)
        try:
            apply_agent_move(board, choice.message.content, symbol)
            moves += 1
        except ValueError:
            trajectory.metrics["invalid_move"] = 1
            trajectory.reward = -1 + math.log(moves + 1) / math.log(100) + random.random() / 10
            return trajectory
        if winner(board) is None:
            board[random.choice([i for i in range(9) if not board[i]])] = "o" if symbol == "x" else "x"
    trajectory.reward = {symbol: 1, "draw": 0.5}.get(winner(board), 0)
    trajectory.metrics["num_moves"] = moves
    return trajectory


async def main():
    model = art.TrainableModel(name="001-script", project="tic-tac-toe-local", base_model=os.environ["IDIOM_MODEL"])
    model._internal_config = art.dev.InternalModelConfig(
        init_args=art.dev.InitArgs(max_seq_length=8192),
        engine_args=art.dev.EngineArgs(enforce_eager=True, gpu_memory_utilization=0.8, num_scheduler_steps=1),
    )
    backend = LocalBackend(in_process=True, path="./.art")
    await model.register(backend)
    for i in range(await model.get_step(), 2):
        train_groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model, i) for _ in range(6)) for _ in range(1)),
            pbar_desc="gather",
            max_exceptions=6,
        )
        await model.delete_checkpoints()
        await model.train(
            train_groups, config=art.TrainConfig(learning_rate=5e-5), _config={"logprob_calculation_chunk_size": 8}
        )
    print("step", await model.get_step())


if __name__ == "__main__":
    asyncio.run(main())
