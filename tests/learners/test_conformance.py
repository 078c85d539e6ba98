"""The learner against transformers' un-packed forward with peft's LoRA, in fp32: logprobs, losses, gradients, steps."""

import asyncio
import copy
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.families import FAMILIES, SHAPE, VOCABULARY, plain, policy, random_adapter, tokenizer
from transformers import AutoModelForCausalLM, Gemma2Config, Llama4TextConfig

from art_nb.core.types import ServeError, TrainError
from art_nb.learners.base import Learner, StepConfig, optimizer_steps
from art_nb.policy.adapters import copy_adapter, load_adapter, masters
from art_nb.policy.device import DeviceThread
from art_nb.policy.loading import load_policy
from art_nb.policy.lora import TARGETS
from art_nb.policy.packing import WeightedRow, micro_batches
from art_nb.samplers.base import SamplingParams
from art_nb.samplers.transformers import TransformersSampler

CLOSE = 1e-5
families = pytest.mark.parametrize("family", FAMILIES)
CUTS = [(2048, True), (2048, False), (96, True), (32, True), (1, False)]


def learner(family, seed=1, **options):
    """A learner whose adapter does something."""
    made = Learner(policy(family), **options)
    load_adapter(made.policy, random_adapter(made.policy, seed, 0.05))
    return made


def peft_model(family, weights):
    """transformers' model under peft, with our adapter's numbers."""
    config = LoraConfig(r=8, lora_alpha=16, target_modules=list(TARGETS), lora_dropout=0.0)
    model = get_peft_model(copy.deepcopy(plain(family)), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(weights[ours(name)])
    return model


def ours(name):
    return name.removeprefix("base_model.model.").replace(".default", "")


def some_rows(seed, groups=3, size=6):
    """Rows that fork at several depths, twins among them, with untrained turns between and unknown logprobs."""
    rng, rows = np.random.default_rng(seed), []
    for group in range(groups):
        trunk = rng.integers(3, VOCABULARY, 40)
        for _ in range(size):
            tokens = np.concatenate([trunk[: rng.integers(4, 40)], rng.integers(3, VOCABULARY, rng.integers(1, 40))])
            sampled = rng.random(len(tokens)) < 0.6
            sampled[:3], sampled[-1] = False, True
            old = np.where(sampled & (rng.random(len(tokens)) < 0.9), -rng.random(len(tokens)) * 3 - 4, np.nan)
            advantage, coef = rng.normal(), rng.random() / 9
            rows.append(WeightedRow(tokens.astype(np.int32), sampled, old.astype(np.float32), group, advantage, coef))
        rows.append(replace(rows[-1], advantage=-rows[-1].advantage))
    return rows


def grads(made, rows, **config):
    """The loss and the gradients of one step that is not taken, through the learner's own `step`."""
    found, before = {}, copy_adapter(made.policy)

    class Enough(Exception):
        pass

    def on_progress(done, of, tokens):
        if done == of:
            found.update({name: master.grad.clone() for name, master in masters(made.policy).items()})
            raise Enough

    with pytest.raises(Enough):
        made.step(rows, StepConfig(**config), on_progress)
    assert all(torch.equal(before[name], now) for name, now in copy_adapter(made.policy).items())
    return found


def their_logprobs(model, row, temperature=1.0):
    """Logprobs and entropies of the trained tokens of a row."""
    ids = torch.tensor(row.tokens.tolist())
    logits = model(input_ids=ids[None]).logits[0, :-1].float() / temperature
    logp = logits.log_softmax(-1)
    at = torch.tensor(row.sampled[1:])
    return logp.gather(-1, ids[1:, None])[at, 0], -(logp.exp() * logp).sum(-1)[at]


def their_loss(model, rows, temperature=1.0, kl_coef=0.0, entropy_coef=0.0, cap=5.0):
    """CISPO with its extras, row by row, as the papers write it."""
    loss = 0.0
    for row in rows:
        logp, entropy = their_logprobs(model, row, temperature)
        old = torch.tensor(row.logprobs[1:][row.sampled[1:]])
        ratio = torch.where(old.isnan(), torch.ones_like(logp), (logp - old).exp()).detach().clamp(max=cap)
        part = -ratio * row.advantage * logp - entropy_coef * entropy
        if kl_coef:
            with torch.no_grad(), model.disable_adapter():
                d = their_logprobs(model, row, temperature)[0]
            part = part + kl_coef * ((d - logp).exp() - (d - logp) - 1)
        loss = loss + (row.coef * part).sum()
    return loss


def their_grads(model, loss):
    model.zero_grad()
    loss.backward()
    return {ours(name): p.grad.clone() for name, p in model.named_parameters() if "lora_" in name}


def worst(ours, theirs):
    """The largest difference of two sets of gradients, relative to the largest gradient where that is above one."""
    assert ours.keys() == theirs.keys()
    size = max(1.0, *(float(g.abs().max()) for g in theirs.values()))
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours) / size


