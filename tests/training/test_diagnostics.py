"""Every lesson fires on a history of its kind, and none on a healthy run."""

import math
import random

import pytest

from art_nb.rollouts.trajectories import Trajectory, TrajectoryGroup
from art_nb.training.diagnostics import ADVICE_BY_MESSAGE, CHECKS, advice_for, diagnose
from art_nb.training.steps import identical_share


def healthy(steps=30, seed=0):
    """A run as tic-tac-toe gives it: the reward rises from 0.3 to 0.9, the entropy falls, the gradient stays."""
    dice = random.Random(seed)
    skill = [1 / (1 + math.exp(-(k - 10) / 4)) for k in range(steps)]
    return [
        {
            "step": k + 1,
            "train/reward": 0.3 + 0.6 * skill[k] + dice.gauss(0, 0.02),
            "train/reward_std_dev": 0.35,
            "data/step_num_groups_submitted": 8,
            "data/step_num_groups_trainable": 8 - round(3 * skill[k]),
            "loss/entropy": 1.2 - 0.7 * skill[k],
            "loss/grad_norm": abs(dice.gauss(0.4, 0.1)) + 0.05,
            "loss/learning_rate": 3e-4,
            "loss/kl_policy_ref": 0.01 * k,
            "loss/clipped_token_fraction": 0.03,
            "loss/clipped_low_fraction": 0.01,
            "loss/clipped_high_fraction": 0.02,
            "offpolicy/kl_sampler": abs(dice.gauss(0.002, 0.001)),
            "offpolicy/logprob_diff_mean": 0.01,
            "train/completion_tokens": 40 + dice.gauss(0, 2),
            "train/truncated": 0.04,
            "train/alike": 0.2 + 0.3 * skill[k],
            "train/common_reply": 0.3,
            "train/exception_rate": 0.0,
        }
        for k in range(steps)
    ]


def changed(rows, last, **values):
    """The history with other numbers in its last steps; a name may end in `_of`: a function of how far it is."""
    n = len(rows) - last
    return rows[:n] + [
        row | {name.replace("__", "/"): value(i) if callable(value) else value for name, value in values.items()}
        for i, row in enumerate(rows[n:])
    ]


def flat(i):
    return 0.3 + 0.01 * (-1) ** i


def rising(i):
    return 0.19 + 0.004 * i + 0.004 * (-1) ** i


NO_VARIANCE = {"data__step_num_groups_trainable": 0}
DEAD = {"loss__grad_norm": 5e-4, "loss__learning_rate": 10, "train__reward": 0.1}
NO_CHOICE = NO_VARIANCE | {"data__step_num_gradient_steps": 0}
HIGHEST = {"data__highest_reward": 1.0, "data__num_groups_highest": 7}
HISTORIES = {
    "nothing_trained": changed(healthy(3), 3, **NO_CHOICE),
    "failures": changed(healthy(), 1, train__exception_rate=0.4),
    "constant_reward": changed(healthy(3), 3, train__reward=0.0, train__reward_std_dev=0.0, **NO_VARIANCE),
    "ruined": changed(healthy(6), 4, loss__entropy=0.2, **DEAD),
    "equal_rewards": changed(healthy(), 3, train__reward=0.3, **NO_VARIANCE),
    "solved": changed(healthy(), 3, train__reward=0.97, data__step_num_groups_trainable=1, **HIGHEST),
    "partly_solved": changed(
        healthy(), 3, train__reward=0.9, data__step_num_groups_trainable=1, **HIGHEST | {"data__num_groups_highest": 5}
    ),
    "reward_without_success": changed(healthy(), 12, train__solved=0.0),
    "unchanged_metric": changed(healthy(), 30, train__state=lambda i: 0.5 + 0.04 * (-1) ** i),
    "kl_blow_up": changed(healthy(), 1, loss__kl_policy_ref=4.0),
    "drift": changed(healthy(), 2, offpolicy__logprob_diff_mean=0.3),
    "much_clipped": changed(healthy(), 2, loss__clipped_token_fraction=0.45),
    "entropy_collapse": changed(healthy(), 3, loss__entropy=0.03, train__reward=0.5),
    "common_reply": changed(healthy(), 2, train__common_reply=0.95, train__reward=0.3),
    "length_collapse": changed(healthy(), 4, train__completion_tokens=6),
    "truncation": changed(healthy(), 3, train__truncated=0.5),
    "mostly_truncated": changed(healthy(), 3, train__truncated=0.97),
    "flat_reward_stable_gradient": changed(healthy(), 14, train__reward=flat),
    "flat_reward_many_highest": changed(
        changed(healthy(), 14, train__reward=flat), 3, **HIGHEST | {"data__num_groups_highest": 3}
    ),
    "flat_reward_unstable_gradient": changed(
        healthy(), 14, train__reward=flat, loss__grad_norm=lambda i: 0.4 * 2 ** (i / 3)
    ),
    "slow_reward": changed(healthy(17), 17, train__reward=rising, train__reward_std_dev=0.2),
    "gradient_spike": changed(healthy(), 1, loss__grad_norm=30.0),
}


