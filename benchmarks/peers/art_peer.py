"""ART's conversion of trajectories to packed tensors, and its gather."""

import asyncio
import json
import time
from pathlib import Path

import art
from art.preprocessing.pack import packed_tensors_from_tokenized_results
from art.preprocessing.tokenize import tokenize_trajectory_groups
from openai.types.chat.chat_completion import Choice
from talk import serve
from transformers import AutoTokenizer

HELD = {}


def setup(model: str, path: str | None = None) -> dict:
    """Read the trajectories."""
    HELD["tokenizer"] = AutoTokenizer.from_pretrained(model)
    groups = json.loads(Path(path).read_text()) if path else []
    HELD["groups"] = [art.TrajectoryGroup([_trajectory(t) for t in group]) for group in groups]
    return {}


def _trajectory(record: dict) -> art.Trajectory:
    entries = [Choice.model_validate(e) if "finish_reason" in e else e for e in record["messages_and_choices"]]
    return art.Trajectory(messages_and_choices=entries, reward=record["reward"])


def pack() -> dict:
    """Tokenize and pack with the settings of ART's LocalBackend."""
    start = time.perf_counter()
    results = list(tokenize_trajectory_groups(HELD["tokenizer"], HELD["groups"], False, True))
    middle = time.perf_counter()
    length = -(-max(len(r.token_ids) for r in results) // 2048) * 2048
    packed = packed_tensors_from_tokenized_results(
        results, length, pad_token_id=HELD["tokenizer"].eos_token_id, truncate_long_results=False
    )
    end = time.perf_counter()
    return {
        "seconds": end - start,
        "tokenize_seconds": middle - start,
        "trained": int(packed["assistant_mask"].sum()),
        "tokens": sum(len(r.token_ids) for r in results),
    }


def gather(url: str, n: int, turns: int) -> dict:
    """Run `n` rollouts of `turns` requests each."""
    model = art.Model(
        name="stub", project="bench", inference_api_key="none", inference_base_url=url, inference_model_name="stub"
    )

    async def rollout() -> art.Trajectory:
        client, messages = model.openai_client(), [{"role": "user", "content": "Go on."}]
        for _ in range(turns):
            completion = await client.chat.completions.create(model="stub", messages=messages, max_completion_tokens=16)
            messages.append({"role": "assistant", "content": completion.choices[0].message.content})
        return art.Trajectory(messages_and_choices=messages, reward=1.0)

    async def timed() -> float:
        start = time.perf_counter()
        groups = (art.TrajectoryGroup(rollout() for _ in range(8)) for _ in range(n // 8))
        await art.gather_trajectory_groups(groups, max_exceptions=0)
        return time.perf_counter() - start

    return {"seconds": asyncio.run(timed())}


if __name__ == "__main__":
    serve({"setup": setup, "pack": pack, "gather": gather})
