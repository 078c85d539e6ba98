"""The costs of a reply, a rollout, an event and an adapter in the process of the notebook, which limit one process.

    .venv-ray/bin/python benchmarks/ray_limits.py [--rounds 3]

The costs are CPU times of one core. An endpoint in another process returns the same reply of 300 tokens to each
request. A rollout has 8 such turns. The last figure is the time until two other nodes of a Ray cluster, here processes
of this machine, have an adapter of 84 MB as tensors. The last line of stdout is a JSON object with all raw values.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

import numpy as np
import openai
import ray
from ray.cluster_utils import Cluster
from rollout_workers import serve

import art_nb as art
from art_nb.core.events import Bus, RolloutDone
from art_nb.distributed.replicas import tensors_from_arrays
from art_nb.distributed.rollout_calls import RolloutReport, decode_result, encode_result
from art_nb.distributed.routing import ReplicaRecord, RouterTransport, RoutingTable
from art_nb.models.clients import ShardedTransport, httpx
from art_nb.runs.store import RunStore, record_events
from art_nb.tokens.rows import group_rows

TOKENS, TURNS, GROUPS, ROLLOUTS = 300, 8, 4, 8
REQUESTS, CONCURRENT, EVENTS, REPLICAS = 400, 64, 5000, 8
ADAPTER_MB, ARRAYS = 84, 448  # 8 billion parameters, rank 8: two arrays for each of 7 layers in 32 blocks


def cpu_ms(action: Callable[[], object], count: int) -> float:
    """Return the CPU time of an action in milliseconds, divided by a count."""
    start_s = time.process_time()
    action()
    return 1000 * (time.process_time() - start_s) / count


async def request_ms(send: Callable[[], Awaitable[object]]) -> float:
    """Return the CPU time of one request in milliseconds, while others are open."""
    gate = asyncio.Semaphore(CONCURRENT)

    async def one() -> None:
        async with gate:
            await send()

    start_s = time.process_time()
    await asyncio.gather(*(one() for _ in range(REQUESTS)))
    return 1000 * (time.process_time() - start_s) / REQUESTS


async def requests(url: str) -> dict[str, float]:
    """Return the costs of a reply: its bytes, its bytes through the router, and with OpenAI's client."""
    table = RoutingTable()
    table.replicas = {i: ReplicaRecord(i, url, "key", "serving") for i in range(REPLICAS)}
    body = {"model": "bench", "messages": [{"role": "user", "content": "word " * 1200}]}
    costs = {}
    for name, transport in (("bytes", ShardedTransport()), ("bytes, router", RouterTransport(table))):
        async with httpx.AsyncClient(transport=transport, timeout=None) as client:
            costs[name] = await request_ms(lambda client=client: client.post(f"{url}/chat/completions", json=body))
    http = httpx.AsyncClient(transport=RouterTransport(table), timeout=None)
    async with openai.AsyncOpenAI(base_url=url, api_key="key", http_client=http) as client:
        costs["OpenAI's client, router"] = await request_ms(lambda: client.chat.completions.create(**body))
    return {f"reply, {name} (ms)": cost for name, cost in costs.items()}


async def make_groups(url: str) -> list[art.TrajectoryGroup]:
    """Return groups of rollouts with different tokens, as a step has them."""
    draw = random.Random(0)
    async with openai.AsyncOpenAI(base_url=url, api_key="key") as client:
        reply = await client.chat.completions.create(model="bench", messages=[{"role": "user", "content": "x"}])

    def trajectory() -> art.Trajectory:
        entries: list = [{"role": "user", "content": "word " * 100}]
        prompt = draw.choices(range(50_000), k=200)
        for _ in range(TURNS):
            choice = reply.choices[0].model_copy(deep=True)
            for entry in choice.logprobs.content:
                entry.logprob = -draw.expovariate(2)
            choice.prompt_token_ids, choice.token_ids = [*prompt], draw.choices(range(50_000), k=TOKENS)
            prompt = [*prompt, *choice.token_ids, *draw.choices(range(50_000), k=20)]
            entries += [choice, {"role": "user", "content": "Go on."}]
        return art.Trajectory(messages_and_choices=entries[:-1], reward=draw.random())

    return [art.TrajectoryGroup([trajectory() for _ in range(ROLLOUTS)]) for _ in range(GROUPS)]


