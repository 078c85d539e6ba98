"""`make bench` compares its rows with the table in docs/benchmarks.md."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def baseline(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import baseline

    yield baseline
    sys.modules.pop("baseline")


def line(row, ours, ratio=None, better="more"):
    return {"row": row, "ours": ours, "ratio": ratio, "better": better, "unit": "s"}


def test_the_table_of_the_page_is_read(baseline):
    rows = baseline.baseline_rows(baseline.PAGE.read_text())
    assert len(rows) > 20
    assert all(value and value > 0 for value, _ in rows.values())
    assert sum(ratio is not None for _, ratio in rows.values()) > 15


def test_rows_that_are_more_than_ten_percent_worse_are_named(baseline):
    before = {"speed": (100.0, 2.0), "memory": (50.0, 0.5), "seconds": (1.0, None), "unmeasured": (1.0, None)}
    fine = [line("speed", 40, 1.85), line("memory", 90, 0.54, "less"), line("seconds", 1.05, better="less")]
    assert baseline.regressions(fine, before) == []
    assert baseline.regressions([line("new", 1.0), line("unmeasured", None)], before) == [
        "new: not compared, it is not in the table",
        "unmeasured: not compared, it failed",
    ]
    bad = [line("speed", 200, 1.6), line("memory", 50, 0.6, "less"), line("seconds", 1.2, better="less")]
    assert baseline.regressions(bad, before) == [
        "speed: 1.6 instead of 2 (ratio), 25% worse",
        "memory: 0.6 instead of 0.5 (ratio), 20% worse",
        "seconds: 1.2 instead of 1 (s), 20% worse",
    ]
