"""Curation: keys that do not change, journals of several people that merge and survive kill -9, and training data."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.view_parts import CALLS, RESULTS, Talk, crowd, games

import art_nb as art
from art_nb.core.types import BackendMissing
from art_nb.learners.sft_rows import sft_rows
from art_nb.models.tiny import tiny_tokenizer
from art_nb.rewards.journal import write_pairs
from art_nb.rollouts.trajectories import History, Trajectory, TrajectoryGroup
from art_nb.runs.store import RunStore
from art_nb.tokens.chat import ChatFormat
from art_nb.views.curated_data import (
    correction_pairs,
    difference,
    reply_as_text,
    scenario_of,
    sft_trajectories,
    sft_turns,
)
from art_nb.views.curation import Curation, all_conversations, select_conversations
from art_nb.views.curation_replies import (
    MAX_FACTS,
    conversation_reply,
    curation_state_reply,
    rows_reply,
    selected_reply,
)
from art_nb.views.duplicates import DuplicateFinder
from art_nb.views.index import load_all
from art_nb.views.marks import (
    ConversationMarks,
    MarkEntry,
    MarkJournal,
    conversation_key,
    entries_in_order,
    entry_of_row,
    journal_directory,
    mark_time,
    merge_marks,
)
from art_nb.views.personal_data import personal_data_in, without_personal_data


def talk(question="Where is my order?", *texts, **fields):
    entries = [{"role": "user", "content": question}]
    for n, text in enumerate(texts or ("On Monday.",)):
        entries += [{"role": "user", "content": f"And {n}?"}] if n else []
        entries.append({"role": "assistant", "content": text})
    return Trajectory(messages_and_choices=entries, **fields)


def with_calls():
    made = Talk(3).add("system", "Be brief.").add("user", "Look.").say("I look", tool_calls=CALLS)
    for result in RESULTS:
        made.add(**result)
    return made.say("There is a fork.").end(0.5)


# keys


def test_a_conversation_keeps_its_key_in_memory_in_a_run_and_in_a_file(tmp_path):
    made = [with_calls(), games(1, 2).trajectories[0], talk("half \ud800 of one", "a NUL \x00 and é")]
    store = RunStore(tmp_path / "run")
    store.write_groups("train", 1, [TrajectoryGroup(made)])
    index = load_all(store.path)
    read = [index.locate(row).trajectory for row in range(3)]
    assert [conversation_key(t) for t in read] == [conversation_key(t) for t in made]
    assert len({conversation_key(t) for t in made}) == 3
    rescored = made[0].model_copy(update={"reward": 9.0, "metrics": {"x": 1}, "metadata": {"a": 1}, "logs": ["x"]})
    assert conversation_key(rescored) == conversation_key(made[0])
    longer = made[0].model_copy(update={"additional_histories": [History(messages_and_choices=[])]})
    assert conversation_key(longer) != conversation_key(made[0])


def test_the_key_does_not_change_between_versions():
    """Journals on disk contain keys: if this fails, all marks of users are lost."""
    assert conversation_key(talk()) == "9ea29e4ede71c9553ca8490d0af42967"


# journals


ENTRIES = st.lists(
    st.builds(
        MarkEntry,
        conversation=st.sampled_from(["k1", "k2"]),
        author=st.sampled_from(["ana", "ben", "eve"]),
        time=st.integers(0, 40).map(lambda n: f"2026-11-02T10:00:{n:02}.000000+00:00"),
        kind=st.just("mark"),
        value=st.sampled_from(["good", "bad", "fix", None]),
        turn=st.sampled_from([None, 1]),
    ),
    max_size=12,
    unique_by=lambda entry: (entry.author, entry.time),
)


@given(
    st.lists(ENTRIES, max_size=3).filter(
        lambda fs: len({(e.author, e.time) for f in fs for e in f}) == sum(map(len, fs))
    )
)
@settings(max_examples=150, deadline=None)
def test_the_order_of_the_files_does_not_matter(files):
    files = [sorted(entries, key=lambda entry: entry.time) for entries in files]
    merged = [merge_marks(entries_in_order(order)) for order in permutations(files)]
    assert all(result == merged[0] for result in merged)
    assert merge_marks(entries_in_order([*files, *files])) == merged[0]  # copies of the journals change nothing
    latest = {}
    for entry in sorted((entry for entries in files for entry in entries), key=lambda entry: entry.time):
        latest[entry.conversation, entry.turn, entry.author] = entry.value
    for (key, turn, author), value in latest.items():
        assert merged[0][key].marks[turn].get(author) == value


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=8), v, max_size=3),
        max_leaves=6,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_line_is_read_or_skipped(value):
    row = {"conversation": "k", "author": "ana", "time": mark_time(), "kind": "edit", "turn": 1, "value": value}
    for name in ("value", "turn", "author", "time", "kind", "tag"):
        entry = entry_of_row(row | {"value": {"content": "x"}} | {name: value})
        if entry is not None:
            ConversationMarks().add(entry)
            json.dumps(entry.value)


def test_a_journal_reads_only_new_lines_and_sees_other_people(tmp_path):
    log = tmp_path / "sessions.jsonl"
    mine, yours = MarkJournal(journal_directory(log)), MarkJournal(journal_directory(log))
    mine.append(MarkEntry("k", "ana", mark_time(), "mark", "good"))
    assert yours.of("k").verdict() == "good"
    yours.append(MarkEntry("k", "ben", mark_time(), "mark", "bad"))
    assert mine.of("k").verdict() == yours.of("k").verdict() == "disputed"
    mine.append(MarkEntry("k", "ana", mark_time(), "mark", "bad"))
    assert mine.of("k").verdict() == yours.of("k").verdict() == "bad"
    assert sorted(path.name for path in mine.paths()) == ["ana.jsonl", "ben.jsonl"]
    path = mine.file_of("ana")
    path.write_bytes(path.read_bytes().splitlines(True)[0])  # a version control system restored an older file
    assert mine.of("k").verdict() == "disputed"
    path.unlink()
    assert mine.of("k").marks == {None: {"ben": "bad"}}
    third = MarkJournal(None, others=[tmp_path / "sessions.jsonl.marks" / "ben.jsonl"])
    third.append(MarkEntry("k", "eve", mark_time(), "mark", "bad"))
    assert third.of("k").verdict() == "bad" and len(third.read()) == 2 and third.paths() == [yours.file_of("ben")]


def test_marks_that_a_thread_reads_do_not_change():
    """A panel counts marks while another thread adds one."""
    journal = MarkJournal(None)
    journal.append(MarkEntry("k", "ana", mark_time(), "mark", "good"))
    marks, of_k = journal.merged(), journal.of("k")
    rest = iter(marks.items())
    next(rest)
    for conversation in ("k", "l"):
        journal.append(MarkEntry(conversation, "ben", mark_time(), "mark", "bad"))
    assert [*rest] == [] and of_k.verdict() == "good"
    assert journal.of("k").verdict() == "disputed" and journal.of("l").verdict() == "bad"


def test_a_replaced_journal_is_read_also_if_another_one_has_one_new_entry(tmp_path):
    journal = MarkJournal(tmp_path / "marks")
    journal.append(
        MarkEntry("k", "ana", mark_time(), "mark", "good"), MarkEntry("k2", "ana", mark_time(), "mark", "good")
    )
    journal.append(MarkEntry("k", "ben", mark_time(), "mark", "good"))
    assert journal.of("k").verdict() == journal.of("k2").verdict() == "good"
    lines = journal.file_of("ana").read_bytes().splitlines(True)
    (tmp_path / "new").write_bytes(lines[0].replace(b'"good"', b'"bad"').replace(b'"k"', b'"k2"'))
    os.replace(tmp_path / "new", journal.file_of("ana"))  # one entry instead of two
    assert journal.of("k2").verdict() == "bad" and journal.of("k").marks == {None: {"ben": "good"}}
    (tmp_path / "new").write_bytes(b"")
    os.replace(tmp_path / "new", journal.file_of("ana"))
    MarkJournal(tmp_path / "marks").append(MarkEntry("k", "ben", mark_time(), "mark", "bad"))
    assert journal.of("k").verdict() == "bad" and journal.of("k2").is_empty


def test_if_one_entry_is_invalid_none_is_written(tmp_path):
    for journal in (MarkJournal(), MarkJournal(tmp_path / "a.jsonl")):
        with pytest.raises(ValueError, match="a mark is one of"):
            journal.append(
                MarkEntry("k", "ana", mark_time(), "mark", "good"), MarkEntry("k", "ana", mark_time(), "mark", "great")
            )
        assert journal.read() == []


def test_the_clock_of_an_author_may_go_backward(tmp_path):
    journal = MarkJournal(tmp_path / "one.jsonl")
    for hour, verdict in ((10, "good"), (9, "bad")):
        journal.append(MarkEntry("k", "ana", f"2026-11-02T{hour:02}:00:00.000000+00:00", "mark", verdict))
        assert journal.of("k").verdict() == verdict
    assert MarkJournal(tmp_path / "one.jsonl").of("k").verdict() == "bad"


KILLED = """
import sys
from art_nb.views.marks import MarkEntry, MarkJournal, mark_time
journal = MarkJournal(sys.argv[1])
for n in range(100_000):
    journal.append(MarkEntry(f"k{n}", "ana", mark_time(), "edit", {"content": "x" * (n % 3000)}, 1))
    print(n, flush=True)
