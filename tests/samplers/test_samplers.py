"""The sampler against transformers' own forward: crowds, turns, cancellations, cuts, memory, adapters, failures."""

import asyncio
import random
import threading
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.families import FAMILIES, VOCABULARY, logits, merged, plain, policy, random_adapter

from art_nb.core.types import ServeError
from art_nb.policy.device import DeviceThread
from art_nb.policy.kv_cache import SlotAttention
from art_nb.samplers.base import SamplingParams
from art_nb.samplers.transformers import DRAW_BLOCK, TransformersSampler, noise_size, sample_tokens, seeded_noise

CLOSE = 1e-4
SLACKS = 0.0, 1e-8, -1e-8, 1e-7, -1e-7, 1e-6, -1e-6, 1e-5, -1e-5  # a wide one alone takes in two tokens at once
EOS = 2


@pytest.fixture
def made():
    """A maker of samplers whose workers end with the test."""
    workers = []

    def make(family="llama", **options):
        workers.append(DeviceThread())
        return TransformersSampler(policy(family), workers[-1], **options)

    yield make
    for worker in workers:
        worker.close()


@dataclass
class Said:
    """One reply as it came out."""

    prompt: list[int]
    params: SamplingParams
    sampled: list

    @property
    def ids(self):
        return [s.token_id for s in self.sampled]

    @property
    def text(self):
        return "".join(s.text for s in self.sampled)


async def ask(sampler, prompt, params=None, adapter=None, leave_after=10**9):
    """A reply, or what of it came before the caller left."""
    params, got = params or SamplingParams(max_tokens=8, ignore_eos=True, seed=0), []
    async with aclosing(sampler.generate(prompt, params, adapter)) as stream:
        async for sampled in stream:
            got.append(sampled)
            if len(got) == leave_after:
                break
    return Said(list(prompt), params, got)


def cut_by_hand(logprobs, params, slack=0.0):
    """The distribution after the cuts, in numpy, one rule after the other; `slack` moves their edges."""
    order = np.argsort(-logprobs, kind="stable")
    p = np.exp(logprobs[order].astype(np.float64))
    keep = np.ones(len(p), bool)
    keep[params.top_k or len(p) :] = False
    keep &= p >= p[0] * params.min_p - slack
    left = np.where(keep, p, 0) / p[keep].sum()
    keep &= np.cumsum(left) - left < params.top_p + slack
    keep[0] = True
    out = np.zeros(len(p))
    out[order] = np.where(keep, p, 0)
    return out / out.sum()


def expected(model, said):
    """The logprob of each sampled token by the plain model and by hand [slack, token]."""
    rows = logits(model, said.prompt + said.ids)[len(said.prompt) - 1 : -1] / (said.params.temperature or 1.0)
    rows = rows.log_softmax(-1).numpy()
    with np.errstate(divide="ignore"):
        return np.array(
            [
                [np.log(cut_by_hand(row, said.params, slack)[token]) for row, token in zip(rows, said.ids, strict=True)]
                for slack in SLACKS
            ]
        )


def check(model, said):
    """What was reported is what transformers says; a token on the very edge of a cut may fall on either side of it."""
    reported = np.array([s.logprob for s in said.sampled])
    assert np.abs(expected(model, said) - reported).min(0).max() < CLOSE
    assert all(s.finish is None for s in said.sampled[:-1])


def some_params(rng):
    return SamplingParams(
        max_tokens=rng.randint(1, 20),
        temperature=rng.choice([1.0, 1.0, 0.7, 1.4]),
        seed=rng.choice([None, rng.randrange(99)]),
        top_k=rng.choice([0, 0, 5, 40]),
        top_p=rng.choice([1.0, 1.0, 0.8]),
        min_p=rng.choice([0.0, 0.0, 0.3]),
        ignore_eos=rng.random() < 0.7,
    )


def some_ids(rng, low, high):
    return [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(low, high))]


async def converse(sampler, rng, start, adapter=None):
    """A conversation of up to three turns, some of them left early."""
    said, prompt = [], start[: rng.randrange(len(start))] + some_ids(rng, 1, 30)
    for _ in range(rng.randint(1, 3)):
        said.append(await ask(sampler, prompt, some_params(rng), adapter, rng.choice([10**9, 10**9, 3])))
        await asyncio.sleep(rng.random() * 0.01)
        prompt = prompt + said[-1].ids + some_ids(rng, 1, 20)
    return said


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_crowd_of_conversations_is_sampled_from_what_transformers_computes(made, family):
    sampler, rng = made(family, max_running=24, prefill_tokens=200), random.Random(1)
    start = some_ids(rng, 48, 48)
    talks = await asyncio.gather(*(converse(sampler, random.Random(i), start) for i in range(64)))
    said = [reply for talk in talks for reply in talk]
    for reply in said:
        check(plain(family), reply)
    whole = [reply for reply in said if reply.sampled[-1].finish]
    assert 64 < len(whole) < len(said)
    for reply in whole:
        full = len(reply.ids) == reply.params.max_tokens
        stopped = reply.ids[-1] == EOS and not reply.params.ignore_eos
        assert reply.sampled[-1].finish == ("stop" if stopped else "length")
        assert full or reply.sampled[-1].finish == "stop"
    stats = sampler.stats()
    assert stats["cached_tokens"] > 500, "beginnings were used again"
    await ask(sampler, [5, 6, 7])
    assert (stats["waiting"], sampler.stats()["running"]) == (0, 0)


