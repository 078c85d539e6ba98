"""float16 and the profile of a T4: gradients as in float32, and the settings arrive where they are meant."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from support.families import plain, tokenizer

import art_nb as art
from art_nb.core.events import Warned
from art_nb.core.types import TrainError, TrainSFTConfig
from art_nb.learners.base import Learner, StepConfig, optimizer_steps, split_optimizer_steps
from art_nb.policy.adapters import copy_adapter
from art_nb.policy.lora import Policy
from art_nb.policy.packing import WeightedRow


def rows(seed=0, n=8, size=40):
    draw = np.random.default_rng(seed)
    made = []
    for group in range(n):
        tokens = draw.integers(3, 300, size).astype(np.int32)
        sampled = np.arange(size) > 10
        made.append(
            WeightedRow(
                tokens,
                sampled,
                np.where(sampled, -5.0, np.nan).astype(np.float32),
                group,
                advantage=1e-4 * float(draw.normal()),
            )
        )
    return made


def gradients(dtype, scaled=True):
    """Gradients of one step's loss, taken from the optimizer's hands."""
    model = Policy(copy.deepcopy(plain("llama")).to(dtype), tokenizer())
    with torch.no_grad():
        for parameter in model.parameters():
            draw = torch.Generator().manual_seed(len(parameter))
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.05)
    learner, found = Learner(model), []
    if not scaled:
        learner.backward = lambda loss, tokens: loss.backward()
    learner.optimizer.register_step_pre_hook(lambda *_: found.extend(p.grad.clone() for p in learner.parameters()))
    learner.step(rows(), StepConfig(learning_rate=1e-4, max_grad_norm=1e9))
    return torch.cat([g.flatten() for g in found])


def test_gradients_in_float16_are_those_of_float32():
    exact = gradients(torch.float32)
    off = [float((gradients(torch.float16, scaled=scaled) - exact).norm() / exact.norm()) for scaled in (True, False)]
    assert off[0] < 0.005
    assert off[1] > 2 * off[0]  # small advantages underflow in the gradients of a mean


async def test_the_profile_of_a_t4(tiny_model_dir, tmp_path):
    model = art.TrainableModel(name="t4", project="p", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path=tmp_path, profile="t4", max_running=8, verbose=False) as backend:
        await model.register(backend)
        home = backend.runtime(model)
        assert home.policy.dtype == torch.float16
        assert home.sampler.max_running == 8
        assert home.sampler.max_model_len == 512  # the model's own, which is less
        asked = {"messages": [{"role": "user", "content": "A1"}], "max_completion_tokens": 8, "n": 4}
        completion = await model.openai_client().chat.completions.create(model=model.get_inference_name(), **asked)
        groups = [
            art.TrajectoryGroup(
                [
                    art.Trajectory(messages_and_choices=[{"role": "user", "content": "A1"}, choice], reward=float(i))
                    for i, choice in enumerate(completion.choices)
                ]
            )
        ]
        result = await backend.train(model, groups, learning_rate=1e-4)
    assert result.step == 1
    assert np.isfinite(result.metrics["loss/grad_norm"])
    assert result.metrics["offpolicy/logprob_diff_mean"] < 0.02


def test_an_unknown_profile_is_named():
    with pytest.raises(ValueError, match="Invalid `profile='t5'`: expected one of t4"):
        art.LocalBackend(profile="t5")


class Overflowing(Learner):
    """A learner whose gradients overflow in the steps listed in `bad`."""

    def __init__(self, policy, bad):
        super().__init__(policy)
        self.bad, self.calls = set(bad), 0

    def backward(self, loss, tokens):
        super().backward(loss, tokens)
        if self.calls in self.bad:
            self.parameters()[0].grad[0, 0] = float("inf")
        self.calls += 1


def overflowing(dtype, bad):
    return Overflowing(Policy(copy.deepcopy(plain("llama")).to(dtype), tokenizer()), bad)


def test_a_step_that_overflows_float16_is_skipped_and_counted():
    learner, config = overflowing(torch.float16, [1]), StepConfig(learning_rate=1e-4, rows_per_step=4)
    [first, _], before = split_optimizer_steps(rows(), 4, 0), copy_adapter(learner.policy)
    told = optimizer_steps(learner, rows(), config)
    assert (told["data/step_num_gradient_steps"], told["data/step_num_overflows"]) == (1, 1)
    assert np.isfinite(told["loss/grad_norm"])
    assert 0.5 <= learner.loss_scale < 0.51
    moved = copy_adapter(learner.policy)
    assert any(not torch.equal(before[name], moved[name]) for name in moved)
    only = overflowing(torch.float16, [])
    only.step(first, config)
    assert all(torch.equal(moved[name], now) for name, now in copy_adapter(only.policy).items())
    again = overflowing(torch.float16, [])
    again.load_state(learner.state())
    assert again.loss_scale == pytest.approx(learner.loss_scale)


def gradients_of(learner, found, *_):
    found.append(torch.cat([p.grad.flatten() for p in learner.parameters()]))


def test_the_loss_scale_changes_no_gradient_and_returns():
    found = []
    for scale in (1.0, 0.5):
        learner = overflowing(torch.float16, [])
        learner.loss_scale, take = scale, partial(gradients_of, learner, found)
        learner.optimizer.register_step_pre_hook(take)
        learner.step(rows(), StepConfig(learning_rate=1e-4))
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 0.005
    assert 0.5 < learner.loss_scale < 1


@pytest.mark.parametrize(
    ("dtype", "steps", "words"),
    [
        (torch.float16, 8, r'overflowed float16 in 8 steps in a row.*dtype="bfloat16" or "float32"'),
        (torch.float32, 1, "The gradient's norm is inf"),
    ],
    ids=str,
)
def test_gradients_that_are_never_finite_are_an_error(dtype, steps, words):
    learner = overflowing(dtype, range(9))
    for _ in range(steps - 1):
        assert learner.step(rows(), StepConfig())["data/step_num_overflows"] == 1
    with pytest.raises(TrainError, match=words):
        learner.step(rows(), StepConfig())


@pytest.mark.parametrize("how", ["train", "sft"])
async def test_a_run_in_float16_continues_after_an_overflow(tiny_model_dir, tmp_path, how):
    """Before, one overflow ended the run with a TrainError."""
    model = art.TrainableModel(name="t4", project="p", base_model=str(tiny_model_dir))
    asked = [{"role": "user", "content": "A1"}]
    plans = [
        art.Trajectory(messages_and_choices=[*asked, {"role": "assistant", "content": "B2 B2"}], reward=float(i))
        for i in range(2)
    ]
    async with art.LocalBackend(path=tmp_path, profile="t4", verbose=False) as backend:
        await model.register(backend)
        home, said = backend.runtime(model), []
        backend.bus.subscribe(lambda event: said.append(event.message), Warned)
        home.learner.__class__, home.learner.bad, home.learner.calls = Overflowing, {0}, 0
        if how == "sft":
            config = TrainSFTConfig(batch_size=1, learning_rate=1e-4)
            result = await backend._train_sft(model, plans, config)
            assert result.metrics["sft/step_num_overflows"] == 1
        else:
            completion = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(), messages=asked, max_completion_tokens=8, n=2
            )
            plans = [
                art.Trajectory(messages_and_choices=[*asked, choice], reward=float(i))
                for i, choice in enumerate(completion.choices)
            ]
            result = await backend.train(model, [art.TrajectoryGroup(plans)], learning_rate=1e-4)
            assert result.metrics["data/step_num_overflows"] == 1
            assert result.metrics["data/step_num_gradient_steps"] == 0
    assert result.step == 1
    assert any("Skipped 1 of the optimizer steps" in message for message in said)
