"""`run.report()`: a reader learns goal, results with intervals, setup and warnings, and what is missing."""

import json
import re

import numpy as np
import pytest
from support.conversations import say
from support.ui import browser  # noqa: F401

from art_nb.core.events import Failed, Informed, Warned
from art_nb.core.files import append_lines
from art_nb.reports import report as report_module
from art_nb.reports.html import DETAIL_LEVELS
from art_nb.reports.report import MAX_REPORT_BYTES, extreme_rollouts, report
from art_nb.reports.run_summary import goal_of, raised_findings, reward_sentence, summary_steps
from art_nb.reports.static_html import steps_table
from art_nb.rollouts.trajectories import Trajectory, TrajectoryGroup
from art_nb.runs.sessions import SESSION_FILE, write_session
from art_nb.runs.store import RunStore
from art_nb.training.evaluation import Evaluation, mean_interval, wilson
from art_nb.training.heartbeat import write_run_record
from art_nb.views.index import load_all
from art_nb.views.step_means import metric_mean, widest_interval

SECTIONS = [
    "Results",
    "Setup",
    "Findings and warnings",
    "Curves and steps",
    "Best and worst rollouts of step 4 (train)",
]
FLAT = {"train/reward": 0.0, "data/step_num_groups_submitted": 4, "data/step_num_groups_trainable": 0}


def group(rewards, failed=(), **metrics):
    trajectories = [
        Trajectory(messages_and_choices=[say(f"I answer {reward}.")], reward=reward, metrics=metrics)
        for reward in rewards
    ]
    return TrajectoryGroup([*trajectories, *failed], metadata={"scenario_id": "opening"})


def session(**changes):
    values = {
        "call": "art.train",
        "step": 0,
        "goal": "Win <at> chess.\n\nWith legal moves.",
        "options": {"steps": 4, "seed": 7, "learning_rate": 1e-3},
        "base_model": {"name": "smollm2-135m", "identity": "sha256 0123"},
        "engine": {"backend": "LocalBackend", "device": "cpu", "rank": 8, "settings": {"max_running": 3}},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "machine": {"cpu": "EPYC", "cores": 2},
        "git": {"commit": "cafe0123456789", "remote": "https://example.org/r", "num_changed": 3, "diff": "hidden"},
    }
    return values | changes


def a_run(folder):
    store = RunStore(folder / "chess")
    store.write_model({"name": "chess", "base_model": "smollm2-135m", "lora_config": {"rank": 8, "alpha": 16}})
    write_session(store, session())
    for step in (1, 2, 3, 4):
        failed = [TimeoutError("no reply after 30 s")] if step == 4 else []
        groups = [group([step + i + g for i in range(4)], failed * (g == 0), won=step / 4) for g in range(3)]
        store.write_groups("train", step, groups)
        store.append_history({"step": step, "train/reward": step + 2.5, "time/step_wall_s": 90.0, "loss/entropy": 1.0})
    for step in (0, 4):
        store.write_groups("val", step, [group([step / 8 + i / 100 for i in range(12)])])
    store.append_event(Warned(key="slow", message="The judge is slow."))
    return store


def shown(run, folder, **options):
    return report(run, folder / "report.html", **options).read_text().partition("</head>")[2]


def text_of(markup):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", markup))


def test_the_sections_are_in_the_order_of_the_questions(tmp_path):
    page = shown(a_run(tmp_path), tmp_path, note="For the meeting.")
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings[: len(SECTIONS)] == SECTIONS
    assert headings[len(SECTIONS) :] == ["Best and worst rollouts of step 4 (val)", "step 4", "step 3", "step 1"]
    assert page.index("Win &lt;at&gt; chess.") < page.index("For the meeting.") < page.index("<h2>Results")


