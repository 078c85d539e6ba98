"""The step numbers in the panels of a run directory that was written before this version."""

import json

from support.judging_parts import answers

import art_nb as art
from art_nb.core.events import GroupDone
from art_nb.core.files import append_lines
from art_nb.panels.live_state import group_entries, live_state
from art_nb.panels.rankings import find_context
from art_nb.training.run import AttachedRun

LINES = """
{"event": "RolloutStarted", "run": "r", "time": 10.0, "rollout": "a", "group": "g1", "step": 0, "scenario": "s1"}
{"event": "RolloutDone", "run": "r", "time": 11.0, "rollout": "a", "group": "g1", "step": 0, "reward": 1.0}
{"event": "GroupDone", "run": "r", "time": 12.0, "group": "g1", "step": 0, "rewards": [1.0], "exceptions": 0}
{"event": "SignalReport", "run": "r", "time": 13.0, "step": 0, "groups": 1, "trainable_groups": 1, "rows": 1}
{"event": "GradientStep", "run": "r", "time": 14.0, "step": 0, "micro_batch": 1, "micro_batches": 1, "tokens": 5}
{"event": "CheckpointSaved", "run": "r", "time": 15.0, "step": 1, "path": "checkpoints/0001", "bytes": 7}
{"event": "StepDone", "run": "r", "time": 16.0, "step": 1, "metrics": {"step": 1, "train/reward": 1.0}}
{"event": "RolloutStarted", "run": "r", "time": 17.0, "rollout": "b", "group": "g2", "step": 1, "scenario": "s2"}
{"event": "RolloutStarted", "run": "r", "time": 17.5, "rollout": "c", "group": "g3", "step": 2, "scenario": "s3"}
{"event": "RolloutDone", "run": "r", "time": 18.0, "rollout": "b", "group": "g2", "step": 1, "reward": 0.0}
{"event": "GroupDone", "run": "r", "time": 19.0, "group": "g2", "step": 1, "rewards": [0.0], "exceptions": 0}
"""


def old_directory(path):
    store = art.RunStore(path / "p" / "models" / "r")
    store.write_model({"name": "r", "project": "p"})
    append_lines(store.path / "events.jsonl", *map(json.loads, LINES.strip().split("\n")))
    store.append_history({"step": 1, "train/reward": 1.0})
    return store


def test_events_of_an_old_directory_have_the_number_of_their_training_step(tmp_path):
    store = old_directory(tmp_path)
    assert [event.step for event in store.events()] == [1, 1, 1, 1, 1, 1, 1, 2, 3, 2, 2]


def test_panels_show_the_same_steps_for_an_old_directory(tmp_path):
    store = old_directory(tmp_path)
    run = AttachedRun(store)
    run.refresh()
    assert [(entry["id"], entry["step"]) for entry in group_entries(run.progress, {})] == [("g1", 1), ("g2", 2)]
    state = live_state(run.progress, now=20.0)
    assert (state["step"], state["started"], state["finished"]) == (1, 1, 1)  # g3 is for a later step
    assert [find_context(answers("x", "y", group_id=name), store).step for name in ("g1", "g2")] == [1, 2]


def test_events_are_written_in_the_old_form(tmp_path):
    store = art.RunStore(tmp_path)
    store.append_event(GroupDone(group="g", step=3))
    assert json.loads((tmp_path / "events.jsonl").read_text())["step"] == 2
    assert [event.step for event in store.events()] == [3]