def test_there_is_a_history_for_every_lesson():
    assert {check.__name__ for check, _, _ in CHECKS} == set(HISTORIES)


@pytest.mark.parametrize("key", HISTORIES)
def test_a_lesson_fires_where_it_should(key):
    seen = {lesson.key: lesson for lesson in diagnose(HISTORIES[key])}
    assert key in seen
    assert seen[key].step == HISTORIES[key][-1]["step"]


def test_rows_before_a_change_of_the_code_do_not_count():
    rows = changed(healthy(), 12, train__solved=0.0)
    assert "reward_without_success" in {lesson.key for lesson in diagnose(rows)}
    rows[-3]["data/code_changed"] = 1.0
    assert diagnose(rows) == []
    rows[-3]["data/code_changed"], rows[1]["data/code_changed"] = None, 1.0
    assert "reward_without_success" in {lesson.key for lesson in diagnose(rows)}


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_is_left_alone_at_every_step(seed):
    rows = healthy(seed=seed)
    assert [lesson for n in range(1, len(rows) + 1) for lesson in diagnose(rows[:n])] == []


def test_the_kl_of_the_sampler_is_watched_too():
    assert "kl_blow_up" in {x.key for x in diagnose(changed(healthy(), 1, offpolicy__kl_sampler=0.8))}


def test_replies_that_begin_alike_are_a_collapse_long_before_the_entropy_is_gone():
    rows = changed(healthy(), 5, train__alike=0.85, loss__entropy=1.3, train__reward=0.41)
    assert "entropy_collapse" in {lesson.key for lesson in diagnose(rows)}


def test_a_flat_reward_gives_no_advice_about_the_learning_rate_if_many_groups_are_solved():
    (lesson,) = diagnose(HISTORIES["flat_reward_many_highest"])
    assert lesson.finding.endswith("In the last 3 steps, 38% of the groups got only the highest reward of the run.")
    assert "learning_rate" not in lesson.advice and "harder scenarios" in lesson.advice
    slow = changed(HISTORIES["slow_reward"], 3, **HIGHEST | {"data__num_groups_highest": 3})
    assert diagnose(slow) == []
    nearly_all_equal = changed(HISTORIES["flat_reward_many_highest"], 3, data__step_num_groups_trainable=1)
    assert [lesson.key for lesson in diagnose(nearly_all_equal)] == ["partly_solved"]


def test_the_same_reply_is_no_finding_while_the_reward_is_high():
    assert "common_reply" not in {lesson.key for lesson in diagnose(changed(healthy(), 2, train__common_reply=0.95))}


