"""Several ranks take the same steps as one learner, with all options of a step."""

import numpy as np
import pytest
import torch
from support.ray_parts import largest_difference, some_rows, weighed_rows

import art_nb as art
from art_nb.backends.loading import LoadSettings
from art_nb.distributed.learner_group import LearnerGroup
from art_nb.distributed.replicas import ModelSpec
from art_nb.learners.base import Learner, optimizer_steps
from art_nb.learners.losses import KL_SOURCES, LOSSES, MISMATCH
from art_nb.learners.settings import StepConfig
from art_nb.policy.adapters import copy_adapter, load_adapter
from art_nb.policy.loading import load_policy
from art_nb.tokens.advantages import REDUCTIONS

pytestmark = pytest.mark.slow

OPTIONS = {
    "rows_per_step": {"rows_per_step": 4},
    "rescored": {"rescored": True, "rows_per_step": 5},
    "row_power": {"row_power": 0.5},
    "kl": {"kl_coef": 0.1},
    "kl_shaping": {"kl_shaping": 0.1},
    "entropy": {"entropy_coef": 0.01},
    "weight_decay": {"weight_decay": 0.1, "max_grad_norm": 0.01},
    "small_batches": {"tokens_per_batch": 32, "share_prefixes": False},
    "kl_of_an_adapter": {"kl_coef": 0.1, "kl_reference": "an adapter"},
    **{f"kl_source {name}": {"kl_shaping": 0.1, "kl_source": name} for name in KL_SOURCES},
    **{f"loss {name}": {"loss": name} for name in LOSSES},
    **{f"mismatch {name}": {"mismatch": name} for name in MISMATCH},
}
REDUCED = {
    f"{reduction} {name}": {"reduction": reduction, "max_tokens": 16, **options}
    for reduction in REDUCTIONS
    for name, options in {
        "all": {},
        "rows_per_step": {"rows_per_step": 5},
        "rescored": {"rescored": True, "rows_per_step": 6},
        "kl": {"kl_coef": 0.1},
        "batch scale": {"scale": "batch", "truncated": "mask"},
    }.items()
}
SIZES = {  # rows, groups
    "one row": (1, 1),
    "two rows of a group": (2, 1),
    "two rows of two groups": (2, 2),
    "one group": (8, 1),
    "two groups": (9, 2),
}
CASES = {
    **{name: (options, lambda config, seed: some_rows(seed=seed)) for name, options in OPTIONS.items()},
    **{name: (options, weighed_rows) for name, options in REDUCED.items()},
    **{
        name: ({}, lambda config, seed, n=n, groups=groups: some_rows(n, groups, seed))
        for name, (n, groups) in SIZES.items()
    },
}
OFTEN = {"rows_per_step", "rescored", "kl_of_an_adapter", "prompt rows_per_step", "art all", "one row", "one group"}
MATRIX = [
    pytest.param(size, name, marks=() if size == 2 and name in OFTEN else pytest.mark.full)
    for size in (1, 2, 3)
    for name in CASES
]


@pytest.fixture(scope="module")
def group_of(cluster, tiny_model_dir):
    """A function that returns the group with a number of ranks. Only one exists at a time."""
    made = {}

    def group(size):
        if size not in made:
            for old in made.values():
                old.end()
            made.clear()
            settings = LoadSettings(device="cpu", dtype="float32")
            spec = ModelSpec(name="ranks", weights=str(tiny_model_dir), base_model="tiny", settings=settings, threads=1)
            made[size] = LearnerGroup(spec, size, {"num_cpus": 0}, lambda key, message: None)
            made[size].open()
            made[size].keep_state()
        return made[size]

    yield group
    for group in made.values():
        group.end()


@pytest.fixture
def group(group_of, request):
    """The group with the number of ranks of the test. Its state is restored at the end."""
    group = group_of(request.node.callspec.params["size"])
    state = group.files, group.adapter
    yield group
    group.files, group.adapter = state
    group.restore()


@pytest.fixture(scope="module")
def policy(tiny_model_dir):
    """A policy in this process, equal to that of the ranks."""
    return load_policy(tiny_model_dir, device="cpu", dtype=torch.float32)


@pytest.fixture
def local(policy):
    """A learner in this process, equal to a new rank."""
    first = copy_adapter(policy)
    yield Learner(policy)
    load_adapter(policy, first)


def adapters_of(group):
    """The adapter of each rank."""
    return group._call("weights")


@pytest.mark.parametrize(("size", "name"), MATRIX)
def test_ranks_take_the_steps_of_one_learner(group, local, size, name):
    options, make_rows = CASES[name]
    config, reference, tensors = StepConfig(learning_rate=1e-4, **options), None, None
    if config.kl_reference:
        random, tensors = np.random.default_rng(9), copy_adapter(local.policy)
        for tensor in tensors.values():
            tensor += 0.05 * tensor.new_tensor(random.normal(size=tensor.shape))
        reference = {key: tensor.numpy() for key, tensor in tensors.items()}
    first, steps = group.adapter, [make_rows(config, seed=seed) for seed in range(3)]
    metrics = [group.step(rows, config, lambda *_: None, reference) for rows in steps]
    expected = []
    for rows in steps:
        expected.append(optimizer_steps(local, rows, config, weights=tensors))
    trained = {key: tensor.numpy() for key, tensor in copy_adapter(local.policy).items()}
    adapters = adapters_of(group)
    assert len(adapters) == size
    for adapter in adapters:
        assert largest_difference(adapter, trained) < 1e-6
    assert largest_difference(adapters[0], adapters[-1]) == 0
    if not name.startswith("mismatch"):  # which can drop all of these random tokens
        assert largest_difference(trained, first) > 1e-5
    for one, other in zip(metrics, expected, strict=True):
        shared = one.keys() & other.keys() - {"data/packing_ratio", "data/step_trainer_tokens"}
        assert {"loss/train", "loss/grad_norm", "data/step_num_gradient_steps"} <= shared
        assert {key: one[key] for key in shared} == pytest.approx({key: other[key] for key in shared}, abs=1e-4)
    assert len(group.seen) == len(local.seen) > 0


@pytest.mark.parametrize("broken", [0, -1])
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)])
def test_a_norm_that_is_not_finite_drops_the_step_on_all_ranks(group, size, broken):
    group.step(some_rows(seed=1), StepConfig(learning_rate=1e-3), lambda *_: None, None)
    before, processes = adapters_of(group), [facts["place"].pid for facts in group.facts]
    rows = some_rows(6, groups=3)
    rows[broken].advantage = float("nan")
    for options in ({}, {"rows_per_step": 2}):  # in the second case, some optimizer steps succeed first
        config = StepConfig(learning_rate=1e-3, **options)
        with pytest.raises(art.TrainError, match="norm"):
            group.step(rows, config, lambda *_: None, None)
        assert [largest_difference(*pair) for pair in zip(before, adapters_of(group), strict=True)] == [0.0] * size
    assert [facts["place"].pid for facts in group.facts] == processes  # the ranks go on
    group.step(some_rows(seed=2), StepConfig(learning_rate=1e-3), lambda *_: None, None)
    after = adapters_of(group)
    assert largest_difference(after[0], before[0]) > 0
    assert largest_difference(after[0], after[-1]) == 0
