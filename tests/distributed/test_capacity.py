"""The formulas of the capacity plan agree with a simulation of single requests, and its figures have sources."""

import json
import math
import subprocess
import sys

import pytest

import art_nb as art
from art_nb.cli.main import main
from art_nb.core.events import RolloutDone
from art_nb.core.types import StoreError
from art_nb.distributed import plan_capacity
from art_nb.distributed.capacity import (
    GPUS,
    MEASURED_LEARNERS,
    TRAIN_SHARE,
    Figure,
    candidate_setups,
    estimated_figures,
    run_figures,
)
from art_nb.distributed.throughput import MAX_SPREAD, EngineRates, RolloutShape, TrainingSetup, run_seconds, throughput
from art_nb.runs.store import RunStore

# The simulation samples each turn of each rollout: log-normal lengths, tools with a long tail, replicas that decode all
# their requests at one pace. Its rollouts have these means. A run starts without rollouts in progress.
TASK = RolloutShape(tokens=3230, prompt_tokens=3250, turns=10.8, environment_s=22.2)
RATES = EngineRates(decode_s=0.008, request_s=66e-6, prefill_rate=12_000, train_rate=9_000)
FIRST_STEPS = {1: 8, 4: 8, 14: 8, 56: 5, 224: 2, 880: 2}  # steps of a simulated run without staleness, by samplers
STEPS = {  # samplers, learners, groups per step: rollouts per hour and busy share with max_staleness 0, 1 and 3
    (1, 1, 8): {0: (790, 0.76), 1: (1197, 0.79), 3: (2088, 0.95)},
    (4, 1, 32): {0: (2218, 0.51), 1: (3875, 0.71), 3: (5700, 0.75)},
    (14, 2, 64): {0: (4338, 0.42), 1: (7628, 0.60), 3: (11687, 0.68)},
    (56, 8, 64): {0: (5787, 0.33), 1: (10360, 0.43), 3: (17691, 0.49)},
    (56, 8, 256): {0: (15579, 0.37), 1: (27839, 0.51), 3: (42713, 0.59)},
    (224, 32, 256): {0: (20394, 0.28), 1: (30048, 0.32)},
    (224, 32, 1024): {0: (57112, 0.34), 1: (84174, 0.37)},
}
PIPELINES = {  # rollouts per hour with 2 and 4 steps of staleness
    (1, 1, 8): {2: 2286, 4: 3186},
    (4, 1, 32): {2: 6583, 4: 6824},
    (14, 2, 64): {2: 14118, 4: 14971},
    (56, 8, 64): {2: 23383, 4: 42112},
    (56, 8, 256): {2: 54408, 4: 59433},
    (224, 32, 256): {2: 84839, 4: 142671},
    (224, 32, 1024): {2: 198075, 4: 218668},
    (880, 120, 1024): {4: 527225},
}
STEPPED_CASES = [(*setup, k, *values) for setup, row in STEPS.items() for k, values in row.items()]
PIPED_CASES = [(*setup, k, value) for setup, row in PIPELINES.items() for k, value in row.items()]


def hourly(speed, steps):
    return speed.setup.rollouts_per_step * steps * 3600 / run_seconds(speed, steps)


@pytest.mark.parametrize(("samplers", "learners", "groups", "k", "expected", "busy"), STEPPED_CASES)
def test_steps_agree_with_the_simulation(samplers, learners, groups, k, expected, busy):
    speed, steps = (
        throughput(TASK, RATES, TrainingSetup(samplers, learners, groups, max_staleness=k)),
        FIRST_STEPS[samplers] + k,
    )
    assert hourly(speed, steps) == pytest.approx(expected, rel=0.18)
    # at the end of a run, k steps start no rollouts; with one sampler, requests are too few for this approximation
    if samplers > 1:
        assert (1 - speed.sampler_idle) * (steps - k) / steps == pytest.approx(busy, abs=0.11)


@pytest.mark.parametrize(("samplers", "learners", "groups", "k", "expected"), PIPED_CASES)
def test_pipelines_agree_with_the_simulation(samplers, learners, groups, k, expected):
    setup = TrainingSetup(samplers, learners, groups, max_staleness=k, pipeline=True)
    assert hourly(throughput(TASK, RATES, setup), FIRST_STEPS[samplers] + k) == pytest.approx(expected, rel=0.13)


def test_the_conclusions_of_the_simulation():
    def rate(samplers, learners, groups, k, pipeline=False):
        setup = TrainingSetup(samplers, learners, groups, max_staleness=k, pipeline=pipeline)
        return throughput(TASK, RATES, setup).rollouts_per_hour

    assert 1.5 < rate(14, 2, 64, 1) / rate(14, 2, 64, 0) < 2.1  # one step of staleness
    assert 3.0 < rate(14, 2, 64, 2, True) / rate(14, 2, 64, 0) < 4.1  # a pipeline
    # 64 GPUs need more than 64 groups per step
    assert rate(56, 8, 256, 2, True) > 1.9 * rate(56, 8, 64, 2, True)


