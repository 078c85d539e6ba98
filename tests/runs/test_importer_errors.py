"""A malformed record in the middle of a valid file: the error has the file, the line and what was expected."""

import copy
import json
import random
import warnings
from pathlib import Path

import pytest

import art_nb as art
from art_nb.core.types import StoreError
from art_nb.runs.conversations import FileRow
from art_nb.runs.readers import ROLLOUT_FORMATS, read_groups

DATA = Path(__file__).parents[1] / "importers" / "data"
ASK, REPLY = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
FILES = {
    "Claude Code": "claude_code",
    "Codex": "codex",
    "LiteLLM": "litellm",
    "MLflow": "mlflow",
    "OpenAI chat": "openai_chat",
    "OpenAI preferences": "openai_preferences",
    "OpenPipe": "openpipe",
    "Phoenix": "phoenix",
    "ShareGPT": "sharegpt",
    "TRL preferences": "trl_preference_implicit",
    "TRL dataset": "trl_unpaired",
    "Weave": "weave",
}
OTHERS = {"OTLP": ("otlp_genai", "otlp_langfuse", "otlp_openinference"), "Langfuse": ("langfuse",)}
ROWS = {
    "Langfuse traces": {
        "id": "t",
        "sessionId": "s",
        "observations": [{"id": "o", "type": "GENERATION", "startTime": "2026-11-26", "input": [ASK], "output": REPLY}],
        "scores": [{"name": "right", "value": 1, "dataType": "BOOLEAN", "source": "ANNOTATION"}],
    },
    "verl": {"input": "2 + 2?", "output": "4", "score": 1.0, "step": 1},
    "TRL": {"step": 1, "prompt": "2 + 2?", "completion": "4", "reward": 1.0, "advantage": 0.5},
    "verifiers": {
        "example_id": 1,
        "prompt": [ASK],
        "completion": [REPLY],
        "reward": 1.0,
        "metrics": {"right": 1.0},
        "is_truncated": False,
        "tool_defs": [TOOL],
    },
}
MISSING = object()
WRONG = (MISSING, 7, "x", [7], {"x": 7}, [["a"]], -1e300)
CASES = 120  # of each format


def lines_of(name):
    """Return at least three valid lines."""
    if name in ROWS:
        return [json.dumps(ROWS[name])] * 3
    path = Path(__file__).with_name(f"{name}.jsonl")
    lines = (path if path.exists() else DATA / f"{name}.jsonl").read_text().splitlines()
    return lines if len(lines) > 2 else [*lines, *lines, *lines]


def places(value, start=()):
    """Yield the paths of all values inside a value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*start, key)
        yield from places(inner, (*start, key))


def changed(row, place, value):
    """Return a copy of a row with another value, or without one, at a place."""
    row = copy.deepcopy(row)
    node = row
    for key in place[:-1]:
        node = node[key]
    if value is MISSING:
        del node[place[-1]]
    else:
        node[place[-1]] = value
    return row


def error_of(path, lines):
    """Return the error of reading a file, or None."""
    path.write_text("\n".join(lines) + "\n")
    try:
        read_groups(path)
    except StoreError as error:
        return str(error)
    return None


NAMES = [*FILES.values(), *OTHERS["OTLP"], *OTHERS["Langfuse"], *ROWS, "verifiers_traces"]


def test_all_formats_have_a_file():
    covered = {*FILES, *OTHERS, *ROWS, "traces of verifiers"}
    assert covered >= ROLLOUT_FORMATS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_error_of_a_malformed_record_has_its_line_and_the_expected_form(tmp_path, name):
    lines, path = lines_of(name), tmp_path / "file.jsonl"
    assert error_of(path, lines) is None
    chosen, errors = random.Random(0), []
    rows = [(i, json.loads(lines[i])) for i in range(1, len(lines) - 1)]
    cases = [(i, row, place, value) for i, row in rows for place in places(row) for value in WRONG]
    top = [case for case in cases if len(case[2]) == 1]
    for i, row, place, value in chosen.sample(top, min(CASES, len(top))) + chosen.sample(cases, min(CASES, len(cases))):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no record is skipped
            error = error_of(path, [*lines[:i], json.dumps(changed(row, place, value)), *lines[i + 1 :]])
        if error:
            start = f"{path}, line {i + 1}"
            assert error.startswith(start) and ": invalid " in error and ": expected " in error, (place, value, error)
            errors.append(error)
    assert errors


@pytest.mark.parametrize("name", NAMES)
def test_a_line_that_is_not_json_is_named(tmp_path, name):
    lines, path = lines_of(name), tmp_path / "file.jsonl"
    path.write_text("\n".join([lines[0], lines[1][:-7], *lines[1:]]))
    with pytest.warns(UserWarning, match=r"file\.jsonl: skipped 1 line\(s\) that are not JSON objects \(line 2\)"):
        assert len(read_groups(path)) > 0


def test_rows_of_tables_and_entries_of_json_have_numbers(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    talks = [[ASK, REPLY], [REPLY | {"content": None, "tool_calls": [7]}], [ASK, REPLY]]
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"messages": messages} for messages in talks]))
    with pytest.raises(StoreError, match=r"a\.json, entry 2: invalid `messages` \(list\): expected"):
        art.read_conversations(path)
    pq.write_table(pa.table({"conversations": [[{"from": "human", "value": "a"}], None, []]}), tmp_path / "b.parquet")
    with pytest.raises(StoreError, match=r"b\.parquet, row 2: invalid `conversations` \(NoneType\): expected a list"):
        art.read_conversations(tmp_path / "b.parquet")


@pytest.mark.parametrize("value", ["yesterday", "nan", "2026-13-01", [1], "9e99"])
def test_what_is_not_a_time_is_an_error_and_not_the_beginning_of_1970(value):
    with pytest.raises(StoreError, match="line 3: invalid `start_time`.*a time"):
        FileRow({"start_time": value}, "line 3").time("start_time")


def test_times_in_all_forms():
    row = FileRow({"text": "1700000000.5", "iso": "2023-11-14T22:13:20.5Z", "ns": "1700000000500000000", "none": ""})
    assert row.time("text") == row.time("iso") == row.time("ns") == 1700000000.5 and row.time("none") == 0