def rollouts(groups: list[art.TrajectoryGroup], store: RunStore) -> dict[str, float]:
    """Return the costs of a rollout: its rows, its files, and its way from a worker to the notebook."""
    count = GROUPS * ROLLOUTS
    sent = [encode_result(trajectory, RolloutReport()) for group in groups for trajectory in group]
    costs = {
        "rollout, rows (ms)": cpu_ms(lambda: [group_rows(group) for group in groups], count),
        "rollout, files (ms)": cpu_ms(lambda: store.write_groups("train", 1, groups), count),
        "rollout, encode in a worker (ms)": cpu_ms(
            lambda: [encode_result(trajectory, RolloutReport()) for group in groups for trajectory in group], count
        ),
        "rollout, decode in the notebook (ms)": cpu_ms(lambda: [decode_result(content) for content in sent], count),
        "rollout, from a worker (kB)": sum(map(len, sent)) / count / 1000,
    }
    size = sum(path.stat().st_size for path in store.path.glob("trajectories/train/0001*"))
    return costs | {"rollout, files (kB)": size / count / 1000}


def events(store: RunStore) -> dict[str, float]:
    """Return the cost of an event on the bus that is written to the run."""
    bus = Bus("bench")
    stop = record_events(store, bus, "bench")

    def emit() -> None:
        for i in range(EVENTS):
            bus.emit(RolloutDone(rollout=f"{i:032x}", group="group", reward=0.5, seconds_s=1.0))

    cost = cpu_ms(emit, EVENTS)
    stop()
    return {"event (ms)": cost}


@ray.remote
class Node:
    """A process on another node that receives adapters, as a replica does."""

    def load(self, arrays: dict[str, np.ndarray]) -> int:
        """Return the size of an adapter after its arrays were copied to tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors_from_arrays(arrays).values())


def publish_durations(rounds: int) -> list[float]:
    """Return the seconds until two other nodes have an adapter, once per round."""
    size = ADAPTER_MB * 1_000_000 // ARRAYS // 4
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        for name in ("first", "second"):
            cluster.add_node(num_cpus=1, resources={name: 1})
        ray.init(address=cluster.address, log_to_driver=False)
        nodes = [Node.options(resources={name: 1}).remote() for name in ("first", "second")]
        durations = []
        for number in range(rounds + 1):
            arrays = {f"layer {i}": np.full(size, number + i, np.float32) for i in range(ARRAYS)}
            begin = time.perf_counter()
            shared = ray.put(arrays)
            sizes = ray.get([node.load.remote(shared) for node in nodes])
            durations.append(time.perf_counter() - begin)
            assert sizes == [4 * size * ARRAYS] * 2
        return durations[1:]  # the first one includes the start of the processes
    finally:
        ray.shutdown()
        cluster.shutdown()


async def main(rounds: int) -> dict:
    """Measure everything in turns. Return the raw values."""
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    stub = context.Process(target=serve, args=(TOKENS, ports), daemon=True)
    stub.start()
    url, values = f"http://127.0.0.1:{ports.get()}/v1", {}
    groups = await make_groups(url)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            store = RunStore(Path(folder) / str(number))
            figures = {**await requests(url), **rollouts(groups, store), **events(store)}
            for name, value in figures.items() if number else ():  # the first round imports and connects
                values.setdefault(name, []).append(round(value, 3))
    stub.terminate()
    values["adapter of 84 MB to two nodes (s)"] = [round(value, 3) for value in publish_durations(rounds)]
    for name, figures in values.items():
        print(f"{name}: {median(figures):.3g}", flush=True)
    return {"values": values, "load": os.getloadavg()[0]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    print(json.dumps(asyncio.run(main(parser.parse_args().rounds))))
