"""ART's cells of 2048 with `weave.init`, without ART's model: `python weave_cells.py RESULT ROLLOUTS OPENING [fails]`.

A policy that plays the move with the most pairs is behind a real endpoint. The cells use OpenAI's own client, as those
of ART do.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import weave
from game_2048 import MOVES, SYSTEM, Game, Scenario, pairs, push, reward
from openai import AsyncOpenAI
from support.scripted_policies import Following
from support.server_parts import endpoint

import art_nb as art
from art_nb.core.events import Bus
from art_nb.models.model import REGISTERED
from art_nb.rollouts.entries import sampled_tokens
from art_nb.rollouts.trajectories import choices

RULES = f"{SYSTEM} The goal is the tile 64."


def most_pairs(prompt):
    """The reply to a prompt: the move that merges most, now and next."""
    lines = prompt.removesuffix("<assistant>").rpartition("<user>")[2].splitlines()
    board = tuple(tuple(0 if cell == "_" else int(cell) for cell in line.split()) for line in lines)
    after = {move: push(board, move) for move in MOVES}
    return max((m for m in MOVES if after[m][0] != board), key=lambda m: after[m][1] + pairs(after[m][0]))


@weave.op
async def rollout(model: art.TrainableModel, scenario: Scenario) -> art.Trajectory:
    """ART's rollout: one conversation with all turns."""
    client, game = AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key), Game(scenario)
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "system", "content": RULES}], metadata={"seed": scenario.seed}, reward=0
    )
    position = [{"role": "user", "content": game.drawn()}]
    await client.responses.create(input=position, model=model.get_inference_name())  # not a call either
    while not game.over():
        trajectory.messages_and_choices.append({"role": "user", "content": game.drawn()})
        completion = await client.chat.completions.create(
            max_completion_tokens=16, messages=trajectory.messages(), model=model.get_inference_name(), logprobs=True
        )
        trajectory.messages_and_choices.append(completion.choices[0])
        game.play(completion.choices[0].message.content)
    trajectory.reward = reward(game)
    trajectory.metrics = {"win": game.won(), "moves": game.moves, "max_value": max(game.tiles())}
    return trajectory


def tidy(trajectory):
    """A judge: fewer moves are better."""
    return 1 - trajectory.metrics["moves"] / 100, f"The game took {trajectory.metrics['moves']} moves."


async def main(result, n_rollouts, opening, fails):
    served = endpoint(Following(most_pairs, 400_000))
    served.start()
    model = art.TrainableModel(
        name="agent-001",
        project="2048",
        base_model="smollm2-135m",
        inference_base_url=served.base_url,
        inference_api_key=served.api_key,
        inference_model_name="ttt@3",
        base_path=str(result.parent / "runs"),
        report_to=["weave"],
    )
    REGISTERED[id(model)] = model
    weave.init(model.project, settings={"print_call_link": False})
    start_s, groups = time.perf_counter(), []
    for step in (1, 2):
        scenarios = [Scenario(10 * step + n, 64, opening) for n in range(2)]
        groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(
                    (rollout(model, scenario) for _ in range(n_rollouts // 4)),
                    metadata={"scenario_id": f"game {scenario.seed}"},
                )
                for scenario in scenarios
            ),
            pbar_desc=None,
            bus=Bus(),
            step=step,
            after_each=(lambda group: art.ruler_score_group(group, tidy)) if step == 2 else None,
        )
        await model.log(groups, split="train", step=step)
    model._reports.end(60)
    training_s = time.perf_counter() - start_s
    if not fails:
        client = AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key)
        position = [{"role": "user", "content": Game(Scenario(1, 64, opening)).drawn()}]
        await client.responses.create(input=position, model=model.get_inference_name())  # outside: a call of its own
        weave.get_client().flush()
    logged = [group for step in (1, 2) for group in model.store.read_groups("train", step)]
    tokens = [[sampled_tokens(choice) for choice in choices(t)] for group in logged for t in group]
    served.stop()
    rows = [
        {
            "call": t.metadata["weave_call"],
            "url": t.metadata["weave_url"],
            "rollout": t.metadata["rollout_id"],
            "group": group.metadata["group_id"],
            "reward": t.reward,
            "explanation": t.metadata.get("ruler_explanation", ""),
            "text": t.messages()[1]["content"],
            "turns": len(choices(t)),
        }
        for group in logged
        for t in group
    ]
    for row, each in zip(rows, tokens, strict=True):
        row["prompt_tokens"] = sum(len(choice.prompt_ids) for choice in each)
        row["completion_tokens"] = sum(len(choice.token_ids) for choice in each)
    part = result.with_suffix(".part")
    part.write_text(json.dumps({"rows": rows, "seconds_s": training_s, "key": served.api_key}))
    part.rename(result)


asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] == ["fails"]))
