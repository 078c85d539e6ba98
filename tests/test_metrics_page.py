"""docs/concepts/metrics.md describes every metric that runs write to history.jsonl, and no other."""

import asyncio
import inspect
import re
from pathlib import Path

import pytest

import art_nb as art
from art_nb.pipeline.settings import make_group_rollout_fn
from art_nb.pipeline.trainer import PipelineTrainer
from art_nb.runs.costs import ModelPricing, build_cost_calculator
from art_nb.runs.metrics import count_cost
from art_nb.training.diagnostics import CHECKS
from art_nb.training.doctor import TRAINABLE_CHECKS

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[1] / "docs" / "concepts" / "metrics.md"
STEP = {"steps": 2, "groups_per_step": 2, "rollouts_per_group": 4, "learning_rate": 1e-3, "show": False}
IMITATED = [{"role": "user", "content": "free: A1 B1"}, {"role": "assistant", "content": "<move>B2</move>"}]


async def say(model, scenario, config=None):
    """One reply with a few metrics of its own. The reward depends on the text, so rollouts of a group differ."""
    messages = [{"role": "user", "content": f"free: {scenario}"}]
    trajectory = art.Trajectory(messages_and_choices=messages)
    async with trajectory.track_duration("request"):
        reply = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages, max_tokens=6
        )
    trajectory.messages_and_choices.append(reply.choices[0])
    trajectory.reward = float(sum(map(ord, reply.choices[0].message.content or "")) % 97)
    trajectory.metrics["win"] = trajectory.reward > 48
    count_cost("tools", 0.001)
    return trajectory.finish()


async def flat(model, scenario, config):
    """A reply with the same reward as all others."""
    trajectory = await say(model, scenario)
    trajectory.reward = 1.0
    return trajectory


async def judged(group):
    """The group with the scores of a rule, in two rounds."""
    group.metrics["agreement"] = 0.5
    rule = art.as_judge(lambda t: (t.reward / 97, "by the rule"))
    return await art.ruler_score_group(group, rule, repeats=2, cache=None)


def trains(**options):
    """Return a function that trains a model with these options."""

    async def run(model, backend):
        await art.train(model, say, range(4), **STEP | options)

    return run


async def imitates(model, backend):
    await model.train_sft([art.Trajectory(messages_and_choices=IMITATED)] * 4)


async def imitates_and_evaluates(model, backend):
    await imitates(model, backend)
    await art.evaluate(model, say, range(4))


async def pays(model, backend):
    model.set_cost_calculator(build_cost_calculator(ModelPricing(1.0, 2.0)))
    await trains(after_each=judged, max_staleness=1)(model, backend)


async def changes_its_code(model, backend):
    async def worse(model, scenario):
        return await say(model, scenario)

    await trains(steps=1)(model, backend)
    await art.train(model, worse, range(4), **STEP | {"steps": 2})


async def overflows(model, backend):
    backend.runtime(model).learner.loss_scale = 1e30
    await trains(steps=1)(model, backend)
    await imitates(model, backend)


async def pipelines(model, backend):
    async def evaluate(model, step, config):
        return [await say(model, 1)]

    for rollout, options in ((say, {"max_steps": 2}), (flat, {"discard_queue_multiplier": 1})):
        sizes = {"num_rollout_workers": 2, "min_batch_size": 2, "max_batch_size": 3, "eval_every_n_steps": 1}
        group = make_group_rollout_fn(rollout, n=3)
        await PipelineTrainer(model, backend, group, range(12), None, evaluate, show=False, **sizes | options).train()


RUNS = [  # what a model does, and the options of its backend
    (trains(kl_coef=0.1), {}),
    (trains(kl_shaping=0.1, steps=1), {}),
    (trains(mismatch="tis", steps=1), {}),
    (imitates_and_evaluates, {}),
    (pays, {"gpu_cost_per_hour_usd": 1.0}),
    (changes_its_code, {}),
    (overflows, {"dtype": "float16"}),
    (trains(steps=1), {"sampler_device": "cpu:1", "learner_device": "cpu:0"}),
    (pipelines, {}),
]


@pytest.fixture(scope="module")
def written(tiny_model_dir, tmp_path_factory):
    """The names in the histories of real runs."""
    path, names = tmp_path_factory.mktemp("runs"), set()

    async def run_all():
        for number, (run, options) in enumerate(RUNS):
            model = art.TrainableModel(
                name=f"run-{number}", project="tests", base_model=str(tiny_model_dir), report_metrics=[]
            )
            async with art.LocalBackend(path=path, verbose=False, **options) as backend:
                await model.register(backend)
                await run(model, backend)
            names.update(*model.store.history())

    asyncio.run(run_all())
    return names


def patterns(head):
    """Return the names in the first columns of the tables of the page whose first heading is `head`."""
    tables = re.findall(rf"^\| {head} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    cells = [row.split("|")[1] for table in tables for row in table.splitlines()]
    return list(dict.fromkeys(name for cell in cells for name in re.findall(r"`(.+?)`", cell)))


def matches(pattern, name):
    """Return whether a name is written as the pattern says. A part in angle brackets has no slash."""
    parts = re.split(r"<.+?>", pattern)
    return re.fullmatch("[^/]+".join(map(re.escape, parts)), name) is not None


def is_own(pattern):
    """Return whether a line of the page is about metrics of the user."""
    return "<your metric>" in pattern


def test_every_written_metric_is_described(written):
    """Names that only the line of your own metrics matches are those of the test."""
    known = patterns("metric")
    metrics = written - {*patterns("column")}
    library = [p for p in known if not is_own(p)]
    undescribed = {name for name in metrics if not any(matches(p, name) for p in library)}
    assert undescribed == {f"{split}/win" for split in ("train", "val", "discarded")} | {"train/group/agreement"}
    assert all(any(matches(p, name) for p in known) for name in undescribed)


def test_every_described_metric_is_written(written):
    assert [p for p in patterns("metric") if not any(matches(p, name) for name in written)] == []
    assert {"step", "training_step", "recorded_at"} <= written & {*patterns("column")}


def test_every_warning_of_the_live_cell_has_a_section():
    headings = re.findall(r"^### (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted({title for _, title, _ in CHECKS})


def test_every_check_of_the_doctor_is_explained():
    names = {name for check in TRAINABLE_CHECKS for name in re.findall(r'Check\(\s*"(\w+)"', inspect.getsource(check))}
    assert names == {*patterns("check")}
