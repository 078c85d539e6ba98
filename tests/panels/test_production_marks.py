"""The marks of the tutorial about production, made by a person: in Chromium, on the recording of its saved run."""

import html
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from support.ui import calm, waits

import art_nb as art
from art_nb.runs.recordings import read_records

SAVED = Path(__file__).with_name("production")  # the first sessions of its recording, and the journal of its marks


@pytest.fixture
def recording(tmp_path):
    """A copy of the recording, without marks."""
    return Path(shutil.copy(SAVED / "monday.jsonl", tmp_path))


def rows_of(examples):
    """The examples for SFT, as plain values."""
    return [trajectory.model_dump(include={"messages_and_choices", "tools", "metadata"}) for trajectory in examples]


def statements(panel):
    """The entries of the journal, without their times."""
    entries = panel.curation.journal.read()
    return {(entry.conversation, entry.kind, entry.turn, str(entry.value)) for entry in entries}


def correct(page, text):
    """Replace the reply by a text, with the keyboard."""
    page.keyboard.press("e")
    page.wait_for_selector(".art-cu-editor textarea")
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(text)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".art-cu-correction")
    calm(page)
    page.focus(".art-panel")


@pytest.mark.slow
def test_a_person_makes_the_marks_of_the_tutorial_in_the_panel(page_with, recording):
    by_code = art.curate(SAVED / "monday.jsonl", journal=SAVED / "ana.jsonl")
    expected = list(by_code.selected().conversations())
    panel = art.curate(recording, author="ana")
    page = page_with(panel)
    page.wait_for_function("!document.querySelector('.art-cu-counts').textContent.includes('reading')")
    page.wait_for_selector(".art-cu-turn")
    calm(page)
    page.focus(".art-panel")
    for row, (_, marks) in enumerate(expected):
        if row:
            page.keyboard.press("n")
            calm(page)
        if marks.corrected_turns:
            correct(page, marks.correction(2)["content"])
        else:
            page.keyboard.press("g")
            page.wait_for_selector(".art-cu-head .art-cu-mark-good[aria-pressed=true]")
    waits(page, lambda: len(statements(panel)) == len(expected))
    assert statements(panel) == statements(by_code)
    examples = panel.good().to_sft()
    assert rows_of(examples) == rows_of(by_code.good().to_sft()) and len(examples) == len(expected) == 20
    assert (recording.parent / "monday.jsonl.marks" / "ana.jsonl").is_file()


def test_the_saved_tutorial_shows_these_corrections(root):
    cells = nbformat.read(root / "examples" / "production" / "production.ipynb", as_version=4).cells
    (shown,) = (
        o.data["text/html"] for c in cells if "art.curate(" in c.source for o in c.get("outputs", []) if "data" in o
    )
    corrections = []
    for session, marks in art.curate(SAVED / "monday.jsonl", journal=SAVED / "ana.jsonl").selected().conversations():
        assert session.messages()[1]["content"][:40] in shown.replace("&#x27;", "'") and not marks.is_empty
        corrections += [str(marks.correction(turn)["content"]) for turn in marks.corrected_turns]
    new = [re.sub("<del>.*?</del>|<[^>]+>", "", part) for part in shown.split("<i>correction of")[1:]]
    assert corrections and len(new) == len(corrections)
    assert all(correction in html.unescape(text) for correction, text in zip(corrections, new, strict=True))


def test_a_scenario_names_its_recorded_session(recording):
    scenarios = art.curate(recording).scenarios()
    assert {scenario["metadata"]["session"] for scenario in scenarios} == {
        record["session"] for record in read_records(recording)
    }
