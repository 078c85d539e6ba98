"""Names of scenarios: readable, of limited length, and different for different scenarios."""

import pytest

from art_nb.rollouts.scenarios import scenario_metadata

LONG = "You are a careful assistant. Think step by step and answer with one number. " * 3


def name(scenario):
    return scenario_metadata(scenario)["scenario_id"]


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("a question", "'a question'"),
        (("a question", 7), "('a question', 7)"),
        ({"question": "2 + 2?", "answer": 4}, "question: 2 + 2?, answer: 4"),
        ({"text": "two\nlines"}, "text: two lines"),
        ({}, "{}"),
        ({3: None}, "3: None"),
    ],
)
def test_short_scenarios(scenario, expected):
    assert name(scenario) == expected


def test_a_long_field_does_not_hide_the_others():
    first, second = ({"system": LONG, "question": question, "answer": 4} for question in ("2 + 2?", "3 + 3?"))
    assert len({name(first), name(second)}) == 2
    assert "question: 2 + 2?" in name(first) and "answer: 4" in name(first) and "system: You are" in name(first)
    assert max(map(len, (name(first), name(second)))) <= 80


def test_fields_that_differ_after_their_cut_get_different_names():
    names = {name({"system": LONG, "question": LONG + end}) for end in "abc"}
    assert len(names) == 3
    assert len(name({f"field {i}": LONG for i in range(50)})) == 80
