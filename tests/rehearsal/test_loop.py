"""LocalBackend on the fake GPU: the whole loop, and how often the host waits for the device."""

import asyncio

import pytest
import torch
from support import fake_gpu
from support.gpu_parts import grouped_rows, groups_of, learner_on, reply

import art_nb as art
from art_nb.learners.base import StepConfig

# Host synchronizations: the limit, which is today's number, and the target. Lower a limit when the code waits less.
WAITS = {
    "per segment of a micro-batch": (0, 0),
    "per micro-batch besides its segments": (8, 1),
    "per optimizer step besides its micro-batches": (13, 4),
    "per sampled step of all requests": (3, 1),
    "per prompt": (1, 1),
}
TRAIN_CALLS = [
    {},
    {"loss_fn": "ppo", "kl_coef": 0.1},
    {"kl_shaping": 0.1},
    {"rescored": True},
    {"rows_per_step": 4},
    {"entropy_coef": 0.01},
]


@pytest.fixture
def backend(tmp_path):
    """A backend on the fake GPU."""
    return art.LocalBackend(path=tmp_path / "runs", device=fake_gpu.NAME, dtype="float32", verbose=False)


async def test_the_whole_loop_runs(backend, named, tmp_path):
    model = named()
    async with backend:
        await model.register(backend)
        assert backend.runtime(model).policy.device.type == fake_gpu.NAME
        choices = await asyncio.gather(*(reply(model, seed) for seed in range(12)))
        restricted = [{"top_k": 5}, {"min_p": 0.1}, {"guided_choice": ["B1", "C2"]}]
        some = [reply(model, i, extra_body=extra, top_logprobs=2) for i, extra in enumerate(restricted)]
        *_, guided = await asyncio.gather(*some, reply(model, 4, top_p=0.8, temperature=0.7), reply(model, 5))
        assert (await reply(model, 2, extra_body=restricted[2])).message.content in ("B1", "C2")
        for step, options in enumerate(TRAIN_CALLS, 1):
            result = await backend.train(model, groups_of(choices), learning_rate=1e-3, **options)
            assert result.step == step
            assert 0 < result.metrics["loss/grad_norm"] < 100, options
            assert abs(result.metrics["offpolicy/logprob_diff_mean"]) < 0.5, options
        trained = [await reply(model, 7), await reply(model, 7, model.get_inference_name(3))]
        assert trained[0].message.content != trained[1].message.content or trained[0].logprobs != trained[1].logprobs
    # The checkpoint is the same adapter on a device that computes differently.
    again = named()
    async with art.LocalBackend(path=tmp_path / "runs", device="cpu", dtype="float32", verbose=False) as on_cpu:
        await again.register(on_cpu)
        assert await again.get_step() == len(TRAIN_CALLS)
        same = await reply(again, 7)
        ours, theirs = ([t.logprob for t in choice.logprobs.content] for choice in (same, trained[0]))
        assert same.message.content == trained[0].message.content
        assert ours == pytest.approx(theirs, abs=1e-4)


def check_waits(report, name, measured, places):
    """Report a measured number of waits with its limit and target, and compare it with the limit."""
    limit, target = WAITS[name]
    where = ", ".join(f"{place} {count}" for place, count in places.most_common(4))
    report("host synchronizations", f"{name:45} {measured:4g}  limit {limit:3}  target {target:2}  {where}")
    assert measured <= limit, where


def step_waits(learner, groups, size):
    """Return the waits of an optimizer step with one micro-batch for each group, and one segment for each row."""
    config = StepConfig(learning_rate=1e-4, tokens_per_batch=1024 if groups == 1 else 1)
    with fake_gpu.counted_waits() as found:
        learner.step(grouped_rows(groups, size), config)
    return found


def test_waits_of_a_training_step_are_bounded(report):
    learner = learner_on(fake_gpu.NAME, "qwen3", torch.float32)
    learner.step(grouped_rows(), StepConfig(learning_rate=1e-4))  # the optimizer allocates its state
    alone, more_rows, more_batches = (step_waits(learner, *shape) for shape in ((1, 1), (1, 5), (3, 1)))
    segment = (more_rows.total() - alone.total()) / 4
    batch = (more_batches.total() - alone.total()) / 2 - segment
    check_waits(report, "per segment of a micro-batch", segment, more_rows - alone)
    check_waits(report, "per micro-batch besides its segments", batch, more_batches - alone)
    check_waits(report, "per optimizer step besides its micro-batches", alone.total() - segment - batch, alone)


async def test_waits_of_the_sampler_are_bounded(backend, named, report):
    model, found = named(), []
    async with backend:
        await model.register(backend)
        for requests, tokens in ((1, 8), (4, 8), (4, 24)):
            with fake_gpu.counted_waits() as waits:
                await asyncio.gather(*(reply(model, 10 * tokens + i, max_tokens=tokens) for i in range(requests)))
            found.append(waits)
    one, four, longer = found
    check_waits(report, "per sampled step of all requests", (longer.total() - four.total()) / 16, longer - four)
    check_waits(report, "per prompt", (four.total() - one.total()) / 3, four - one)