async def test_reused_beginnings_change_nothing(made):
    rng = random.Random(3)
    start, tails = some_ids(rng, 60, 60), [some_ids(rng, 1, 40) for _ in range(12)]
    prompts = [start[: 20 + 4 * i] + tail for i, tail in enumerate(tails)]
    found = []
    for options in ({}, {"prefix_bytes": 0}, {"max_running": 1, "prefix_bytes": 0}, {"prefill_tokens": 1}):
        sampler = made(**options)
        asked = [ask(sampler, p, SamplingParams(max_tokens=10, seed=i, ignore_eos=True)) for i, p in enumerate(prompts)]
        replies = await asyncio.gather(*asked)
        replies += [await ask(sampler, r.prompt + r.ids + [9, 9, 9], r.params) for r in replies]
        found.append(([r.ids for r in replies], np.array([s.logprob for r in replies for s in r.sampled])))
        reused = sampler.stats()["cached_tokens"]
        assert (reused == 0) == (options.get("max_running") == 1)
    for ids, logprobs in found[1:]:
        assert ids == found[0][0]
        np.testing.assert_allclose(logprobs, found[0][1], atol=CLOSE)


async def test_a_seed_draws_the_same_alone_and_in_a_crowd(made):
    sampler, rng = made(), random.Random(4)
    prompt, params = some_ids(rng, 20, 20), SamplingParams(max_tokens=16, seed=11, ignore_eos=True)
    alone = await ask(sampler, prompt, params)
    crowd = [ask(sampler, some_ids(rng, 1, 50)) for _ in range(20)]
    again, *_ = await asyncio.gather(ask(sampler, prompt, params), *crowd)
    other = await ask(sampler, prompt, SamplingParams(max_tokens=16, seed=12, ignore_eos=True))
    free = [await ask(sampler, prompt, SamplingParams(max_tokens=16, ignore_eos=True)) for _ in range(2)]
    assert alone.ids == again.ids != other.ids
    assert free[0].ids != free[1].ids


async def test_greedy_takes_the_likeliest_token(made):
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, top_logprobs=3)
    said = await ask(made(), [5, 6, 7, 8], params)
    rows = logits(plain("llama"), said.prompt + said.ids)[3:-1].log_softmax(-1)
    assert said.ids == rows.argmax(-1).tolist()
    np.testing.assert_allclose([s.logprob for s in said.sampled], rows.max(-1).values, atol=CLOSE)
    for row, s in zip(rows, said.sampled, strict=True):
        assert [i for i, _ in s.top] == row.topk(3).indices.tolist()
        np.testing.assert_allclose([p for _, p in s.top], row.topk(3).values, atol=CLOSE)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=7),
        SamplingParams(top_p=0.6),
        SamplingParams(top_p=0.0),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=12, top_p=0.7, min_p=0.05, temperature=1.3),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params):
    torch.manual_seed(0)
    row, n = torch.randn(40) * 2, 40_000
    noise = torch.from_numpy(np.stack([seeded_noise(5, position, noise_size(40)) for position in range(n)]))
    ids, logprobs, _ = sample_tokens(row.expand(n, -1).clone(), [params] * n, noise)
    p = cut_by_hand((row / params.temperature).log_softmax(-1).numpy(), params)
    counts = np.bincount(ids.numpy(), minlength=40)
    assert counts[p == 0].sum() == 0
    some = p > 0
    chi2, freedom = ((counts - n * p)[some] ** 2 / (n * p)[some]).sum(), some.sum() - 1
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom) + 1e-9
    np.testing.assert_allclose(logprobs.numpy(), np.log(p[ids.numpy()]), atol=1e-5)


@pytest.mark.parametrize("edge", [0.0, 1e-45, 1e-30, 100.0])
def test_no_random_number_draws_a_token_that_was_cut(edge):
    rows = torch.randn(64, 5000, generator=torch.Generator().manual_seed(1))
    rows[:, 4000:] = float("-inf")
    noise = torch.ones(64, noise_size(5000))
    noise[:, -DRAW_BLOCK:] = edge
    noise[::2, 1:] = edge
    ids, logprobs, _ = sample_tokens(rows, [SamplingParams(top_k=50)] * 32 + [SamplingParams()] * 32, noise)
    assert torch.isfinite(logprobs).all()
    assert (ids < 4000).all()


