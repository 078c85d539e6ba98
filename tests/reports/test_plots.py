"""What the pictures show, read from their axes."""

import math
import subprocess
import sys

import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402
from support.registered import a_group  # noqa: E402

import art_nb as art  # noqa: E402
from art_nb.core.types import StoreError  # noqa: E402
from art_nb.reports.plots import COLORS, series, smoothed, stores_of  # noqa: E402
from art_nb.tokens.learner_records import read_record  # noqa: E402
from art_nb.training.evaluation import Evaluation  # noqa: E402

REWARDS = [0.0, 0.5, 0.25, 1.0]


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


@pytest.fixture
def root(tmp_path):
    """Two runs of one project."""
    for place, name in enumerate(("a", "b")):
        store = art.RunStore(tmp_path / "ttt" / "models" / name)
        for step, reward in enumerate(REWARDS, 1):
            store.append_history({"step": step, "train/reward": reward + place, "loss/train": 0.1})
            store.append_history({"step": step, "val/reward": 0.3})
    return tmp_path


def lines(ax):
    return [(list(map(int, line.get_xdata())), list(line.get_ydata())) for line in ax.get_lines()]


def played(step, rewards, name="a", metric="reward"):
    trajectories = [art.Trajectory(messages_and_choices=[], reward=r, metrics={"win": r == 1}) for r in rewards]
    return Evaluation(name, step, trajectories, metric=metric)


# curves


def test_a_curve_of_each_run(root):
    ax = art.learning_curve(root)
    assert lines(ax) == [([1, 2, 3, 4], REWARDS), ([1, 2, 3, 4], [r + 1 for r in REWARDS])]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "train/reward")
    assert len({line.get_color() for line in ax.get_lines()}) == 2
    assert len({line.get_marker() for line in ax.get_lines()}) == 2


def test_everything_that_names_a_run(root):
    path = root / "ttt" / "models" / "a"
    model = art.Model(name="a", project="ttt", base_path=str(root))
    for source in (path, str(path), art.open_run(path), model, [path], (s for s in [model])):
        ax = art.learning_curve(source)
        assert lines(ax) == [([1, 2, 3, 4], REWARDS)]
        assert ax.get_legend() is None
    assert [store.path.name for store in stores_of([root, path])] == ["a", "b", "a"]
    with pytest.raises(TypeError, match="Invalid `runs` of type int"):
        art.learning_curve(3)
    with pytest.raises(StoreError, match="not a run"):
        art.learning_curve(root / "nowhere")


