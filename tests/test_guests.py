"""Engines that cannot run here, by their interfaces: what they are given, and what they say becomes one sentence."""
import json
import sys

import numpy as np
import pytest
import torch
from engine_stubs import UNSLOTH, forget_modules, write_package
from tiny import save_tiny_model

from art_nb.batches import TrainRow, micro_batches
from art_nb.learners import Learner, StepConfig
from art_nb.policy import load_policy
from art_nb.unsloth_learner import UnslothLearner


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """A directory on `sys.path` for packages of engines."""
    directory = tmp_path / "site"
    directory.mkdir()
    forget_modules(monkeypatch, "unsloth", "vllm")
    monkeypatch.syspath_prepend(directory)
    yield directory
    for name in [m for m in sys.modules if m.partition(".")[0] in ("unsloth", "vllm")]:
        del sys.modules[name]


@pytest.fixture
def unsloth(engines):
    """The stand-in for Unsloth."""
    write_package(engines, "unsloth", "2026.10.9", {"unsloth/__init__.py": UNSLOTH})
    return lambda: sys.modules["unsloth"]


def row(length, seed=0):
    """A row whose second half was sampled."""
    tokens = np.random.default_rng(seed).integers(3, 200, length).astype(np.int32)
    sampled = np.arange(length) >= length // 2
    return TrainRow(tokens, sampled, np.where(sampled, -5.5, np.nan).astype(np.float32), advantage=1.0, coef=1 / length)


@pytest.fixture
def droppy(tmp_path):
    """A tiny model whose config asks for dropout of attention probabilities."""
    folder = save_tiny_model(tmp_path / "droppy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    return folder


def test_unsloth_computes_in_training_mode_without_dropout(unsloth, droppy):
    ours, theirs = (load_policy(droppy, dtype=torch.float32) for _ in range(2))
    ours, theirs = Learner(ours), UnslothLearner(theirs, droppy)
    figures = [learner.step([row(24), row(16, 1)], StepConfig(learning_rate=1e-3, kl_coef=0.1))
               for learner in (ours, theirs)]
    unsloth().FastLanguageModel.for_inference(theirs.model)     # somebody else sampled with the model
    batch, = micro_batches([row(24)], share=False)
    for learner in (ours, theirs):
        figures.append({"loss": learner.sft_step([row(24)], 1e-3)["loss/train"]})
        with torch.no_grad():
            figures.append({"first": float(learner.logprobs(batch)[0][0])})
    assert unsloth().FORWARDS
    assert all(training for _, training in unsloth().FORWARDS)
    assert figures[0] == pytest.approx(figures[1], rel=1e-3, abs=1e-5)
    assert figures[2] == pytest.approx(figures[4], abs=1e-4)
    assert figures[3] == pytest.approx(figures[5], abs=1e-4)
