"""float16 and the profile of a T4: gradients as in float32, and the settings arrive where they are meant."""
import copy

import numpy as np
import pytest
import torch
from families import plain, tokenizer

import art_nb as art
from art_nb.batches import TrainRow
from art_nb.learners import Learner, StepConfig
from art_nb.policy import Policy


def rows(seed=0, n=8, size=40):
    draw = np.random.default_rng(seed)
    made = []
    for group in range(n):
        tokens = draw.integers(3, 300, size).astype(np.int32)
        sampled = np.arange(size) > 10
        made.append(TrainRow(tokens, sampled, np.where(sampled, -5.0, np.nan).astype(np.float32), group,
                             advantage=1e-4 * float(draw.normal())))
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
    assert off[1] > 2 * off[0]          # small advantages underflow in the gradients of a mean


async def test_the_profile_of_a_t4(tiny_model_dir, tmp_path):
    model = art.TrainableModel(name="t4", project="p", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path=tmp_path, profile="t4", max_running=8, verbose=False) as backend:
        await model.register(backend)
        home = backend.home(model)
        assert home.policy.dtype == torch.float16
        assert home.sampler.max_running == 8
        assert home.sampler.max_model_len == 512            # the model's own, which is less
        asked = {"messages": [{"role": "user", "content": "A1"}], "max_completion_tokens": 8, "n": 4}
        completion = await model.openai_client().chat.completions.create(model=model.get_inference_name(), **asked)
        groups = [art.TrajectoryGroup([
            art.Trajectory(messages_and_choices=[{"role": "user", "content": "A1"}, choice], reward=float(i))
            for i, choice in enumerate(completion.choices)])]
        result = await backend.train(model, groups, learning_rate=1e-4)
    assert result.step == 1
    assert np.isfinite(result.metrics["loss/grad_norm"])
    assert result.metrics["offpolicy/logprob_diff_mean"] < 0.02


def test_an_unknown_profile_is_named():
    with pytest.raises(ValueError, match="no profile 't5'; there are: t4"):
        art.LocalBackend(profile="t5")
