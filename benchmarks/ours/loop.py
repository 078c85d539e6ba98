"""Our whole loop: rollouts through the endpoint, and training, step by step."""

import asyncio
import random
import sys
import tempfile
import time
from functools import partial
from itertools import count

import torch
from shapes import between, ids, opening
from talk import HERE, peak_mb, serve

import art_nb as art
from art_nb.rollouts.trajectories import choices, get_messages
from art_nb.samplers.base import SamplingParams
from art_nb.tokens.rows import group_rows

sys.path.insert(0, str(HERE.parent / "examples" / "tic_tac_toe"))
from tic_tac_toe import random_game
from tic_tac_toe import rollout as play_game

HELD = {}


def setup(model: str) -> dict:
    """Register a model with a LocalBackend in a new directory."""
    loop, trainable = asyncio.new_event_loop(), art.TrainableModel(name="bench", project="bench", base_model=model)
    backend = art.LocalBackend(path=tempfile.mkdtemp(prefix="art-nb-bench-"), verbose=False)
    loop.run_until_complete(trainable.register(backend))
    HELD.update(loop=loop, model=trainable, backend=backend, home=backend.runtime(trainable), spent={})
    watch(HELD["home"].learner, HELD["spent"])
    return {"threads": torch.get_num_threads()}


def watch(learner, spent: dict[str, float]) -> None:
    """Sum the seconds of forward, backward and optimizer, and record the time of the last optimizer step."""

    def timed(name: str, function):
        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - start

        return call

    for name, method in (("forward", "logprobs"), ("optimizer", "update"), ("learner", "step")):
        setattr(learner, method, timed(name, getattr(learner, method)))
    torch.Tensor.backward = timed("backward", torch.Tensor.backward)
    learner.optimizer.register_step_post_hook(lambda *_: spent.update(stepped=time.perf_counter()))


async def rollout(model, seed: int, *, numbers, prompt: int, turns: int, new: int, gap: int) -> art.Trajectory:
    """Play `turns` turns of `new` tokens. The reward is arbitrary."""
    number, entries, client = next(numbers), opening(seed, prompt), model.openai_client()
    for turn in range(turns):
        if turn:
            entries.append(between(seed + 1000 * turn + number, gap))
        completion = await client.chat.completions.create(
            model=model.get_inference_name(),
            messages=get_messages(entries),
            max_completion_tokens=new,
            logprobs=True,
            extra_body={"ignore_eos": True},
        )
        entries.append(completion.choices[0])
    return art.Trajectory(messages_and_choices=entries, reward=float(number % 2))


def counted(groups) -> dict[str, int]:
    """Count the tokens and the sampled tokens of the rows of a step."""
    rows = [row for group in groups for row in group_rows(group)]
    return {
        "tokens": sum(len(row.tokens) for row in rows),
        "trained": sum(int(row.sampled.sum()) for row in rows),
        "rows": len(rows),
    }


def gather(groups: int, size: int, seed: int, **shape) -> dict:
    """Run rollouts without training."""
    play, model = partial(rollout, numbers=count(), **shape), HELD["model"]
    pending = [art.TrajectoryGroup(play(model, seed + g) for _ in range(size)) for g in range(groups)]
    start = time.perf_counter()
    HELD["groups"] = HELD["loop"].run_until_complete(art.gather_trajectory_groups(pending, pbar_desc=None))
    return {"seconds": time.perf_counter() - start, **counted(HELD["groups"])}


def offline(seed: int) -> dict:
    """Sample prompts and replies of the same lengths as in the last gather, without endpoint and messages."""
    turns = [[(c.prompt_token_ids, c.token_ids) for c in choices(t)] for group in HELD["groups"] for t in group]
    size = len(HELD["groups"][0].trajectories)
    runtime = HELD["home"]
    key = runtime.resolve(HELD["model"].get_inference_name())

    async def sample_turns(number: int, lengths: list[tuple[int, int]]) -> None:
        tokens = ids(seed + number // size, lengths[0][0])
        for place, (prompt, new) in enumerate(lengths):
            tokens += ids(seed + 1000 * number + place, prompt - len(tokens))
            params = SamplingParams(max_tokens=new, ignore_eos=True)
            tokens += [token.token_id async for token in runtime.sampler.generate(tokens, params, key)]

    async def sample_all() -> None:
        await asyncio.gather(
            *(sample_turns(i, [(len(p), len(s)) for p, s in exchanges]) for i, exchanges in enumerate(turns))
        )

    start = time.perf_counter()
    HELD["loop"].run_until_complete(sample_all())
    return {"seconds": time.perf_counter() - start, "trained": sum(len(s) for exchanges in turns for _, s in exchanges)}


def step(groups: int, size: int, seed: int, **shape) -> dict:
    """Run a whole step of `art.train`."""
    return _step(partial(rollout, numbers=count(), **shape), range(seed, seed + groups), groups, size)


def _step(play, scenarios, groups: int, size: int) -> dict:
    runtime, spent = HELD["home"], HELD["spent"]
    busy, _ = runtime.sampler.stats()["busy_s"], spent.clear()
    start = time.perf_counter()
    run = art.train(
        HELD["model"],
        play,
        scenarios,
        steps=runtime.step + 1,
        groups_per_step=groups,
        rollouts_per_group=size,
        show=False,
    )
    run.join()
    seconds = time.perf_counter() - start
    metrics, parts = run.history[-1], {"sampler": runtime.sampler.stats()["busy_s"] - busy}
    parts |= {name: spent.get(name, 0.0) for name in ("forward", "backward", "optimizer")}
    return {
        "seconds": seconds,
        "parts": parts,
        "outside": seconds - sum(parts.values()),
        "learner_seconds": spent.get("learner", 0.0),
        "rollout_seconds": metrics["time/step_rollout_s"],
        "train_seconds": metrics["time/step_backend_train_s"],
        "sync_seconds": metrics["time/step_sync_s"],
        **counted(run.groups),
        "peak_mb": peak_mb(),
    }


def warm_up(games: int) -> dict:
    """Teach the model the moves of tic-tac-toe, so that games last longer."""
    trajectories = [random_game(seed) for seed in range(games)]
    config = art.TrainSFTConfig(learning_rate=1e-3, batch_size=16)
    HELD["loop"].run_until_complete(HELD["model"].train_sft(trajectories, config))
    return {}


def games(groups: int, size: int, seed: int) -> dict:
    """Run a step of tic-tac-toe."""
    return _step(play_game, range(seed, seed + groups), groups, size)


def first_token(groups: int, size: int, seed: int, **shape) -> dict:
    """Return the seconds from the optimizer step to the first token of the new policy."""
    gather(groups, size, seed, **shape)
    model, backend = HELD["model"], HELD["backend"]

    async def train_and_ask() -> float:
        result = await backend.train(model, HELD["groups"], learning_rate=1e-4)
        entries = opening(random.getrandbits(32), shape["prompt"])
        await model.openai_client().chat.completions.create(
            model=model.get_inference_name(result.step), messages=entries, max_completion_tokens=1
        )
        return time.perf_counter()

    return {"seconds": HELD["loop"].run_until_complete(train_and_ask()) - HELD["spent"]["stepped"]}


if __name__ == "__main__":
    serve(
        {
            "setup": setup,
            "gather": gather,
            "offline": offline,
            "step": step,
            "warm_up": warm_up,
            "games": games,
            "first_token": first_token,
        }
    )