@pytest.mark.parametrize(("k", "pipeline"), [(0, False), (1, False), (3, False), (1, True), (3, True)])
def test_more_resources_are_never_slower(k, pipeline):
    base = TrainingSetup(7, 1, 32, max_staleness=k, pipeline=pipeline)
    speed = throughput(TASK, RATES, base)
    for field, value in (("samplers", 8), ("learners", 2), ("max_staleness", k + 1)):
        more = TrainingSetup(
            **{name: getattr(base, name) for name in TrainingSetup.__dataclass_fields__} | {field: value}
        )
        assert throughput(TASK, RATES, more).rollouts_per_hour >= speed.rollouts_per_hour * 0.999
    assert 0 <= speed.sampler_idle <= 1
    assert 0 <= speed.learner_idle <= 1


def test_a_step_satisfies_its_equation():
    for k in (0, 1, 3):
        speed = throughput(TASK, RATES, TrainingSetup(14, 2, 64, max_staleness=k))
        assert speed.step_s == pytest.approx(max(speed.train_s, (speed.rollout_s + speed.train_s) / (k + 1)), rel=1e-3)


def test_little_s_law_holds_in_a_pipeline():
    speed = throughput(TASK, RATES, TrainingSetup(56, 8, 64, max_staleness=2, pipeline=True))
    assert speed.learner_idle > 0
    assert 2 * 64 / speed.rollout_s == pytest.approx(64 / speed.step_s, rel=1e-3)


@pytest.mark.parametrize("change", [{"samplers": 0}, {"groups_per_step": 0}, {"max_staleness": -1}, {"pipeline": True}])
def test_invalid_setups(change):
    with pytest.raises(ValueError, match="Invalid"):
        throughput(TASK, RATES, TrainingSetup(**{"samplers": 2, "learners": 1, "groups_per_step": 8} | change))


def test_estimates_agree_with_the_measured_learners():
    for weights in (7e9, 14e9):
        estimate = TRAIN_SHARE * GPUS["H200"][1] / (4 * weights)
        assert estimate == pytest.approx(MEASURED_LEARNERS[weights], rel=0.1)
    assert estimated_figures(7e9, "H200")["train_rate"] == Figure(12_870, "measured: docs/gpu.md")
    assert estimated_figures(7e9, "H100")["train_rate"].source.startswith("estimated")
    simulated = estimated_figures(8e9, "H100")
    assert simulated["decode_s"].value == pytest.approx(RATES.decode_s, rel=0.01)
    assert simulated["prefill_rate"].value == pytest.approx(RATES.prefill_rate, rel=0.01)


def test_a_given_figure_overrides_the_estimate():
    plan = plan_capacity("Qwen/Qwen3-8B", 8, train_rate=1000, price=2.0)
    assert plan.figures["train_rate"] == Figure(1000, "given")
    assert plan.figures["tokens"].source.startswith("estimated")
    assert plan.cost() == pytest.approx(2 * 8 / plan.speed.rollouts_per_hour * 1000)
    assert plan.speed.setup.learners > plan_capacity("Qwen/Qwen3-8B", 8).speed.setup.learners


def test_the_plan_divides_the_gpus_best():
    plan = plan_capacity("Qwen/Qwen3-8B", 8, pipeline=True, groups_per_step=32)
    chosen = plan.speed.rollouts_per_hour
    for learners in range(1, 8):
        other = plan_capacity("Qwen/Qwen3-8B", 8, pipeline=True, groups_per_step=32, learners=learners)
        assert other.speed.rollouts_per_hour <= chosen * 1.001
    assert plan_capacity("Qwen/Qwen3-8B", 8, samplers=4, learners=2).gpus == 6


INVALID = [
    {"gpus": 1},
    {"gpu": "H300"},
    {"tokens": -1},
    {"price": math.nan},
    {"spread": 100.0},
    {"unknown": 1.0},
    {"samplers": 9},
    {"rollouts_per_group": 0},
    {"weights": 0.0},
    {"weights": math.inf},
    {"steps": 0},
]


@pytest.mark.parametrize("options", INVALID, ids=str)
def test_invalid_options(options):
    with pytest.raises(ValueError, match="Invalid"):
        plan_capacity("Qwen/Qwen3-8B", **options)


@pytest.mark.parametrize(("samplers", "learners"), [(None, None), (6, None), (None, 3), (6, 3)])
def test_all_gpus_are_used_unless_both_numbers_are_given(samplers, learners):
    setups = [*candidate_setups(8, samplers, learners, 4, rollouts_per_group=8)]
    sizes = {(setup.samplers, setup.learners) for setup in setups}
    expected = {(s, n) for s in range(1, 10) for n in range(1, 10) if samplers in (None, s) and learners in (None, n)}
    assert sizes == {(s, n) for s, n in expected if s + n == 8 or None not in (samplers, learners)}