def test_a_low_entropy_is_no_collapse_while_the_reward_rises():
    stuck = changed(healthy(), 6, loss__entropy=0.03, train__reward=0.5)
    assert "entropy_collapse" in {lesson.key for lesson in diagnose(stuck)}
    rising = changed(stuck, 6, train__reward=lambda i: 0.5 + 0.05 * i)
    assert "entropy_collapse" not in {lesson.key for lesson in diagnose(rising)}


def test_a_metric_that_follows_the_reward_is_no_finding():
    failed = changed(HISTORIES["unchanged_metric"], 30)
    for row in failed[:3]:
        del row["train/reward"]  # all rollouts failed
    assert "unchanged_metric" in {lesson.key for lesson in diagnose(failed)}
    follows = changed(healthy(), 30, train__state=lambda i: 0.3 + 0.01 * i, train__draw=0.1)
    assert "unchanged_metric" not in {lesson.key for lesson in diagnose(follows)}


def test_a_constant_reward_is_not_called_too_hard_a_task():
    said = diagnose(HISTORIES["constant_reward"])
    assert [lesson.key for lesson in said] == ["constant_reward"]
    assert said[0].finding == "Every reward of the last 3 steps was 0: does the rollout compute it?"
    rows = rows_with_highest_groups([0.0] * 4, [8] * 4, 0.0)
    assert [lesson.key for lesson in diagnose(rows)] == ["constant_reward"]


@pytest.mark.parametrize("entropy", [0.01, 9.0])
@pytest.mark.parametrize("steps", [3, 12])
def test_a_run_that_its_learning_rate_ruined_is_not_told_to_raise_it(steps, entropy):
    rows = changed(healthy(2), 2, train__reward=0.1) + changed(healthy(steps), steps, loss__entropy=entropy, **DEAD)
    rows = [row | {"step": i + 1} for i, row in enumerate(rows)]
    said = diagnose(rows)
    assert "ruined" in {lesson.key for lesson in said}
    assert not [lesson for lesson in said if "three times the learning_rate" in lesson.advice]


def test_nothing_is_masked_where_nothing_would_be_left():
    for share in (0.8, 0.97, 1.0):
        said = diagnose(changed(healthy(), 3, train__truncated=share))
        assert [lesson.key for lesson in said] == ["mostly_truncated"]
        assert "mask" not in said[0].advice
    assert "mask" in diagnose(HISTORIES["truncation"])[0].advice


def test_parameters_are_named_as_a_user_types_them():
    texts = [advice for _, _, advice in CHECKS] + [advice for _, advice in ADVICE_BY_MESSAGE]
    assert not [text for text in texts if "learning rate" in text]
    assert not [text for text in texts if "max_tokens" in text and "max_completion_tokens" not in text]