async def test_stop_strings(made):
    sampler, prompt = made(), [5, 6, 7]
    whole = await ask(sampler, prompt, SamplingParams(max_tokens=40, seed=2, ignore_eos=True))
    for length in (1, 2, 5):
        for at in range(0, len(whole.text) - length, 3):
            stop = whole.text[at : at + length]
            params = SamplingParams(max_tokens=40, seed=2, ignore_eos=True, stop=("\x00no", stop))
            said = await ask(sampler, prompt, params)
            assert said.text == whole.text[: whole.text.index(stop)]
            assert said.sampled[-1].finish == "stop"
            assert said.ids == whole.ids[: len(said.ids)]


async def test_the_context_ends_a_reply_and_refuses_a_prompt(made):
    sampler = made(max_model_len=64)
    said = await ask(sampler, [5] * 50, SamplingParams(max_tokens=500, ignore_eos=True))
    assert len(said.ids) == 14
    assert said.sampled[-1].finish == "length"
    for prompt, word in (([5] * 64, "64"), ([], "empty"), ([VOCABULARY], "vocabulary"), ([-1], "vocabulary")):
        with pytest.raises(ServeError, match=word):
            await ask(sampler, prompt)
    with pytest.raises(ServeError, match="No adapter"):
        await ask(sampler, [5], adapter="nobody@3")


def slot_bytes(sampler, tokens):
    slots = sampler._slots
    return slots.layers * 2 * slots.heads * tokens * slots.dim * 4


@pytest.mark.parametrize("places", [128, 3 * 128, 1000])
async def test_where_memory_is_short_replies_wait_and_are_right(made, places):
    sampler = made(max_running=16)
    sampler._slots.max_bytes = limit = slot_bytes(sampler, places)
    sizes, most, rng = range(10, 330, 20), [0], random.Random(6)

    def tick():
        more = sampler._iterate()
        most.append(sampler._slots.kv.nbytes)
        return more

    sampler.worker.idle_work(tick)
    prompts = [some_ids(rng, n, n) for n in sizes]
    asked = [ask(sampler, p, SamplingParams(max_tokens=60, seed=i, ignore_eos=True)) for i, p in enumerate(prompts)]
    for said in await asyncio.gather(*asked):
        assert len(said.ids) == 60
        check(plain("llama"), said)
    one = slot_bytes(sampler, 448)  # the longest conversation alone may always run
    assert max(most) <= max(limit, one)


async def test_a_long_conversation_takes_the_memory_that_many_short_ones_had(made):
    sampler = made(max_running=16)
    sampler._slots.max_bytes = slot_bytes(sampler, 16 * 128)
    short = [ask(sampler, [5 + i] * 40) for i in range(16)]
    await asyncio.gather(*short)
    for prompt, tokens in (([7] * 300, 150), ([8] * 100, 300)):
        said = await ask(sampler, prompt, SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True))
        check(plain("llama"), said)
        assert len(said.ids) == tokens
        assert sampler._slots.kv.nbytes <= sampler._slots.max_bytes
        await asyncio.gather(*(ask(sampler, [5 + i] * 40) for i in range(16)))
    assert sampler.stats()["cached_tokens"] >= 2 * 16 * 32, "nothing was forgotten on the way"


async def test_adapters_take_turns(made):
    sampler = made(max_running=8)
    adapters = {f"m@{i}": random_adapter(sampler.policy, i) for i in range(3)}
    models = {key: merged("llama", sampler.policy, weights) for key, weights in adapters.items()}
    models[None] = plain("llama")
    for key, weights in adapters.items():
        sampler.load(key, weights)
    start = some_ids(random.Random(0), 48, 48)
    keys = [*models] * 6
    talks = await asyncio.gather(*(converse(sampler, random.Random(i), start, key) for i, key in enumerate(keys)))
    for key, talk in zip(keys, talks, strict=True):
        for said in talk:
            check(models[key], said)


async def test_a_reply_ends_under_the_weights_it_began_with(made):
    sampler, prompt = made(), some_ids(random.Random(2), 40, 40)
    params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    old, new = (random_adapter(sampler.policy, seed) for seed in (1, 2))
    sampler.load("m", old)
    stream = sampler.generate(prompt, params, "m")
    before = [await anext(stream)]
    sampler.unload("m")
    sampler.load("m", new)
    after = await ask(sampler, prompt, params, "m")  # the beginning that is kept is of other weights
    before += [s async for s in stream]
    check(merged("llama", sampler.policy, old), Said(prompt, params, before))
    check(merged("llama", sampler.policy, new), after)
    again = await ask(sampler, prompt + after.ids + [9], params, "m")
    check(merged("llama", sampler.policy, new), again)


