"""Two figures of `RayBackend`: the time that the router adds to a request, and the speed of two small replicas.

    .venv-ray/bin/python benchmarks/ray_replicas.py [--rounds 3]

The embedded model samples on this machine, first with two replicas of one thread each, then with one replica of two
threads. Requests to this replica go through the router and directly to it in turns. The last line of stdout is a JSON
object with all raw values.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from statistics import median
from unittest import mock

import openai

import art_nb as art
from art_nb.distributed import ray_backend

CONVERSATIONS, TURNS, TOKENS = 32, 3, 32
REQUESTS = 200


async def rollout(model, scenario):
    """A conversation with a fixed number of turns and tokens."""
    question = {"role": "user", "content": f"Tell me about the number {scenario}."}
    trajectory = art.Trajectory(messages_and_choices=[question], reward=0.0)
    for _ in range(TURNS):
        reply = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(),
            messages=trajectory.messages(),
            max_tokens=TOKENS,
            logprobs=True,
            extra_body={"ignore_eos": True},
        )
        trajectory.messages_and_choices += [reply.choices[0], {"role": "user", "content": "Go on."}]
    return trajectory


async def start(samplers: int, threads: int, folder: str):
    """Return a backend and its model, whose replicas have a number of threads."""
    backend = art.RayBackend(samplers=samplers, learners=1, address="local", path=folder, device="cpu", verbose=False)
    model = art.TrainableModel(name=f"replicas-{samplers}", project="bench", base_model="smollm2-135m")
    with mock.patch.object(ray_backend, "usable_cores", return_value=threads * (samplers + 1)):
        await model.register(backend)
    return backend, model


async def rollouts_per_hour(model, first: int) -> float:
    """Return the rollouts per hour of one group of concurrent conversations."""
    begin = time.perf_counter()
    await art.gather_trajectories(rollout(model, first + i) for i in range(CONVERSATIONS))
    return CONVERSATIONS * 3600 / (time.perf_counter() - begin)


async def request_durations(client, name: str) -> list[float]:
    """Return the milliseconds of each of several requests for one token, one after the other."""
    durations = []
    for _ in range(REQUESTS):
        begin = time.perf_counter()
        await client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Hi"}], max_tokens=1)
        durations.append(1000 * (time.perf_counter() - begin))
    return durations


async def main(rounds: int) -> dict:
    """Measure both figures. Return all raw values."""
    speeds, latencies = {"2 replicas, 1 thread": [], "1 replica, 2 threads": []}, {"router": [], "direct": []}
    with tempfile.TemporaryDirectory() as folder:
        for kind, shape in zip(speeds, [(2, 1), (1, 2)], strict=True):
            backend, model = await start(*shape, folder)
            await rollouts_per_hour(model, 0)  # compiles and fills the caches
            for number in range(rounds):
                speeds[kind].append(round(await rollouts_per_hour(model, 1000 * (number + 1))))
            if shape == (1, 2):
                ((_, url, key, _),) = backend.runtime(model).sampler.table.addresses()
                async with openai.AsyncOpenAI(base_url=url, api_key=key) as direct:
                    clients = {"router": model.openai_client(), "direct": direct}
                    for path in [*clients] * (rounds + 1):
                        durations = await request_durations(clients[path], model.get_inference_name())
                        latencies[path].append(median(durations))
            await backend.close()
    latencies = {path: [round(value, 3) for value in values[1:]] for path, values in latencies.items()}
    return {"rollouts_per_hour": speeds, "median_ms": latencies, "load": os.getloadavg()[0]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    print(json.dumps(asyncio.run(main(parser.parse_args().rounds))))
