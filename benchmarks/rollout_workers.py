"""CPU seconds of the notebook's process for 1,000 rollouts, with and without rollout workers.

    .venv-ray/bin/python benchmarks/rollout_workers.py --rollouts 1000 --turns 8 --tokens 200

The replica is replaced by an endpoint that returns the same reply to each request. The figures are therefore the
costs of sending requests, parsing replies and bringing trajectories back, and not of sampling.
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import tempfile
import time

from stub import Stub

import art_nb as art
from art_nb.models.tiny import save_tiny_model
from art_nb.training.steps import TrainOptions, place_rollouts, roll_out_step


def reply(tokens: int) -> bytes:
    """Return the response to a request: a chat completion with token IDs and logprobs, as the endpoint sends it."""
    words = [f" w{i % 10}" for i in range(tokens)]
    entries = [{"token": word, "bytes": [*word.encode()], "logprob": -0.1234567, "top_logprobs": []} for word in words]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "".join(words)},
        "logprobs": {"content": entries, "refusal": None},
        "prompt_token_ids": [*range(100)],
        "token_ids": [*range(tokens)],
        "temperature": 1.0,
        "policy_version": 0,
    }
    usage = {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 100 + tokens}
    body = {"id": "stub", "object": "chat.completion", "created": 0, "model": "bench", "choices": [choice]}
    data = json.dumps(body | {"usage": usage}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data


def serve(tokens: int, ports) -> None:
    """Serve the reply on a free port until the process is ended."""

    async def run():
        Stub.latency_s, Stub.answer = 0.0, reply(tokens)
        server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0, backlog=4096)
        ports.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


async def rollout(model, scenario):
    """Send requests whose conversation becomes longer."""
    trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": "Go on."}], reward=1.0)
    for _ in range(scenario["turns"]):
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages(), logprobs=True
        )
        trajectory.messages_and_choices += [completion.choices[0], {"role": "user", "content": "Go on."}]
    return trajectory


async def measure(model, rollouts: int, turns: int, in_workers: bool) -> dict[str, float]:
    """Return the CPU seconds of this process and the seconds for some rollouts."""
    scenarios = [{"id": i, "turns": turns} for i in range(rollouts // 8)]
    options = TrainOptions(rollout=rollout, scenarios=scenarios, steps=1, groups_per_step=len(scenarios))
    if in_workers:
        options.start = place_rollouts(model, rollout, scenarios)
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    groups = await roll_out_step(model, options, 0, model._bus)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert sum(map(len, groups)) == rollouts
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": round(cpu_s, 2), "seconds": round(time.perf_counter() - start, 2)}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rollouts", 1000), ("turns", 8), ("tokens", 200), ("workers", 1), ("repetitions", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    stub = context.Process(target=serve, args=(arguments.tokens, ports), daemon=True)
    stub.start()
    with tempfile.TemporaryDirectory() as folder:
        options = {"samplers": 1, "rollout_workers": arguments.workers, "address": "local", "device": "cpu"}
        async with art.RayBackend(path=f"{folder}/runs", **options) as backend:
            model = art.TrainableModel(name="bench", project="bench", base_model=str(save_tiny_model(f"{folder}/tiny")))
            await model.register(backend)
            backend.runtime(model).sampler.table.replicas[0].url = f"http://127.0.0.1:{ports.get()}/v1"
            for in_workers in (False, True):  # imports and connections
                await measure(model, 64, arguments.turns, in_workers)
            for _ in range(arguments.repetitions):
                for in_workers in (False, True):
                    figures = await measure(model, arguments.rollouts, arguments.turns, in_workers)
                    print(json.dumps({"workers": arguments.workers * in_workers} | figures), flush=True)
    stub.terminate()


if __name__ == "__main__":
    asyncio.run(main())