@families
@pytest.mark.parametrize(("tokens", "share"), CUTS)
def test_packed_logprobs_are_those_of_each_row_alone(family, tokens, share):
    made, rows = learner(family), some_rows(0)
    model = peft_model(family, copy_adapter(made.policy))
    made.policy.cast_masters()
    seen = 0
    for batch in micro_batches(rows, tokens, share):
        with torch.no_grad():
            logprobs, entropies = made.logprobs(batch, 0.8)
            their = [their_logprobs(model, row, 0.8) for row in batch.rows]
        for mine, theirs in zip((logprobs, entropies), map(torch.cat, zip(*their, strict=True)), strict=True):
            torch.testing.assert_close(mine[batch.node_E], theirs, atol=CLOSE, rtol=0)
        seen += len(batch.rows)
    assert seen == len(rows)


@families
@pytest.mark.parametrize("extras", [{}, {"temperature": 0.7, "kl_coef": 0.2, "entropy_coef": 0.03}], ids=len)
def test_gradients_are_pefts_whatever_the_packing(family, extras):
    made, rows = learner(family), some_rows(1)
    model = peft_model(family, copy_adapter(made.policy))
    theirs = their_grads(model, their_loss(model, rows, **extras))
    assert max(float(g.abs().max()) for g in theirs.values()) > 0.01
    for tokens, share in CUTS:
        assert worst(grads(made, rows, tokens_per_batch=tokens, share_prefixes=share, **extras), theirs) < CLOSE