def test_the_summary_names_model_steps_time_and_change(tmp_path):
    store = a_run(tmp_path)
    write_run_record(store, name="chess", status="stopped", step=4, steps=9)
    text = text_of(shown(store, tmp_path))
    for part in (
        "Goal (docstring of the rollout): Win &lt;at&gt; chess.",
        "the run chess, trained from smollm2-135m.",
        "4 finished steps of reinforcement learning, which took 6 min (rollouts and training, without evaluations).",
        "based on 49 rollouts of train in 12 groups and 24 rollouts of val (evaluations). 1 rollout failed.",
        "Its status is &#x27;stopped&#x27; at step 4 of 9.",
        "The mean train reward was 3.5 (95 % interval 1.02 to 5.98) at step 1 and 6.5 (95 % interval 4.02 to 8.98)",
        "The train intervals of steps 1 and 4 overlap, so the change may be chance.",
        "The val intervals of steps 0 and 4 do not overlap.",
    ):
        assert part in text, part


def test_the_results_are_the_first_and_the_last_step_with_n(tmp_path):
    text = text_of(shown(a_run(tmp_path), tmp_path))
    results = text.partition(" Results ")[2].partition(" Setup ")[0]
    assert (
        "step 1 has 12 finished rollouts in 3 groups; step 4 has 12 finished rollouts in 3 groups, 1 failed." in results
    )
    assert "reward 3.5 (1.02 to 5.98) 6.5 (4.02 to 8.98)" in results
    (low, high), (lowest, _) = wilson(0.75, 3), wilson(3, 3)  # equal in the 12 rollouts; three groups
    assert f"won 0.25 ({low:.3g} to {high:.3g}) 1 ({lowest:.3g} to 1)" in results
    low, high = mean_interval([i / 100 for i in range(12)])
    assert f"0.055 ({low:.3g} to {high:.3g})" in results


def test_an_evaluation_has_no_groups_and_no_advantages(tmp_path):
    page = shown(a_run(tmp_path), tmp_path)
    text = text_of(page)
    assert "val (evaluations) : step 0 has 12 finished rollouts; step 4 has 12 finished rollouts." in text
    train, _, val = page.partition("Best and worst rollouts of step 4 (train)")[2].partition("of step 4 (val)")
    assert train.count(" · advantage ") == 6
    assert " · advantage " not in val.partition("<h2>")[0] and val.count("highest reward · opening · rollout ") == 3
    store = RunStore(tmp_path / "several")
    store.write_groups("val", 1, [group([0, 1]), group([0, 2])])
    assert "val (evaluations) : step 1 has 4 finished rollouts in 2 groups." in text_of(shown(store, tmp_path))


def test_intervals_are_explained_below_their_table(tmp_path):
    page = shown(a_run(tmp_path), tmp_path)
    results = page.partition("<h2>Results</h2>")[2].partition("<h2>Setup</h2>")[0]
    train, val = re.findall(r"</table></div><p>(.*?)</p>", results)
    assert (
        train.startswith("In parentheses: the 95 % confidence interval") and "rollouts of a group can be alike" in train
    )
    assert val == "In parentheses: the 95 % confidence interval of the mean."
    assert 'title="mean of 12 rollouts in 3 groups, with its 95 % confidence interval">6.5 (4.02 to 8.98)' in results
    assert 'title="mean of 12 rollouts, with its 95 % confidence interval">' in results


def test_durations_have_a_unit_and_the_band_is_explained(tmp_path):
    store = RunStore(tmp_path / "run")
    store.write_groups("train", 1, [group([0, 1, 2], duration=23.75)])
    store.append_history({"step": 1, "train/reward": 1.0, "train/reward_std_dev": 0.125})
    text = text_of(shown(store, tmp_path))
    assert "duration 23.8 s (all equal)" in text and "· duration 23.75 s" in text
    assert "1 ± 0.125" in text and "the standard deviation of the rewards of a group" in text


