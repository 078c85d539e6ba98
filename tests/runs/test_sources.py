"""The digest of a program: it depends on the definitions, and not on how they are imported."""

import importlib
import runpy
import sys

import pytest

from art_nb.runs.sources import program_of

TASK = """
import re

LIMIT = 3
scenarios = ["a", "b"]


def reward(reply):
    return len(re.findall("a", reply)) < LIMIT


async def rollout(model, scenario):
    return reward(scenario)
"""


@pytest.fixture
def digest(tmp_path, monkeypatch):
    """Return a function that writes a task and returns its digest, as a script or as an imported module."""
    monkeypatch.syspath_prepend(tmp_path)

    def compute(name, text, is_script):
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        task = runpy.run_path(str(tmp_path / f"{name}.py"), run_name="__main__") if is_script else None
        task = task or vars(importlib.import_module(name))
        return program_of(rollout=task["rollout"], scenarios=task["scenarios"]).digest

    return compute


def test_an_import_of_the_same_code_has_the_same_digest(digest):
    script = digest("task_a", TASK, True)
    assert len(script) == 64
    assert digest("task_b", TASK, False) == script
    assert digest("task_c", f"{TASK}\nprint('unrelated')\n", False) == script


@pytest.mark.parametrize(("old", "new"), [("LIMIT = 3", "LIMIT = 4"), ('"b"]', '"c"]'), ('findall("a"', 'findall("b"')])
def test_another_definition_has_another_digest(digest, old, new):
    assert old in TASK
    digests = {digest("task_d", TASK, False), digest("task_e", TASK.replace(old, new), False)}
    assert [len(text) for text in digests] == [64, 64]


def test_a_statement_that_ran_twice_counts_once(digest):
    """As with Run All in a notebook."""
    changing = TASK.replace("LIMIT = 3", "LIMIT = 3\nlimits = {}\nlimits.update(a=LIMIT)").replace(
        "< LIMIT", "< limits['a']"
    )
    assert digest("task_f", changing, False) == digest("task_g", changing + changing, False) != ""