def test_replies_alike_are_counted_by_their_beginning():
    def say(text):
        return Trajectory(
            messages_and_choices=[
                {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            ],
            reward=0.0,
        )

    long = "This word consists of four letters, and it is "
    group = TrajectoryGroup([say(long + "blue"), say(long + "rain"), say("Sun"), say("Sun")])
    assert identical_share([group]) == {"train/alike": 0.5}
    assert identical_share([TrajectoryGroup([say("Sun")] * 4)]) == {
        "train/alike": 0.0
    }  # short answers are alike anyway
    assert identical_share([]) == {}


@pytest.mark.parametrize("message", ["Could not write /runs/a: Denied.", "Could not create /runs/a.lock: full"])
def test_a_failed_write_has_advice(message):
    assert "Free some disk space" in advice_for(message)


def test_the_cause_comes_before_the_limit_of_failures():
    limit = "failure 5 of 8 rollouts; max_exceptions=0.5"
    assert "raise max_exceptions" in advice_for(f"KeyError: 'a'; {limit}")
    without = advice_for(f"KeyError: 'a'; {limit}; no rollout has succeeded so far")
    assert "Run one rollout by hand" in without and "max_exceptions" not in without
    assert "Create it inside" in advice_for(f"RuntimeError: <Event> is bound to a different event loop; {limit}")
    assert "did not answer" in advice_for(f"APIConnectionError: Connection error.; {limit}")


def test_one_lucky_rollout_does_not_solve_the_task():
    """Rewards of 0, 0, 0 and then 0.06: the last step is the best one, and nearly all rewards are still 0."""
    rewards = [0.0, 0.0, 0.0, 0.0625]
    rows = [row | {"train/reward": reward} for row, reward in zip(healthy(4), rewards, strict=True)]
    for row in rows:
        row |= {"data/step_num_groups_trainable": 0, "data/step_num_groups_submitted": 4}
    rows[-1]["data/step_num_groups_trainable"] = 1
    assert [warning.key for warning in diagnose(rows)] == ["equal_rewards"]


def test_a_run_that_is_good_from_the_beginning_is_not_advised_to_use_easier_scenarios():
    """Means of 0.91, 0.75, 0.94 and 0.94 have a narrow range. In 6 of 8 groups, all rewards are the highest."""
    rows = rows_with_highest_groups([0.91, 0.75, 0.94, 0.94], [6, 6, 6, 6], 1.0)
    assert [warning.key for warning in diagnose(rows)] == ["solved"]
    for row in rows:
        del row["data/highest_reward"], row["data/num_groups_highest"]  # of an earlier version
    assert [warning.key for warning in diagnose(rows)] == ["equal_rewards"]


def rows_with_highest_groups(rewards, highest_groups, *highest):
    highest = [highest[min(i, len(highest) - 1)] for i in range(len(rewards))]
    values = zip(healthy(len(rewards)), rewards, highest_groups, highest, strict=True)
    return [
        row
        | {
            "train/reward": reward,
            "data/step_num_groups_trainable": 8 - groups,
            "data/step_num_groups_submitted": 8,
            "data/num_groups_highest": groups,
            "data/highest_reward": maximum,
        }
        for row, reward, groups, maximum in values
    ]


def test_a_step_in_which_all_rewards_are_the_highest_solves_the_task():
    rows = rows_with_highest_groups([0.91, 0.94, 0.94, 1.0], [6, 6, 6, 8], 1.0)
    assert [warning.key for warning in diagnose(rows)] == ["solved"]


def test_a_run_that_solves_a_part_of_its_scenarios_is_not_solved():
    """Five of eight groups get only the highest reward, and three always get the same lower one."""
    rows = rows_with_highest_groups([0.3, 0.45, 0.6, 0.64, 0.62, 0.63], [1, 3, 5, 5, 5, 5], 1.0)
    for row in rows:
        row["data/step_num_groups_trainable"] = 0
    warnings = {warning.key: warning for warning in diagnose(rows)}
    assert "solved" not in warnings
    assert (
        "62% of the groups got only the highest reward of the run, and 38% got equal, lower"
        in warnings["partly_solved"].finding
    )


def test_a_run_that_is_always_right_or_always_wrong_is_not_advised_to_use_easier_scenarios():
    """Half of the groups get only the highest reward. Those of another tool, for example, always get 0."""
    rows = rows_with_highest_groups([0.52, 0.5, 0.51, 0.5, 0.5, 0.5], [4, 3, 4, 4, 4, 4], 1.0)
    for row in rows:
        row["data/step_num_groups_trainable"] = 0
    assert [warning.key for warning in diagnose(rows)] == ["partly_solved"]


def test_equal_rewards_below_earlier_ones_do_not_solve_the_task():
    """All groups get partial credit of 0.2, after rewards of up to 1."""
    rows = rows_with_highest_groups([0.6, 0.62, 0.58, 0.2, 0.2, 0.2], [0, 0, 0, 7, 7, 7], 1.0, 1.0, 1.0, 0.2)
    assert "solved" not in {warning.key for warning in diagnose(rows)}