def test_the_setup_is_that_of_the_latest_session(tmp_path):
    store = a_run(tmp_path)
    write_session(store, session(step=2, options={"steps": 4, "seed": 8, "learning_rate": 2e-3}))
    setup = text_of(shown(store, tmp_path)).partition(" Setup ")[2].partition(" Findings ")[0]
    for part in (
        "smollm2-135m, sha256 0123",
        "LoRA rank=8, alpha=16",
        "changed options steps=4, learning_rate=0.002",
        "seed 7, 8",
        "backend=LocalBackend, device=cpu",
        "max_running=3",
        "python=3.11.7, torch=2.13.0",
        "commit cafe01234567 of https://example.org/r, with 3 changed files",
        "cpu=EPYC, cores=2",
        "sessions: 2",
        "steps=4, seed=7, learning_rate=0.001",
    ):
        assert part in setup, part
    assert "hidden" not in setup
    empty = session(engine={"backend": "LocalBackend", "seed_limits": ""})
    write_session(store, empty)
    assert "engine backend=LocalBackend changed" in text_of(shown(store, tmp_path))


@pytest.mark.parametrize("value", [None, 3, "text", [1], {"a": [None]}, {"rank": {}, "commit": 7, "seed": [1]}])
def test_a_damaged_session_is_shown_as_far_as_it_can_be_read(tmp_path, value):
    store = a_run(tmp_path)
    store.write_model({"name": "chess", "lora_config": value})
    append_lines(store.path / SESSION_FILE, {name: value for name in session()}, {"call": "art.train"})
    assert "sessions: 3" in shown(store, tmp_path)


def test_secrets_are_not_in_the_page(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "planted-in-the-environment")
    store = a_run(tmp_path)
    store.path.joinpath("model.json").write_text(json.dumps({"name": "chess", "inference_api_key": "planted-key"}))
    options = {"judge": {"api_key": "planted-option"}, "url": "https://me:planted-password@example.org"}
    write_session(store, session(options=options, goal="Use planted-in-the-environment."))
    page = shown(store, tmp_path)
    assert "judge=" in page and "example.org" in page
    assert "planted" not in page


def test_every_warning_is_listed_and_equal_ones_are_counted(tmp_path):
    store = a_run(tmp_path)
    for i in range(400):
        store.append_event(Warned(key=f"{i}", message=f"warning number {i}."))
    for _ in range(3):
        store.append_event(Failed(where="step 5", message="RuntimeError: no memory", traceback="line 12 of <loss>"))
    page = shown(store, tmp_path)
    assert not [i for i in range(400) if f"warning number {i}." not in page]
    assert "warnings and failures: 404" in page
    assert "3 ×" in page and page.count("RuntimeError: no memory") == 1
    assert "failed: step 5" in page and "line 12 of &lt;loss&gt;" in page


def test_an_explanation_is_not_a_warning(tmp_path):
    store = RunStore(tmp_path / "run")
    store.append_event(Informed(key="tools in words", message="The template does not support tools."))
    text = text_of(shown(store, tmp_path))
    assert "contains no warnings and no failures" in text and "does not support tools" not in text


def test_a_finding_that_ended_is_still_listed(tmp_path):
    better = {"train/reward": 5.0, "data/step_num_groups_submitted": 4, "data/step_num_groups_trainable": 4}
    history = [(FLAT if step < 4 else better) | {"step": step} for step in range(1, 7)]
    (first, last, finding) = raised_findings(history)[0]
    assert (first, last, finding.title) == (2, 3, "The reward is constant")
    store = RunStore(tmp_path / "run")
    for row in history:
        store.append_history(row)
    text = text_of(shown(store, tmp_path))
    assert "steps 2 to 3 The reward is constant." in text
    assert "still true at the end" not in text
    assert raised_findings([]) == []
    assert len(raised_findings([FLAT | {"step": step} for step in range(1, 1500)])) == 1


def test_the_interval_covers_the_mean_although_rollouts_of_a_group_are_alike():
    rng, groups = np.random.default_rng(0), np.repeat(np.arange(6), 8)
    hits = {"both": 0, "rollouts": 0}
    for _ in range(400):
        values = rng.normal(0, 1, 6)[groups] + rng.normal(0, 0.3, 48)
        for name, (low, high) in (("both", widest_interval(values, groups)), ("rollouts", mean_interval([*values]))):
            hits[name] += low < 0 < high
    assert hits["both"] > 0.92 * 400
    assert hits["rollouts"] < 0.7 * 400