async def test_a_learner_between_two_tokens_disturbs_no_reply(made):
    from art_nb.policy.adapters import load_adapter

    sampler, params = made(), SamplingParams(max_tokens=60, seed=1, ignore_eos=True)
    old, new = (random_adapter(sampler.policy, seed) for seed in (1, 2))
    sampler.load("m@0", old)

    def learn():
        load_adapter(sampler.policy, new)
        sampler.load("m@1", new)

    replies = [asyncio.create_task(ask(sampler, [5 + i, 6], params, "m@0")) for i in range(4)]
    while sampler.stats()["sampled_tokens"] < 20:
        await asyncio.sleep(0.001)
    sampler.worker.call(learn)
    newer = await ask(sampler, [5, 6], params, "m@1")
    for said in await asyncio.gather(*replies):
        check(merged("llama", sampler.policy, old), said)
    check(merged("llama", sampler.policy, new), newer)


async def test_a_failing_forward_fails_its_requests_and_no_others(made, monkeypatch):
    sampler = made(max_running=4)
    broken, attend = threading.Event(), SlotAttention.__call__

    def fail(self, layer, *args):
        if layer == 1 and broken.is_set():
            raise MemoryError("out of it")
        return attend(self, layer, *args)

    monkeypatch.setattr(SlotAttention, "__call__", fail)
    stream = sampler.generate([5, 6, 7], SamplingParams(max_tokens=400, ignore_eos=True))
    await anext(stream)
    broken.set()
    with pytest.raises(ServeError, match="sampler ran out of memory: out of it. Lower max_running") as caught:
        async for _ in stream:
            pass
    assert caught.value.status == 500
    with pytest.raises(ServeError):
        await ask(sampler, [5, 6, 8])
    broken.clear()
    said = await ask(sampler, [5, 6, 7] * 20)
    check(plain("llama"), said)


async def test_an_adapter_that_does_not_fit_is_refused_and_the_sampler_lives(made):
    sampler = made()
    smaller = {name: t[:, :4] if "lora_B" in name else t[:4] for name, t in random_adapter(sampler.policy, 0).items()}
    for wrong in (smaller, {}, {"other.lora_A.weight": torch.zeros(8, 64)}):
        with pytest.raises(ServeError, match="does not fit"):
            sampler.load("m@1", wrong)
    check(plain("llama"), await ask(sampler, [5, 6, 7]))


async def test_closing_ends_every_request(made):
    sampler, params = made(max_running=4), SamplingParams(max_tokens=400, ignore_eos=True)
    asked = [asyncio.create_task(ask(sampler, [5 + i], params)) for i in range(12)]
    while sampler.stats()["sampled_tokens"] < 10:
        await asyncio.sleep(0.001)
    sampler.worker.call(sampler.close)
    for task in asked:
        with pytest.raises(ServeError, match="closed") as caught:
            await asyncio.wait_for(task, 60)
        assert caught.value.status == 503
    with pytest.raises(ServeError, match="closed"):
        await asyncio.wait_for(ask(sampler, [5]), 60)
    assert sampler._slots.kv.numel() == 0
    assert sampler.stats()["prefix_bytes"] == 0


async def test_no_request_is_lost_between_asking_and_closing(made):
    for seed in range(10):
        sampler, rng = made(), random.Random(seed)

        async def later(sampler=sampler, rng=rng):
            await asyncio.sleep(rng.random() * 0.02)
            while True:
                await ask(sampler, [5, 6], SamplingParams(max_tokens=2, ignore_eos=True))

        asked = [asyncio.create_task(later()) for _ in range(8)]
        await asyncio.sleep(rng.random() * 0.02)
        await asyncio.to_thread(sampler.worker.call, sampler.close)
        sampler.worker.close()
        errors = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)
        assert all(isinstance(error, ServeError) and "closed" in str(error) for error in errors)


def test_event_loops_can_change(made):
    sampler = made(max_running=8)

    async def leave():
        asked = [ask(sampler, [5 + i], SamplingParams(max_tokens=400, ignore_eos=True)) for i in range(4)]
        await asyncio.wait(map(asyncio.ensure_future, asked), timeout=0.02)

    def visit():
        asyncio.run(leave())

    visitors = [threading.Thread(target=visit) for _ in range(4)]
    for thread in visitors:
        thread.start()
    said = asyncio.run(ask(sampler, [5, 6, 7]))
    for thread in visitors:
        thread.join()
    check(plain("llama"), said)
    asyncio.run(ask(sampler, [5, 6, 7]))
    assert sampler.stats()["running"] == sampler.stats()["waiting"] == 0