@families
def test_three_steps_end_where_adamw_on_peft_ends(family):
    made, config = learner(family), StepConfig(learning_rate=3e-3, weight_decay=0.01, max_grad_norm=0.1)
    model = peft_model(family, copy_adapter(made.policy))
    trained = {name: p for name, p in model.named_parameters() if "lora_" in name}
    smallest = {name: torch.full_like(p, torch.inf) for name, p in trained.items()}  # gradients of the three steps
    theirs = torch.optim.AdamW(trained.values(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.01)
    for step in range(3):
        rows = some_rows(step)
        figures = made.step(rows, config)
        loss = their_loss(model, rows)
        theirs.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), 0.1)
        smallest = {name: torch.minimum(smallest[name], p.grad.abs()) for name, p in trained.items()}
        theirs.step()
        assert figures["loss/train"] == pytest.approx(loss.item(), abs=1e-4)
        assert figures["loss/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert norm > 0.1, "the norm is cut"
    mine = copy_adapter(made.policy)
    for name, p in trained.items():
        far = (mine[ours(name)] - p).abs() > 1e-4
        assert not (far & (smallest[name] > 1e-6)).any()  # of a smaller gradient, rounding decides Adam's sign
        assert far.float().mean() < 0.01


@families
def test_supervised_loss_is_transformers_own(family):
    made, rows = learner(family), some_rows(3, groups=1, size=1)[:1]
    model = peft_model(family, copy_adapter(made.policy))
    row = rows[0]
    labels = torch.where(torch.tensor(row.sampled), torch.tensor(row.tokens.tolist()), -100)
    theirs = model(input_ids=torch.tensor([row.tokens.tolist()]), labels=labels[None]).loss
    assert made.sft_step(rows, 0.0)["loss/train"] == pytest.approx(theirs.item(), abs=CLOSE)


def padded(row, n):
    """The row with `n` more tokens that nobody sampled."""
    longer = lambda values, filler: np.concatenate([values, np.full(n, filler, values.dtype)])
    tokens, sampled, logprobs = longer(row.tokens, 0), longer(row.sampled, False), longer(row.logprobs, np.nan)
    return replace(row, tokens=tokens, sampled=sampled, logprobs=logprobs)


@families
def test_order_padding_and_splits_change_nothing(family):
    made, rows = learner(family), some_rows(4)
    wanted = grads(made, rows)
    rng = random.Random(0)
    for tokens, share in CUTS:
        shuffled = rng.sample(rows, len(rows))
        assert worst(grads(made, shuffled, tokens_per_batch=tokens, share_prefixes=share), wanted) < CLOSE
    assert worst(grads(made, [padded(row, rng.randrange(20)) for row in rows]), wanted) < CLOSE
    alone = [replace(row, group=i) for i, row in enumerate(rows)]
    assert worst(grads(made, alone), wanted) < CLOSE


@families
def test_checkpointing_changes_no_gradient(family):
    made, rows, calls = learner(family), some_rows(4), []
    layer = made.policy.model.model.layers[0]
    layer.mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    for options in ({}, {"kl_coef": 0.1}, {"tokens_per_batch": 96}):
        made.policy.checkpointing = False
        wanted, once = grads(made, rows, **options), len(calls)
        made.policy.checkpointing = True
        assert worst(grads(made, rows, **options), wanted) < CLOSE
        assert len(calls) - once == once + sum(calls[:once])  # computed again in the backward pass
        calls.clear()


def masked(row):
    return replace(row, sampled=np.zeros(len(row.tokens), bool))


def test_what_is_masked_counts_for_nothing():
    made, rows = learner("llama"), some_rows(5)
    wanted = grads(made, rows)
    for tokens in (2048, 1):
        assert worst(grads(made, rows + [masked(row) for row in rows], tokens_per_batch=tokens), wanted) < CLOSE


@pytest.mark.parametrize("tokens", [2048, 1])
def test_where_all_is_masked_nothing_moves(tokens):
    made, rows = learner("llama"), [masked(row) for row in some_rows(5)]
    before = copy_adapter(made.policy)
    with pytest.raises(TrainError, match="nothing to train"):
        made.step(rows, StepConfig(tokens_per_batch=tokens))
    with pytest.raises(TrainError, match="nothing to train"):
        made.step([], StepConfig())
    with pytest.raises(TrainError, match="assistant"):
        made.sft_step(rows, 1e-3)
    assert all(torch.equal(before[name], now) for name, now in copy_adapter(made.policy).items())
    figures = made.step(some_rows(5), StepConfig())
    assert all(math.isfinite(value) for value in figures.values())


def test_an_unknown_logprob_is_a_ratio_of_one():
    made, rows = learner("llama"), some_rows(6)
    unknown = [replace(row, logprobs=np.full(len(row.tokens), np.nan, np.float32)) for row in rows]
    model, known = peft_model("llama", copy_adapter(made.policy)), []
    for row in rows:
        now = np.full(len(row.tokens), np.nan, np.float32)
        now[1:][row.sampled[1:]] = their_logprobs(model, row)[0].detach().numpy()
        known.append(replace(row, logprobs=now))
    for loss in ("cispo", "ppo", "gspo"):
        assert worst(grads(made, unknown, loss=loss), grads(made, known, loss=loss)) < CLOSE
    figures = made.step(unknown, StepConfig(learning_rate=0.0))
    assert figures["offpolicy/unknown_logprobs"] == 1.0


def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was():
    made, rows = learner("llama"), some_rows(7)
    made.step(rows, StepConfig(learning_rate=1e-3))
    before, state = copy_adapter(made.policy), made.state()
    wild = [replace(row, advantage=float("inf")) for row in rows]
    with pytest.raises(TrainError, match="norm"):
        made.step(wild, StepConfig(learning_rate=1e-3))
    assert all(torch.equal(before[name], now) for name, now in copy_adapter(made.policy).items())
    assert all(torch.equal(state[name], now) for name, now in made.state().items())


def test_a_learning_rate_that_makes_the_weights_infinite_undoes_the_step():
    made, rows = learner("llama"), some_rows(7)
    made.step(rows, StepConfig(learning_rate=1e-3))
    before, state = copy_adapter(made.policy), {name: value.clone() for name, value in made.state().items()}
    with pytest.raises(TrainError, match=r"learning_rate=1e\+37 made the adapter's weights infinite"):
        optimizer_steps(made, rows, StepConfig(learning_rate=1e37))
    assert all(torch.equal(before[name], now) for name, now in copy_adapter(made.policy).items())
    assert all(torch.equal(state[name], now) for name, now in made.state().items())


async def test_an_adapter_that_computes_nan_is_an_error_of_the_request():
    policy, worker = learner("llama").policy, DeviceThread()
    sampler = TransformersSampler(policy, worker, max_running=8)
    sampler.load("m@1", copy_adapter(policy))
    sampler.load("m@2", {name: torch.full_like(value, 1e30) for name, value in copy_adapter(policy).items()})
    with pytest.raises(ServeError, match="logits are not finite"):
        [_ async for _ in sampler.generate([3, 4, 5], SamplingParams(max_tokens=4), "m@2")]
    assert [s async for s in sampler.generate([3, 4, 5], SamplingParams(max_tokens=4), "m@1")]  # others continue
    sampler.close()
    worker.close()


@families
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_learner_give_a_token_the_same_logprob(family, temperature):
    made, worker, rng = learner(family), DeviceThread(), random.Random(8)
    sampler = TransformersSampler(made.policy, worker, max_running=8)
    sampler.load("m@1", copy_adapter(made.policy))
    start = [rng.randrange(3, VOCABULARY) for _ in range(40)]

    async def roll(i):
        tokens, sampled, logprobs = start[: 10 + i], [False] * (10 + i), [math.nan] * (10 + i)
        for turn in range(3):
            params = SamplingParams(max_tokens=5 + i % 7, temperature=temperature, seed=9 * i + turn, ignore_eos=True)
            said = [s async for s in sampler.generate(tokens, params, "m@1")]
            tokens = [*tokens, *(s.token_id for s in said), 5, 6, 7]
            sampled += [True] * len(said) + [False] * 3
            logprobs += [*(s.logprob for s in said), *[math.nan] * 3]
        old = np.array(logprobs, np.float32)
        return WeightedRow(np.array(tokens, np.int32), np.array(sampled), old, 0, rng.random(), 1e-3)

    async def all_of_them():
        return await asyncio.gather(*(roll(i) for i in range(24)))

    rows = asyncio.run(all_of_them())
    config = StepConfig(temperature=temperature, tokens_per_batch=300)
    figures = worker.call(made.step, rows, config)
    worker.close()
    assert figures["offpolicy/logprob_diff_max"] < 1e-4
    assert figures["loss/importance_ratio_mean"] == pytest.approx(1, abs=1e-4)


# models that are not what they seem


def saved(folder, model):
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (Gemma2Config(num_hidden_layers=2, head_dim=16, **SHAPE), "capped attention scores"),
        (Llama4TextConfig(num_hidden_layers=2, head_dim=16, **SHAPE), "layers of the kind chunked_attention"),
    ],
    ids=lambda x: getattr(x, "model_type", ""),
)
def test_a_model_that_computes_something_else_is_refused(tmp_path, config, why):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        p.data *= 5
    with pytest.raises(TrainError, match=why):
        load_policy(saved(tmp_path, model), dtype=torch.float32)


@families
def test_the_families_here_are_not_refused(tmp_path, family):
    folder = saved(tmp_path, copy.deepcopy(plain(family)))
    for dtype in (torch.float32, torch.bfloat16):
        assert load_policy(folder, dtype=dtype).dtype == dtype