def test_the_mean_is_that_of_the_history_even_if_rollouts_failed():
    index = load_all([group([0, 0, 0, 0]), group([10], failed=[ValueError("x")] * 3)])
    mean = metric_mean(index, "train", 0)
    assert (mean.mean, mean.rollouts, mean.groups, mean.failed) == (2, 5, 2, 3)
    low, high = mean.interval
    assert (low + high) / 2 == pytest.approx(2)


def test_the_interval_of_a_rate_ends_at_0_and_1():
    solved = [Trajectory(messages_and_choices=[say("ok")], metrics={"solved": n % 2}) for n in range(4)]
    index = load_all([TrajectoryGroup(solved)])
    assert metric_mean(index, "train", 0, "solved").interval == (0.0, 1.0)


def test_the_interval_of_rewards_between_0_and_1_ends_there():
    low, high = metric_mean(load_all([group([0.8, 1, 1]), group([0.9, 0.95])]), "train", 0).interval
    assert 0.8 < low < 0.93 and high == 1
    low, high = metric_mean(load_all([group([0.8, 1, 1.01])]), "train", 0).interval
    assert high > 1.1


def test_the_interval_of_a_boolean_is_that_of_an_evaluation():
    won = [Trajectory(messages_and_choices=[say("ok")], metrics={"won": n < 9}) for n in range(10)]
    index = load_all({1: [TrajectoryGroup(won)], 2: [TrajectoryGroup(won[:9])]})
    for step, n in ((1, 10), (2, 9)):
        evaluation = Evaluation("m", step, won[:n], metric="won")
        assert metric_mean(index, "train", step, "won").interval == evaluation.ci95() == wilson(9, n)


def test_values_that_are_no_numbers_are_left_out():
    index = load_all([group([1.0, float("nan"), 3.0])])
    assert (metric_mean(index, "train", 0).mean, metric_mean(index, "train", 0).rollouts) == (2.0, 2)
    index.parts[0].metrics[:] = [{"m": "text"}, {"m": 10**400}, {"m": True}]
    assert (metric_mean(index, "train", 0, "m").mean, metric_mean(index, "train", 0, "m").rollouts) == (1.0, 1)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([group([0.5])], "a single rollout is too few for an interval"),
        ([group([5] * 6)], "all 6 rewards are equal, so an interval cannot be estimated"),
        ([group([0.5, 0.7, 0.1])], "the interval of 3 rollouts is only rough"),
        ([group([], failed=[ValueError("<b>")] * 2)], "no rollout finished, so there is no reward"),
    ],
)
def test_a_missing_interval_is_explained(tmp_path, groups, expected):
    store = RunStore(tmp_path / "run")
    store.write_groups("train", 1, groups)
    text = text_of(shown(store, tmp_path))
    assert f"train, step 1: {expected}" in text
    assert "no recorded session" in text
    assert "contains no warnings and no failures" in text


def test_a_run_of_supervised_fine_tuning_has_losses(tmp_path):
    store = RunStore(tmp_path / "run")
    for step in (1, 2):
        store.append_history({"step": step, "sft/loss": 2.0 / step, "sft/final_loss": 1.5 / step})
    text = text_of(shown(store, tmp_path))
    assert "It has 2 steps of supervised fine-tuning. No rollouts are stored." in text
    assert "sft/loss was 2 at step 1 and 1 at step 2." in text
    assert "reinforcement learning to check" in text
    assert "Curves and steps" not in text and "Best and worst" not in text


def test_a_history_without_rollouts_has_rewards_without_intervals(tmp_path):
    store = RunStore(tmp_path / "run")
    for step in (1, 2):
        store.append_history({"step": step, "train/reward": step / 4})
    text = text_of(shown(store, tmp_path))
    assert "No rollouts of train are stored, so there is no interval." in text
    assert "train/reward was 0.25 at step 1 and 0.5 at step 2." in text