"""


@pytest.mark.slow
def test_no_finished_mark_is_lost_by_kill_9(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "marks")], stdout=subprocess.PIPE)
    end = time.monotonic() + 200
    while not (line := process.stdout.readline()) or int(line) < 200:
        assert time.monotonic() < end and process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    finished = max([int(line), *(int(rest) for rest in process.stdout.read().splitlines() if rest)])
    process.wait()
    journal = MarkJournal(tmp_path / "marks")
    assert {*journal.merged()} >= {f"k{n}" for n in range(finished + 1)}
    journal.append(MarkEntry("after", "ana", mark_time(), "mark", "good"))
    assert MarkJournal(tmp_path / "marks").of("after").verdict() == "good"


# selections and training data


def marked(*entries):
    marks = ConversationMarks()
    for author, kind, value, turn in entries:
        marks.add(MarkEntry("k", author, mark_time(), kind, value, turn))
    return marks


def rows_of(trajectories):
    chat = ChatFormat(tiny_tokenizer())
    return [(chat.tokenizer.decode(row.tokens[row.sampled]), row) for row in sft_rows(chat, trajectories)]


def trained_text(trajectory, marks):
    return " ".join(text for text, _ in rows_of(sft_trajectories(trajectory, marks)))


def test_the_loss_covers_the_replies_that_are_good():
    three = talk("Hi", "first reply", "second reply", "third reply")  # replies are messages 1, 3 and 5
    for marks, expected in (
        (marked(), ["first", "second", "third"]),
        (marked(("ana", "mark", "good", None)), ["first", "second", "third"]),
        (marked(("ana", "mark", "good", None), ("ana", "mark", "bad", 3)), ["first", "third"]),
        (marked(("ana", "mark", "good", 3)), ["second"]),
        (marked(("ana", "mark", "bad", None)), []),
        (marked(("ana", "mark", "bad", None), ("ana", "edit", {"content": "corrected reply"}, 1)), ["corrected"]),
        (marked(("ana", "mark", "good", None), ("ben", "mark", "bad", None)), []),
        (marked(("ana", "mark", "good", None), ("ben", "mark", "fix", 5)), ["first", "second"]),
        (marked(("ana", "edit", {"content": "one"}, 1), ("ben", "edit", {"content": "two"}, 1)), []),
    ):
        text = trained_text(three, marks) if expected else str(sft_trajectories(three, marks) or "")
        result = [word for word in ("first", "second", "third", "corrected", "one", "two") if word in text]
        assert result == expected, marks
    assert len(sft_trajectories(three, marked(("ana", "mark", "good", 3)))[0].messages()) == 4  # the rest is cut


def test_weight_zero_is_context_in_sft_and_without_any_reply_an_error():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]
    with pytest.raises(art.TokenError, match="weight 0"):
        rows_of([Trajectory(messages_and_choices=messages)])
    ((text, _),) = rows_of(
        [
            Trajectory(
                messages_and_choices=[
                    *messages,
                    {"role": "user", "content": "c"},
                    {"role": "assistant", "content": "dd", "weight": 1},
                ]
            )
        ]
    )
    assert text.startswith("dd") and "b" not in text


def test_histories_calls_and_corrections():
    made = with_calls()
    made.additional_histories = [History(messages_and_choices=talk("Sub?", "sub reply").messages_and_choices)]
    calls = [{"name": "look_up", "arguments": '{"query": "pins"}'}, {"name": "evaluate", "arguments": "{}"}]
    marks = marked(("ana", "edit", {"content": "I look for pins", "tool_calls": calls}, 2), ("ana", "mark", "good", 7))
    main, other = sft_trajectories(made, marks)
    assert len(main.messages()) == 3 and main.messages()[2]["tool_calls"][0]["id"] == "call-a"
    assert main.messages()[2]["tool_calls"][0]["function"] == calls[0] and main.tools is None
    assert [m["content"] for m in other.messages()] == ["Sub?", "sub reply"]
    (pair,) = correction_pairs(made, marks)
    assert [m["role"] for m in pair["prompt"]] == ["system", "user"] and pair["by"] == ["ana"]
    assert "pins" in reply_as_text(pair["chosen"][0]) and "forks" in reply_as_text(pair["rejected"][0])
    assert made.messages()[2]["content"] == "I look"  # the log stays as it was


def test_after_a_changed_call_nothing_is_trained_and_no_result_of_another_call_is_used():
    made = with_calls()
    last = len(made.messages()) - 1
    recorded = [{k: c["function"][k] for k in ("name", "arguments")} for c in made.messages()[2]["tool_calls"]]
    changed = [recorded[0] | {"arguments": '{"query": "pins"}'}, *recorded[1:]]
    for calls, is_changed in ((recorded, False), (changed, True)):
        edit = {"content": "I search", "tool_calls": calls}
        marks = marked(
            ("ana", "mark", "good", None), ("ana", "edit", edit, 2), ("ana", "edit", {"content": "A pin."}, last)
        )
        assert sft_turns(made, marks) == ({2} if is_changed else {2, last})
        (row,) = sft_trajectories(made, marks)
        assert row.messages()[-1]["content"] == ("I search" if is_changed else "A pin.")
        recording = scenario_of(made, marks)["recorded"]
        assert len(recording) == (1 if is_changed else last - 1) and recording[0]["content"] == "I search"
        first, second = correction_pairs(made, marks)
        assert first["chosen"][0]["content"] == "I search" and second["chosen"][0]["content"] == "A pin."
        calls_of_prompt = [c["function"] for c in second["prompt"][2]["tool_calls"]]
        assert [c["arguments"] for c in calls_of_prompt] == [c["arguments"] for c in recorded]


def test_selections_of_a_run_on_disk(tmp_path):
    store = RunStore(tmp_path / "run")
    store.write_groups("train", 1, [games(1, 4, failed=1), TrajectoryGroup([talk(), talk("Other?", "Yes.")])])
    before = {path: path.read_bytes() for path in store.path.rglob("*") if path.is_file()}
    panel = art.curate(store.path, author="ana")
    panel.mark(0, "good")
    panel.mark(1, "bad", turn=2)
    panel.tag(5, "refunds")
    panel.edit(6, 1, "No.")
    again = art.curate(store.path, author="ben")
    assert again.good().rows == (0, 6) and again.tagged("refunds").rows == (5,) and not again.bad().rows
    assert again.where("failed").rows == () and len(again.selected()) == 6
    assert again.where("edited>0 or tag~REF").rows == (5, 6)
    assert [t.messages()[-1]["content"] for t in again.good().where("edited").to_sft()] == ["No."]
    assert again.where("reward>-1").good().rows == again.good().rows
    pairs = again.preference_pairs()
    write_pairs(tmp_path / "pairs.jsonl", pairs)
    assert json.loads((tmp_path / "pairs.jsonl").read_text())["chosen"][0]["content"] == "No."
    scenarios = again.scenarios()
    assert len(scenarios) == 3  # the four games begin alike
    assert json.loads(json.dumps(scenarios)) == scenarios
    assert {path: path.read_bytes() for path in before} == before
    assert (store.path / "marks" / "ana.jsonl").exists() and repr(again).startswith("Curation of run: 6 conversations")
    panel.edit(6, 1, None)
    assert again.good().rows == (0,) and again.preference_pairs() == []


def test_personal_data_is_replaced_in_every_text_of_all_results():
    mail = "write to ana@example.com"
    call = {"id": "c", "type": "function", "function": {"name": "send", "arguments": json.dumps({"to": mail})}}
    thought = {"role": "assistant", "reasoning": mail, "reasoning_content": mail}
    talk = Trajectory(
        messages_and_choices=[
            {"role": "user", "content": [{"type": "text", "text": mail}], "name": "ana@example.com"},
            thought | {"content": [{"type": "thinking", "thinking": mail}], "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": mail},
            thought | {"content": mail, "refusal": mail},
        ]
    )
    panel = art.curate([talk], author="ana")
    panel.edit(0, 3, "corrected: " + mail)
    assert panel.curation.scanned == {} and panel.where("personal>=10").rows == (0,)

    def sft(**options):
        return [row.messages() for row in panel.to_sft(**options)]

    for read in (sft, panel.scenarios, panel.preference_pairs):
        before, after = json.dumps(read()), json.dumps(read(replace_personal_data=True))
        assert "ana@example.com" in before and "ana@example.com" not in after and "[email]" in after
    assert "ana@example.com" in str(panel.curation.trajectory(0).messages())  # the log stays as it was
    reasoning = Trajectory(messages_and_choices=[{"role": "user", "content": "Hi"}, thought | {"content": "Hello"}])
    assert art.curate([reasoning]).where("personal").rows == (0,)


def test_invalid_statements_are_errors(tmp_path):
    panel = art.curate([with_calls(), ValueError("failed")], author="ana", journal=tmp_path / "a.jsonl")
    for attempt, message in (
        (lambda: panel.mark(0, "great"), "a mark is one of"),
        (lambda: panel.mark(0, "good", turn=1), "not a reply"),
        (lambda: panel.mark(1, "good"), "failed rollout"),
        (lambda: panel.mark(7, "good"), "there is no row 7"),
        (lambda: panel.tag(0, "  "), "a tag has 1 to"),
        (lambda: panel.tag(0, "x" * 61), "a tag has 1 to"),
        (lambda: panel.edit(0, 2, "no calls"), "Keep the number"),
        (
            lambda: panel.edit(0, 2, "x", [{"name": "a", "arguments": "[1]"}, {"name": "b", "arguments": "{}"}]),
            "not a JSON",
        ),
        (lambda: panel.edit(0, 5, "  "), "is empty"),
        (lambda: panel.split(validation=2), "a share from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()
    assert not (tmp_path / "a.jsonl").exists()


def test_files_of_other_programs_and_journals_beside_them(tmp_path):
    path = tmp_path / "step_3.jsonl"
    rows = [{"input": f"user\nQuestion {n}", "output": f"Answer {n}", "score": n / 4} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    art.curate(path, author="ana").mark(2, "good")
    assert (tmp_path / "step_3.jsonl.marks" / "ana.jsonl").exists()
    assert art.curate(path).good().rows == (2,)
    assert art.curate(tmp_path).selected().rows == (0, 1, 2, 3)  # the journals are not read as rollouts


def test_tags_of_a_recording_and_of_a_curation():
    recorded = [talk("One?", metadata={"tags": {"agent": "v2", "mail": "ana@example.com"}}), talk("Two?")]
    panel = art.curate(recorded, author="ana")
    panel.tag(0, "short")
    panel.tag(1, "short")
    assert panel.where("tag~v2").rows == panel.tagged("v2", "short").rows == (0,)
    assert panel.tagged("short").rows == (0, 1)
    first, second = panel.to_sft(replace_personal_data=True)
    assert first.metadata["tags"] == {"agent": "v2", "mail": "[email]"} and "tags" not in second.metadata
    assert first.metadata["curation_tags"] == second.metadata["curation_tags"] == ["short"]
    assert panel.to_sft()[0].metadata["tags"] == recorded[0].metadata["tags"]


def test_the_session_of_a_recording_is_a_field():
    panel = art.curate(
        [talk("One?", metadata={"session": "visit-7"}), talk("Two?", metadata={"session": "visit-8"}), talk("A")]
    )
    assert panel.where("session=visit-8").rows == (1,) and panel.where("session~visit").rows == (0, 1)
    assert panel.where("session=''").rows == (2,)


# near-duplicates and splits


def test_equal_texts_are_found_without_the_package():
    finder = DuplicateFinder()
    for row, text in enumerate(["A b c d.", "x", "a B, c d!", "y", "A b c d."]):
        finder.add(row, text)
    assert finder.groups() == {0: [0, 2, 4]}


def need_rensa():
    pytest.importorskip("rensa", reason="rensa is missing: make test-curation")


def test_without_the_package_a_split_says_what_to_install():
    curation = Curation([talk()]).scan_all()
    curation.duplicates.missing = curation.duplicates.missing or "Near-duplicates need the package rensa: x."
    with pytest.raises(BackendMissing, match="rensa"):
        all_conversations(curation).split()


WORDS = [f"word{n}" for n in range(60)]
VARIANTS = st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 59), max_size=3)), min_size=1, max_size=12)


@given(VARIANTS, st.randoms())
@settings(max_examples=60, deadline=None)
def test_groups_do_not_depend_on_the_order(variants, random):
    need_rensa()
    texts = [
        " ".join(f"{base}{word}" for n, word in enumerate(WORDS) if n not in removed) for base, removed in variants
    ]
    order = [*range(len(texts))]
    groups = []
    for _ in range(2):
        finder = DuplicateFinder()
        for row in order:
            finder.add(row, texts[row])
        groups.append({frozenset(rows) for rows in finder.groups().values()})
        random.shuffle(order)
    assert groups[0] == groups[1]
    assert all(len({variants[row][0] for row in rows}) == 1 for rows in groups[0])


def test_near_duplicates_are_on_the_same_side_and_the_split_is_stable():
    need_rensa()
    base = [f"question {n} about " + " ".join(f"w{n}x{i}" for i in range(60)) for n in range(120)]
    talks = [talk(text + end, f"answer {n}") for n, text in enumerate(base) for end in ("", " please")]
    panel = art.curate(talks)
    for seed in range(4):
        train, validation = panel.split(validation=0.25, seed=seed)
        assert {*train.rows} | {*validation.rows} == {*range(240)} and not {*train.rows} & {*validation.rows}
        assert all((row ^ 1 in validation.rows) == (row in validation.rows) for row in range(240))
        assert 30 <= len(validation) <= 95
    assert len(panel.without_duplicates()) == 120
    assert len(panel.where("repeated")) == 120 and len(panel.where("duplicates=2")) == 240


def test_later_near_duplicates_do_not_change_the_side_of_earlier_conversations(tmp_path):
    need_rensa()
    base = [f"question {n} about " + " ".join(f"w{n}x{i}" for i in range(60)) for n in range(60)]
    store = RunStore(tmp_path / "run")

    def sides():
        curation = Curation(store.path).scan_all()
        return {result.key: curation.is_validation(row, 0.5) for row, result in curation.scanned.items()}

    def write(split, step, end):
        made = [talk(text + end, f"answer {n}") for n, text in enumerate(base)]
        store.write_groups(split, step, [TrajectoryGroup(made)])

    write("train", 1, "")
    panel = art.curate(store.path)
    first = sides()
    assert 10 < sum(first.values()) < 50
    for split, step, end in (("train", 2, " please"), ("val", 2, " now"), ("train", 3, " quickly")):
        write(split, step, end)
        assert first.items() <= sides().items()
    panel.curation.index.refresh()  # rows in another order
    panel.curation.scan_all()
    assert {r.key: panel.curation.is_validation(row, 0.5) for row, r in panel.curation.scanned.items()} == sides()


def test_the_state_is_counted_while_another_thread_scans():
    curation = Curation([talk(f"Question {n}") for n in range(3)]).scan_all()

    def scan():
        with curation.lock:
            curation.scanned[99] = curation.scanned[0]

    class Scanned(dict):
        def values(self):
            thread = threading.Thread(target=scan, daemon=True)
            for value in super().values():
                if not thread.ident:
                    thread.start()
                    thread.join(0.3)
                yield value

    curation.scanned = Scanned(curation.scanned)
    assert curation_state_reply(curation)[0]["conversations"] == 3


def test_ten_thousand_conversations_are_answered_as_fast_as_ten(tmp_path):
    groups = crowd(10_000)
    curation = Curation({1: groups}, author="ana", journal=tmp_path / "a.jsonl")
    done, times = False, []
    while not done:
        start = time.thread_time()
        state, _ = curation_state_reply(curation)
        times.append(time.thread_time() - start)
        done = state["done"]
    assert state["conversations"] == 10_000
    assert sorted(times)[len(times) // 2] < 1.0, times  # 0.2 s and one group; the first one of a part also loads it
    curation.journal.append(
        *(MarkEntry(curation.scanned[n].key, "ana", mark_time(), "mark", "good") for n in range(0, 4000, 4))
    )
    assert len(curation_state_reply(curation)[0]["tags"]) == 0
    seconds = []
    for verdict in ("good", "fix", "bad"):  # the garbage collector may run in one of them
        start = time.thread_time()
        curation.write(9999, "mark", verdict)
        rows, _ = rows_reply(curation, list(range(9800, 10_000)))
        facts, _ = conversation_reply(curation, 9999)
        state, _ = curation_state_reply(curation)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < sum(times) / 3, (seconds, times)  # far less than a scan of all conversations
    assert rows["rows"][-1]["mark"] == facts["facts"]["verdict"] == "bad" and state["counts"]["bad"] == 1
    assert len(json.dumps(facts)) < 20_000 and len(json.dumps(rows)) < 60_000
    reply, (ids,) = selected_reply(curation, "mark=good and reward>0.2")
    assert 0 < reply["shown"] == len(ids) // 4 < 10_000


def test_replies_are_bounded_for_hostile_conversations():
    huge = talk("q " * 400_000, "word " * 300_000)
    curation = Curation([huge], author="ana").scan_all()
    curation.write(0, "edit", {"content": "x" * 100_000}, turn=1)
    facts = conversation_reply(curation, 0)[0]["facts"]
    assert len(json.dumps(facts)) < 200_000
    many = talk(" ".join(f"a{n}@example.com" for n in range(5000)))
    assert len(conversation_reply(Curation([many]), 0)[0]["facts"]["personal"]) == MAX_FACTS


# differences and personal data


@given(st.text(max_size=80), st.text(max_size=80))
@settings(max_examples=200, deadline=None)
def test_a_difference_contains_both_texts(old, new):
    parts = difference(old, new)
    assert "".join(text for kind, text in parts if kind != "+") == old
    assert "".join(text for kind, text in parts if kind != "-") == new


@given(st.text(alphabet="ab1 .-+@()/:_\n4", max_size=200))
@settings(max_examples=300, deadline=None)
def test_findings_are_parts_of_the_text(text):
    end = 0
    for finding in personal_data_in(text):
        assert text[finding.start :].startswith(finding.text) and finding.start >= end
        end = finding.start + len(finding.text)
    assert len(personal_data_in(without_personal_data(text))) <= len(personal_data_in(text))


def test_patterns_take_linear_time():
    for unit in ("a", "1", "1 ", "1-", "a@", "a.", "+1", "A1", "+1 (", "1.1", "sk-"):
        start = time.process_time()
        personal_data_in(unit * 100_000)
        assert time.process_time() - start < 2, unit


def test_unknown_fields_and_searches():
    curation = Curation([talk(), talk("Refund me", "Done.")]).scan_all()
    assert select_conversations(curation, words="refund").tolist() == [1]
    with pytest.raises(ValueError, match="no field 'colour'"):
        select_conversations(curation, "colour=red")