@pytest.fixture
def store(tmp_path):
    """A run of two steps: rollouts of 100 tokens, 2 s of which 0.5 s in a tool."""
    store = RunStore(tmp_path / "p" / "models" / "measured")
    for step in (1, 2):
        store.append_history(
            {
                "step": step,
                "data/step_rollout_tokens": 1600,
                "data/step_num_trajectories": 16,
                "data/step_trainer_tokens": 2400,
                "time/step_backend_train_s": 2.0,
                "time/step_sync_s": 0.1,
                "time/step_save_s": 0.3,
                "train/tool_duration": 0.5,
                "profile/decode_s": 3.0,
                "profile/prefill_s": 1.0,
            }
        )
        for i in range(16):
            seconds = 1.0 if i % 2 else 3.0
            store.append_event(RolloutDone(rollout=f"{step}.{i}", step=step, reward=1.0, seconds_s=seconds))
    store.append_event(RolloutDone(rollout="failed", step=2, error="timeout", seconds_s=500.0))
    return store


def test_figures_of_a_run(store):
    figures = run_figures(store.path)
    expected = {"tokens": 100, "train_rate": 1200, "train_share": 1.5, "update_s": 0.4, "environment_s": 0.5}
    expected |= {"sampler_rate": 400, "sampler_requests": 16 * 1.5 / 4, "spread": math.log(3) / 2, "longest": 2}
    assert {name: figure.value for name, figure in figures.items()} == pytest.approx(expected)
    assert {figure.source for figure in figures.values()} == {"measured: run measured"}
    plan = plan_capacity("model-1b", 4, run=store.path, tokens=200)
    assert plan.figures["tokens"] == Figure(200, "given")
    assert "measured: run measured" in str(plan)


def test_the_measured_spread_is_limited(tmp_path):
    store = RunStore(tmp_path / "run")
    store.append_history({"step": 1, "data/step_rollout_tokens": 10, "data/step_num_trajectories": 2})
    for i in range(8):
        store.append_event(RolloutDone(rollout=str(i), step=1, reward=1.0, seconds_s=10.0 ** (20 * (i % 2) - 10)))
    assert run_figures(store.path)["spread"].value == MAX_SPREAD
    assert plan_capacity("model-1b", 4, run=store.path).speed.rollouts_per_hour > 0


def test_a_run_without_durations_says_so(tmp_path):
    store = RunStore(tmp_path / "run")
    store.append_history({"step": 1, "data/step_rollout_tokens": 10, "data/step_num_trajectories": 2})
    assert run_figures(store.path)["environment_s"] == Figure(0.0, "estimated: the run has no track_duration")
    empty = RunStore(tmp_path / "empty")
    empty.append_history({"step": 1})
    with pytest.raises(StoreError, match="at least one step"):
        run_figures(empty.path)


async def test_figures_of_a_run_that_was_trained(tmp_path, tiny_model_dir):
    model = art.TrainableModel(name="t", project="p", base_model=str(tiny_model_dir), base_path=str(tmp_path))
    backend = art.LocalBackend(path=tmp_path, verbose=False)
    await model.register(backend)

    async def rollout(model, scenario):
        trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": scenario}])
        for _ in range(2):
            async with trajectory.track_duration("tool"):
                pass
            reply = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(), messages=trajectory.messages(), max_tokens=6, logprobs=True
            )
            trajectory.messages_and_choices += [reply.choices[0], {"role": "user", "content": "again"}]
        trajectory.reward = float(len(trajectory.messages()[1]["content"]))
        return trajectory

    run = art.train(model, rollout, ["a", "b"], steps=2, groups_per_step=2, rollouts_per_group=4)
    await run
    await backend.close()
    figures = run_figures(run.model.store.path)
    assert figures["turns"].value == 2
    assert 2 <= figures["tokens"].value <= 12
    assert figures["prompt_tokens"].value > 0
    assert {"sampler_rate", "sampler_requests", "train_rate", "update_s", "spread"} <= figures.keys()
    assert plan_capacity("tiny-1m", 2, run=run.model.store.path).speed.rollouts_per_hour > 0


def test_the_command(capsys, store):
    assert (
        main(["plan", "--model", "Qwen/Qwen3-8B", "--gpus", "4", "--price", "2", "--run", str(store.path), "--json"])
        == 0
    )
    plan = json.loads(capsys.readouterr().out)
    assert plan["samplers"] + plan["learners"] == 4
    assert plan["figures"]["tokens"] == [100, "measured: run measured"]
    assert main(["plan", "--model", "unnamed"]) == 1
    assert "--weights" in capsys.readouterr().err


def test_planning_loads_neither_torch_nor_ray():
    code = "import sys, art_nb.distributed as d; d.plan_capacity('a-8b'); print({'torch', 'ray'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