def test_a_file_of_rollouts_has_no_run(tmp_path):
    rows = [{"input": "2 + 2", "output": f"{n}", "score": n == 4, "step": 1} for n in range(3, 6)]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    page = shown(path, tmp_path)
    assert re.findall("<h2>(.*?)</h2>", page) == ["Results", "Best and worst rollouts of step 1 (train)", "step 1"]
    assert "the rollouts of rollouts.jsonl" in page
    assert "<h2>Results</h2>" in shown(load_all([]), tmp_path)


def test_the_best_the_worst_and_the_failed_rollouts(tmp_path):
    rewards = [5, 1, 7, 2, 9, 3, 4, 8]
    index = load_all([group(rewards, failed=[ValueError("late <b>")] * 5), group([float("nan")])])
    selected = extreme_rollouts(index, "train", 0)
    assert [rewards[row] for row, why in selected.items() if why == "highest reward"] == [9, 8, 7]
    assert [rewards[row] for row, why in selected.items() if why == "low reward"] == [1, 2, 3]
    assert [*selected.values()].count("failed") == 3
    assert extreme_rollouts(index, "train", 7) == {}
    games = load_all([group([1] * 9 + [0.5, -1, -1, -1, -1, 0])])
    low = [row for row, why in extreme_rollouts(games, "train", 0).items() if why == "low reward"]
    assert [float(games.table["reward"][row]) for row in low] == [-1, 0, 0.5]  # not three times the lowest one
    assert {*extreme_rollouts(load_all([group([float("nan")])]), "train", 0).values()} == {"the reward is not a number"}
    assert {*extreme_rollouts(load_all([group([2] * 5)]), "train", 0).values()} == {"all rewards are equal"}
    assert [*extreme_rollouts(load_all([group([2])]), "train", 0)] == [0]
    page = shown(index, tmp_path)
    assert "highest reward · opening · rollout 4 · reward 9" in page
    assert "failed · opening · rollout 8 · ValueError: late &lt;b&gt;" in page
    assert page.index("I answer 9.") < page.index("I answer 1.") < page.index("late &lt;b&gt;")


def test_the_reason_has_the_metrics(tmp_path):
    assert re.search(r"highest reward · opening · rollout 3 · reward 9.* · won 1<", shown(a_run(tmp_path), tmp_path))


def test_by_default_the_report_of_another_run_has_another_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [RunStore(tmp_path / ".art" / "games" / "models" / name) for name in ("one", "two: now")]
    for store in runs:
        store.write_groups("train", 1, [group([1])])
    assert [str(report(store)) for store in runs] == ["report-games-one.html", "report-games-two-now.html"]
    assert str(report(runs[0], "mine.html")) == "mine.html"
    assert str(report([group([1])])) == "report-1-group.html"
    assert len([*tmp_path.glob("*.html")]) == 4


def test_many_long_warnings_stay_below_the_limit(tmp_path):
    store = a_run(tmp_path)
    for i in range(1500):
        store.append_event(Warned(key=f"{i}", message=f"{i} " + "<" * 7000))
    page = report(store, tmp_path / "report.html")
    assert page.stat().st_size <= MAX_REPORT_BYTES
    assert f"1499 {'&lt;' * 50}" in page.read_text()


def test_a_lower_level_keeps_the_newest_warnings(tmp_path, monkeypatch):
    store = a_run(tmp_path)
    for i in range(500):
        store.append_event(Warned(key=f"{i}", message=f"warning number {i}."))
    monkeypatch.setattr(report_module, "MAX_REPORT_BYTES", 100_000)
    page = shown(store, tmp_path)
    assert len(page) < 100_000
    assert "the newest 160 of 501 messages" in page
    assert "warning number 499." in page and "warning number 0." not in page


def test_few_evaluations_are_all_shown(tmp_path):
    store = RunStore(tmp_path / "run")
    for split, n in (("train", 3), ("val", 4), ("test", 5)):
        for step in range(n):
            store.write_groups(split, step, [group([1.0])])
    assert summary_steps(load_all(store)) == {"train": [0, 2], "test": [0, 4], "val": [0, 1, 2, 3]}


