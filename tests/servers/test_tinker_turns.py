"""The values of prompts (`compute_logprobs`) take turns with replies, and the sampler works in between."""

import asyncio

import pytest

from art_nb.samplers.base import SamplingParams
from art_nb.servers.request_queues import FairSlots
from art_nb.servers.shared_model import PromptQuestion, SharedModel
from art_nb.servers.tinker_forms import PromptForm, SampleForm, SamplingForm
from art_nb.servers.tinker_sampling import SamplingSession, sample_replies


@pytest.fixture(scope="module")
def shared(tiny_model_dir):
    model = SharedModel(str(tiny_model_dir), device="cpu", dtype="float32")
    yield model
    model.close()


async def test_values_of_a_prompt_wait_for_a_slot(shared, monkeypatch):
    score, scored = shared.score_prompt, []
    monkeypatch.setattr(shared, "score_prompt", lambda *args: scored.append(args) or score(*args))
    session, slots = SamplingSession("s:sample:0", ("s",), shared, None), FairSlots(1)
    form = SampleForm(
        sampling_session_id=session.id,
        seq_id=0,
        num_samples=1,
        prompt=PromptForm(chunks=[{"tokens": [5, 6, 7]}]),
        sampling_params=SamplingForm(max_tokens=1, seed=1),
        prompt_logprobs=True,
    )
    async with slots.slot("other"):
        requests = [asyncio.ensure_future(sample_replies(session, form, slots)) for _ in range(3)]
        await asyncio.sleep(0.2)
        assert not scored and not any(request.done() for request in requests)
    assert len({*await asyncio.gather(*requests)}) == 1
    assert len(scored) == 3
    assert not slots.running


async def test_the_sampler_works_between_the_values_of_many_prompts(shared):
    tokens, question = [], PromptQuestion(logprobs=True)

    async def sample():
        params = SamplingParams(max_tokens=400, temperature=1.0, seed=0, ignore_eos=True)
        async for item in shared.sampler.generate([5, 6, 7], params, None):
            tokens.append(item.token_id)

    reply = asyncio.ensure_future(sample())
    while not tokens:
        await asyncio.sleep(0.01)
    before, prompt = len(tokens), [*range(5, 205)]
    await asyncio.gather(*(shared.worker.result(shared.score_prompt, prompt, None, question) for _ in range(20)))
    during = len(tokens) - before
    reply.cancel()
    await asyncio.wait({reply})
    assert reply.cancelled()
    assert during >= 10