def test_a_run_directory_is_not_mistaken_for_its_checkpoints(root, tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    path = root / "ttt" / "models" / "a"
    folder = path / "checkpoints" / "0001"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    save_file({"x": np.zeros(1)}, folder / "adapter_model.safetensors")
    assert [store.path for store in stores_of(path)] == [path]


async def test_a_run_in_progress(tiny_model_dir, tmp_path):
    async def rollout(model, scenario):
        return art.Trajectory(messages_and_choices=[], reward=scenario)

    model = art.TrainableModel(name="tiny", project="tests", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path=tmp_path, verbose=False) as backend:
        await model.register(backend)
        run = await art.train(model, rollout, [1, 2], steps=2, groups_per_step=1, rollouts_per_group=2, show=False)
    [(steps, values)] = lines(art.learning_curve(run))
    assert steps == [1, 2]
    assert sorted(values) == [1, 2]
    assert art.reward_histogram(run.groups).get_ylabel() == "trajectories"


def test_a_step_written_twice_counts_once(root):
    store = art.open_run(root / "ttt" / "models" / "a")
    store.append_history({"step": 2, "train/reward": 9.0})
    store.append_history({"train/reward": 7.0})
    assert series(store, "train/reward") == ([1, 2, 3, 4], [0.0, 9.0, 0.25, 1.0])


def test_a_metric_that_is_nowhere(root):
    with pytest.raises(
        StoreError, match="No metric 'train/win' in the history of a, b. Available metrics: loss/train, train/reward"
    ):
        art.learning_curve(root, "train/win")
    assert not plt.get_fignums()


def test_a_run_without_the_metric_is_left_out(root):
    art.RunStore(root / "ttt" / "models" / "c").append_history({"step": 1, "val/reward": 1.0})
    assert len(lines(art.learning_curve(root))) == 2


@pytest.mark.parametrize("width", [1, 2, 3, 5, 100])
def test_smoothing_keeps_the_length_and_the_range(width):
    out = smoothed(REWARDS, width)
    assert len(out) == len(REWARDS)
    assert min(REWARDS) <= min(out) <= max(out) <= max(REWARDS)
    assert smoothed([2.0] * 4, width) == [2.0] * 4
    assert smoothed(list(range(9)), width)[4] == 4  # no lag


def test_the_values_stay_visible_behind_their_mean(root):
    [raw, mean] = art.learning_curve(root / "ttt" / "models" / "a", smooth=3).get_lines()
    assert list(raw.get_ydata()) == REWARDS
    assert list(mean.get_ydata()) == pytest.approx([0.25, 0.25, 1.75 / 3, 0.625])
    assert raw.get_alpha() < 1


def test_evaluations_stand_on_the_curve(root):
    evaluations = [played(4, [1, 1, 0]), played(1, [0, 1, 0]), played(2, [0.5, 0.25], name="other")]
    ax = art.learning_curve(root, evaluations=evaluations)
    [mine, others] = ax.containers
    assert list(mine.lines[0].get_xdata()) == [1, 4]
    assert mine.lines[0].get_color() == COLORS[0]
    [[low, high], _] = [bar[:, 1] for bar in mine.lines[2][0].get_segments()]
    assert (low, high) == pytest.approx(evaluations[1].ci95())
    assert [c.get_label() for c in (mine, others)] == ["a: reward, 95 %", "other: reward, 95 %"]


def test_more_runs_than_colors(tmp_path):
    for n in range(9):
        art.RunStore(tmp_path / f"{n}").append_history({"step": 1, "train/reward": n})
    assert len(lines(art.learning_curve(tmp_path))) == 9


def test_the_given_axes_are_used(root):
    _, ax = plt.subplots()
    assert art.learning_curve(root, ax=ax) is ax
    assert art.comparison_bars([played(1, [1, 0])], ax=ax) is ax
    assert len(plt.get_fignums()) == 1


# bars


def test_bars_with_their_intervals():
    evaluations = [played(1, [1, 0, 0, 0]), played(5, [1] * 4), played(5, [0, 0.5, 1], name="b")]
    ax = art.comparison_bars(evaluations)
    assert [bar.get_height() for bar in ax.patches] == [e.mean() for e in evaluations]
    segments = [bar[:, 1] for bar in ax.containers[0].lines[2][0].get_segments()]
    for segment, evaluation in zip(segments, evaluations, strict=True):
        assert list(segment) == pytest.approx(list(evaluation.ci95()))
    assert [t.get_text() for t in ax.get_xticklabels()] == ["a\nstep 1\nn=4", "a\nstep 5\nn=4", "b\nstep 5\nn=3"]
    assert ax.get_ylabel() == "reward, 95 %"
    colors = [bar.get_facecolor() for bar in ax.patches]
    assert (colors[0] == colors[1], colors[1] == colors[2]) == (True, False)


def test_bars_of_another_metric():
    ax = art.comparison_bars([played(1, [1, 0.5, 0, 0])], metric="win")
    assert ([bar.get_height() for bar in ax.patches], ax.get_ylabel()) == ([0.25], "win, 95 %")
    with pytest.raises(ValueError, match="nothing to compare"):
        art.comparison_bars([])


@pytest.mark.parametrize("rewards", [[1], [0.5], [0, 0], [1] * 1000, [math.pi] * 3])
def test_bars_of_extreme_evaluations_can_be_drawn(rewards):
    art.comparison_bars([played(0, rewards)]).figure.canvas.draw()


# histogram


def group(*rewards):
    return art.TrajectoryGroup(art.Trajectory(messages_and_choices=[], reward=r) for r in rewards)


def test_the_histogram_tells_useful_groups_from_idle_ones():
    ax = art.reward_histogram([group(0, 1, 1), group(1, 1), group(0.5)], bins=2)
    useful, idle = ([bar.get_height() for bar in container] for container in ax.containers)
    assert (useful, idle) == ([1, 2], [0, 3])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["groups that differ: 1", "all equal: 2"]
    assert all(bar.get_hatch() for bar in ax.containers[1])
    ax.figure.canvas.draw()


def test_the_histogram_of_one_group_or_of_one_kind():
    for groups in (group(0, 1), [group(1, 1)], iter([group(0, 1)])):
        art.reward_histogram(groups).figure.canvas.draw()
    with pytest.raises(ValueError, match="no rewards"):
        art.reward_histogram([art.TrajectoryGroup(exceptions=[ValueError("x")])])


# heatmaps


async def test_what_the_loss_saw_of_each_token(named, local):
    model = named()
    await model.register(local)
    with pytest.raises(StoreError, match="has no learner record yet. Every training step writes one"):
        art.token_heatmaps(model)
    groups = [await a_group(model), await a_group(model, seed=1, size=3)]
    for _ in range(2):
        await local.train(model, groups, learning_rate=1e-2)
    record, axes = read_record(model.store, 1), art.token_heatmaps(model, step=1)
    axes["entropy"].figure.canvas.draw()
    drawn = {name: ax.images[0].get_array() for name, ax in axes.items()}
    trained = 4 + 2  # a reward that is its group's mean teaches nothing
    assert {grid.shape for grid in drawn.values()} == {(trained, max(record.size_R))}
    assert drawn["entropy"].count(axis=1).tolist() == record.size_R.tolist()
    assert drawn["learner's logprob"].compressed() == pytest.approx(record.new_E)
    assert drawn["log of their ratio"].compressed() == pytest.approx(record.new_E - record.old_E)
    assert drawn["weight in the loss"][:, 0].compressed() == pytest.approx(record.coef_R)
    assert [line.get_ydata()[0] for line in axes["advantage"].get_lines()] == [3.5]
    assert "step 2" in art.token_heatmaps(model)["advantage"].figure.get_suptitle()
    with pytest.raises(StoreError, match="no readable learner record of step 7. Steps with a record: 1, 2"):
        art.token_heatmaps(model, step=7)


def test_heatmaps_are_of_one_run(root):
    with pytest.raises(StoreError, match="Heatmaps show a single run, but there are 2 runs in"):
        art.token_heatmaps(root)


def test_matplotlib_waits_for_the_first_plot():
    code = "import sys, art_nb; art_nb.learning_curve; print('matplotlib' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