def test_the_table_of_steps_has_metrics_of_the_task(tmp_path):
    store = RunStore(tmp_path / "run")
    store.append_history({"step": 0, "val/reward": 0.1, "val/solved": 0.25})
    store.append_history(
        {"step": 1, "train/reward": 0.5, "train/solved": 0.75, "train/Loss": 0.125, "train/short": 1.0}
    )
    text = text_of(str(steps_table(store, DETAIL_LEVELS[0])))
    assert text.split("train/Loss")[0].split()[-2:] == ["train/solved", "val/solved"]
    assert "0.25" in text and "0.75" in text and "short" not in text


def test_a_goal_and_a_comparison(tmp_path):
    assert goal_of([{"goal": "first"}, {"goal": "second"}, {"goal": " "}, {"goal": 3}, {}]) == "second"
    assert goal_of([]) == ""
    index = load_all({1: [group([0, 1, 0, 1])], 2: [group([8, 9, 8, 9])], 3: [group([], failed=[ValueError()])]})
    means = [metric_mean(index, "train", step) for step in (1, 2, 3)]
    assert reward_sentence(means[:2]).endswith("The train intervals of steps 1 and 2 do not overlap.")
    assert reward_sentence(means[:1]).startswith("The mean train reward was 0.5 (95 % interval 0 to 1) at step 1")
    assert reward_sentence(means[1:]).endswith("at step 2 and unknown at step 3.")
    assert " at step 1, 8.5 (95 % interval " in reward_sentence(means)
    store = RunStore(tmp_path / "run")
    for step, rewards in ((1, [0, 1, 0, 1]), (2, [0, 1, 1, 1])):
        store.write_groups("val", step, [group(rewards)])
    index = load_all(store)
    sentence = reward_sentence([metric_mean(index, "val", step) for step in (1, 2)])
    assert "overlap. The interval of `after.difference(before)`" in sentence and "chance" not in sentence


def test_a_usual_table_of_steps_is_not_cut_off(browser, tmp_path):  # noqa: F811
    store = RunStore(tmp_path / "run")
    names = "train/reward loss/entropy loss/grad_norm train/completion_tokens val/reward train/reward_std_dev "
    names += "offpolicy/kl_sampler loss/train time/step_wall_s train/win val/win train/illegal val/illegal"
    store.append_history({"step": 1} | dict.fromkeys(names.split(), -0.0043121))
    page = browser.new_page(viewport={"width": 1300, "height": 800})
    page.goto(f"file://{report(store, tmp_path / 'report.html')}")
    assert "val/illegal" in page.inner_text("table >> nth=-1")
    sizes = "(all) => all.map((table) => table.parentNode.scrollWidth - table.parentNode.clientWidth)"
    assert not any(page.locator("table").evaluate_all(sizes))
    page.close()


COLOR = """name => { const probe = document.createElement('p'); document.body.append(probe);
  probe.style.color = name;
  const color = getComputedStyle(probe).color; probe.remove(); return color; }"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_reads_on_a_phone_in_both_themes(browser, tmp_path, scheme):  # noqa: F811
    store = a_run(tmp_path)
    write_session(
        store, session(goal="x" * 300, git={"commit": "c" * 40, "remote": "https://example.org/" + "r" * 200})
    )
    path = report(store, tmp_path / "report.html", note="n" * 300)
    page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    page.goto(f"file://{path}")
    page.evaluate("() => document.querySelectorAll('details').forEach(one => one.open = true)")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    color, back = (
        sum(map(int, re.findall(r"\d+", page.evaluate(COLOR, name))[:3])) for name in ("CanvasText", "Canvas")
    )
    assert (color > back) == (scheme == "dark")
    texts = page.evaluate(
        "() => [...document.querySelectorAll('h1,h2,p,td,summary')].map(e => getComputedStyle(e).color)"
    )
    assert len({*texts}) == 1, "all text has the color of the theme"
    page.close()
