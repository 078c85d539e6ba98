"""Our gather with an endpoint that only waits: over HTTP, or in-process like the endpoint of a trained model."""

import asyncio
import tempfile
import time

from stub import BODY
from talk import serve

import art_nb as art
from art_nb.core.events import Bus
from art_nb.serving.asgi import InProcess


class Waiting:
    """A backend whose endpoint waits before it replies."""

    def __init__(self, latency_s: float):
        self.path, self.bus, self.latency_s = tempfile.mkdtemp(prefix="art-nb-bench-"), Bus(), latency_s

    async def register(self, model) -> None:
        pass

    async def _prepare_backend_for_training(self, model, config=None) -> tuple[str, str]:
        return "http://stub/v1", "none"

    def _model_inference_name(self, model, step: int | None = None) -> str:
        return "stub"

    def transport(self, model) -> InProcess:
        return InProcess(self._app)

    async def _app(self, scope, receive, send) -> None:
        await receive()
        await asyncio.sleep(self.latency_s)
        head = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": BODY})


async def _model(url: str | None, latency_s: float) -> art.Model:
    if url:
        return art.Model(
            name="stub", project="bench", inference_api_key="none", inference_base_url=url, inference_model_name="stub"
        )
    model = art.TrainableModel(name="stub", project="bench", base_model="stub")
    await model.register(Waiting(latency_s))
    return model


async def rollout(model, turns: int) -> art.Trajectory:
    """Send `turns` requests."""
    client, messages = model.openai_client(), [{"role": "user", "content": "Go on."}]
    for _ in range(turns):
        completion = await client.chat.completions.create(model="stub", messages=messages, max_completion_tokens=16)
        messages.append({"role": "assistant", "content": completion.choices[0].message.content})
    return art.Trajectory(messages_and_choices=messages, reward=1.0)


def gather(n: int, turns: int, url: str | None = None, latency_s: float = 0.0, bare: bool = False) -> dict:
    """Run `n` rollouts at once in groups of 8, or with `bare` without groups and progress."""

    async def timed() -> float:
        model = await _model(url, latency_s)
        start = time.perf_counter()
        if bare:
            await asyncio.gather(*(rollout(model, turns) for _ in range(n)))
        else:
            groups = (art.TrajectoryGroup(rollout(model, turns) for _ in range(8)) for _ in range(n // 8))
            await art.gather_trajectory_groups(groups)
        return time.perf_counter() - start

    return {"seconds": asyncio.run(timed())}


if __name__ == "__main__":
    serve({"gather": gather})
