"""The index of a run: the same from objects and from files, quick, and fit to be sent whatever a model wrote."""

import json
import random
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat.chat_completion import Choice
from support.conversations import make_conversation, say

from art_nb.models.model import Model
from art_nb.panels.viewer import view, write_override
from art_nb.rewards.journal import Journal
from art_nb.rewards.judges import Judgment
from art_nb.rollouts.trajectories import History, Trajectory, TrajectoryGroup, choices
from art_nb.runs.store import RunStore
from art_nb.training.evaluation import evaluate
from art_nb.views import replies
from art_nb.views.comparison import RunComparison, shared_scenarios
from art_nb.views.conversation import (
    MAX_PART_BYTES,
    conversation_of,
    paginate,
    shared_count,
    shared_units,
    token_texts,
    tokenizer_of,
)
from art_nb.views.index import find_row, link, load_all, open_rollouts, resolve, search, select
from art_nb.views.query import FIELDS, rows_where
from art_nb.views.step_table import COLUMNS, FLAGS, table_of_file, table_of_groups
from art_nb.views.token_values import CHANNELS, tokens_reply

HOSTILE = [
    "<script>window.__pwned=1</script>",
    "\x1b[31mred\x1b[0m",
    "‮evil",
    "\ud800 lone \udfff",
    "NUL \x00 byte",
    "</script>",
    "[red]markup[/]",
    "🙂" * 3,
    "line\r\nbreaks\u2028here",
]


def thread(*texts, reward=0.0, **fields):
    """A conversation in turns, the model's every second one."""
    said = [say(text) if i % 2 else {"role": "user", "content": text} for i, text in enumerate(texts)]
    return Trajectory(messages_and_choices=said, reward=reward, **fields)


def random_groups(seed):
    """Groups with histories, parts, tools, tokens, failures and odd numbers."""
    rng = random.Random(seed)

    def trajectory():
        more = [History(messages_and_choices=make_conversation(rng)) for _ in range(rng.choice([0, 0, 2]))]
        metrics = rng.choice([{"win": rng.random() < 0.5, "ruler_score": rng.random()}, {"injection_flag": 1}])
        entries = make_conversation(rng)
        for entry in entries:
            if isinstance(entry, Choice) and rng.random() < 0.3:
                entry.finish_reason = "length"
        reward = rng.choice([0, 1, 0.3, float("nan")])
        return Trajectory(
            messages_and_choices=entries,
            additional_histories=more,
            reward=reward,
            metrics=metrics,
            metadata={"seed": seed},
            logs=["a log line"] * rng.randrange(2),
        )

    def group(g):
        items = [ValueError("broke") if rng.random() < 0.2 else trajectory() for _ in range(rng.randrange(5))]
        return TrajectoryGroup(items, metadata={"scenario_id": f"s{g}"} if rng.random() < 0.7 else {})

    return [group(g) for g in range(rng.randrange(1, 6))]


@pytest.mark.parametrize("seed", range(25))
def test_a_file_gives_what_its_objects_give(seed, tmp_path):
    groups, store = random_groups(seed), RunStore(tmp_path)
    store.write_groups("train", 5, groups)
    read, made = table_of_file(store, "train", 5), table_of_groups("train", 5, groups)
    for name in COLUMNS.names:
        np.testing.assert_array_equal(read.table[name], made.table[name], err_msg=name)
    assert (read.names, read.keys, read.metrics) == (made.names, made.keys, json.loads(json.dumps(made.metrics)))
    for words in ("go", "weiter", "hm", "move", "log line", "日本", "broke", "finish_reason", "role", "assistant"):
        np.testing.assert_array_equal(read.matches(words), made.matches(words), err_msg=words)
    everything = range(len(made.table))
    assert read.previews(everything) == made.previews(everything)
    for place, group in enumerate(groups):
        back = read.group(place)
        assert [t.messages() for t in back] == [t.messages() for t in group]
        assert [len(t.exceptions) for t in (back,)] == [len(group.exceptions)]
        for ours, theirs in zip(back, group, strict=True):
            for one, other in zip(choices(ours), choices(theirs), strict=True):
                assert one.model_extra == other.model_extra or not other.model_extra.get("prompt_token_ids")
                assert token_texts(one) == token_texts(other)


def test_arts_older_files_are_read_too(tmp_path):
    path = tmp_path / "trajectories" / "train" / "0001.jsonl"
    path.parent.mkdir(parents=True)
    one = {"messages": [{"role": "user", "content": "hi"}], "reward": 0.5, "metrics": {}, "metadata": {}, "logs": []}
    path.write_text(json.dumps({"trajectories": [one, one | {"reward": 1}], "exceptions": []}) + "\n")
    index = open_rollouts(tmp_path)
    assert index.load(60)
    assert index.table["reward"].tolist() == [0.5, 1.0]


def cpu(work, times=3):
    """The CPU time this thread needs for some work, in seconds: the least of several, and what it gave.

    Other processes hardly change it; only ratios of it are compared.
    """
    best = float("inf")
    for _ in range(times):
        start = time.thread_time()
        result = work()
        best = min(best, time.thread_time() - start)
    return best, result


def test_ten_thousand_rows_open_without_their_rollouts(tmp_path):
    """The index of ten steps costs less than reading three of them, a page of it less than a quarter of one."""
    texts = ["What do you see? " * 20, "I see a board. " * 20, "And now? " * 10, "Now I see another one. " * 10]
    groups = [
        TrajectoryGroup(
            [thread(*texts, reward=i / 8, metrics={"win": i > 4}) for i in range(8)], metadata={"scenario_id": f"s{g}"}
        )
        for g in range(125)
    ]
    store = RunStore(tmp_path)
    for step in range(1, 11):
        store.write_groups("train", step, groups)

    def whole():
        index = open_rollouts(tmp_path)
        told, buffers = replies.index_reply(index)
        while not told["done"]:
            told, more = replies.index_reply(index, len(index))
            buffers = [a + b for a, b in zip(buffers, more, strict=True)]
        return index, buffers

    one_step, _ = cpu(lambda: store.read_groups("train", 1))
    open_s, (index, buffers) = cpu(whole)
    assert len(index) == 10_000
    assert sum(map(len, buffers)) == 320_000
    assert open_s < 3 * one_step
    page, _ = cpu(lambda: (replies.page_reply(index, [*range(5000, 5200)]), replies.traj_reply(index, 5100)))
    assert page < one_step / 4


def test_the_first_part_of_an_index_does_not_wait_for_the_rest(tmp_path):
    store, group = RunStore(tmp_path), TrajectoryGroup([thread("?", "x", reward=i) for i in range(2)])
    for step in (1, 2, 3):
        store.write_groups("train", step, [group])
    index = open_rollouts(tmp_path)
    assert not index.load(limit_s=0)
    told, _ = replies.index_reply(index)
    assert (told["rows"], told["done"]) == (2, False)


def test_ten_thousand_in_memory_cost_no_more_each_than_a_thousand():
    group = TrajectoryGroup([thread("a" * 500, "b" * 500, reward=i) for i in range(8)])

    def whole(groups):
        index = open_rollouts([group] * groups)
        while not replies.index_reply(index)[0]["done"]:
            index.load(60)
        return index

    few, _ = cpu(lambda: whole(125))
    many, index = cpu(lambda: whole(1250))
    assert many < 30 * few
    assert index.table["id"].tolist() == [*range(10_000)]
    assert index.locate(9999).group == 1249


def test_rows_of_an_active_run(tmp_path):
    store, live = RunStore(tmp_path), [TrajectoryGroup([thread("?", "x", reward=i) for i in range(2)])]
    store.write_groups("train", 1, live)
    index = load_all(tmp_path)
    store.write_groups("train", 2, [*live, TrajectoryGroup([thread("?", "y"), OSError("gone")])])
    assert index.refresh()
    index.load(60)
    assert index.refresh() is False
    store.write_groups("val", 2, live)
    assert index.refresh()
    while not index.load():
        pass
    assert index.table["step"].tolist() == [1, 1, 2, 2, 2, 2, 2, 2]
    assert link(index, 5).endswith("/train/2/1/1")
    assert resolve(index, link(index, 5)) == (5, None)
    assert find_row(index, "val", 2, 0, 1) == 7
    assert replies.traj_reply(index, 5)[0]["error"]["type"] == "OSError"


def test_a_step_that_was_written_anew(tmp_path):
    store = RunStore(tmp_path)
    store.write_groups("train", 1, [TrajectoryGroup([thread("?", "x", reward=i) for i in range(2)])])
    index = load_all(tmp_path)
    version = replies.index_reply(index)[0]["version"]
    store.write_groups("train", 1, [TrajectoryGroup([thread("?", "x", reward=5 * i) for i in range(2)])])
    assert index.refresh()
    told, _ = replies.index_reply(index)
    assert told["version"] > version
    assert index.table["reward"].tolist() == [0, 5]
    assert index.table["id"].tolist() == [0, 1]
    store.write_groups("train", 1, [TrajectoryGroup([thread("?", "x")])])
    assert index.refresh() is False  # other rollouts: what is on show stays


def test_judgments_count_for_more_than_metrics(tmp_path):
    store = RunStore(tmp_path)
    group = TrajectoryGroup(
        [thread("?", "x", metrics={"ruler_score": 0.2}) for _ in range(2)], metadata={"scenario_id": "s"}
    )
    store.write_groups("train", 3, [group])
    index = load_all(tmp_path)
    assert index.table["ruler"].tolist() == pytest.approx([0.2, 0.2])
    said = {"group": "s", "step": 3, "trajectory": 1, "rubric": "r"}
    Journal(tmp_path).append(
        [
            Judgment(**said, score=0.5, judge="j", by="judge"),
            Judgment(**said, score=0.9, judge="me", by="human", reason="better"),
        ]
    )
    assert index.refresh()
    assert index.table["ruler"].tolist() == pytest.approx([0.2, 0.5])  # a person's score is separate
    assert select(index, "overridden").tolist() == [1]
    told = replies.traj_reply(index, 1)[0]["breakdown"]
    assert (told["override"], told["ruler"], told["reason"]) == (0.9, 0.5, "better")
    assert told["trained"].startswith("This group was trained at step 3,")
    said["step"] = 4  # a step that comes with its judgments leaves the older ones marked
    store.write_groups("train", 4, [group])
    Journal(tmp_path).append([Judgment(**said, score=0.1, judge="j"), Judgment(**said | {"step": 3}, score=0.7)])
    index.waiting.append(("train", 4, lambda: table_of_file(store, "train", 4)))
    index.load(60)
    assert index.refresh()
    assert index.table["ruler"].tolist() == pytest.approx([0.2, 0.7, 0.2, 0.1])


def test_groups_that_nothing_names_are_judged_one_by_one(tmp_path):
    store = RunStore(tmp_path)
    for split in ("train", "val"):
        store.write_groups(split, 1, [TrajectoryGroup([thread("?", "x")]) for _ in range(2)])
    index = load_all(tmp_path)
    write_override(index, 1, 0.75, "mine")
    assert np.isnan(index.table["ruler"]).all()  # no judge gave a score
    assert select(index, "overridden").tolist() == [1] and not len(select(index, "judged"))
    told = [replies.traj_reply(index, row)[0]["breakdown"] for row in range(4)]
    assert [each["override"] for each in told] == [None, 0.75, None, None]
    write_override(index, 2, 0.3, "")  # of the validation rollouts, which are not trained
    told = replies.traj_reply(index, 2)[0]["breakdown"]
    assert (told["override"], told["ruler"], told["trained"]) == (0.3, None, "")


def test_an_evaluation_has_no_advantages_and_no_flat_groups(tmp_path):
    store, groups = RunStore(tmp_path), random_groups(0)
    groups[0].trajectories[:] = [thread("a", reward=1.0, metrics={"advantage": 2.0}), thread("b", reward=1.0)]
    for split in ("train", "val", "test"):
        store.write_groups(split, 1, groups)
    index, flat = load_all(store), FLAGS["zero_variance"]
    tables = {part.split: part.table for part in index.parts}
    assert np.isfinite(tables["train"]["advantage"]).any() and (tables["train"]["flags"] & flat).any()
    for split in ("val", "test"):
        assert np.isnan(tables[split]["advantage"]).all() and not (tables[split]["flags"] & flat).any()
        for name in ("reward", "turns", "tools", "tokens", "status"):
            np.testing.assert_array_equal(tables[split][name], tables["train"][name])
        in_memory = table_of_groups(split, 1, groups)
        np.testing.assert_array_equal(in_memory.table["advantage"], tables[split]["advantage"])
        np.testing.assert_array_equal(in_memory.table["flags"], tables[split]["flags"])
    assert [index.locate_group(int(tables[split]["group"][0])).label for split in tables] == [
        index.locate_group(0).name or f"{kind} 0" for kind in ("group", "evaluation", "evaluation")
    ]


def test_an_empty_first_group_takes_nothing_from_the_next(tmp_path):
    groups = [TrajectoryGroup([]), TrajectoryGroup([thread("?", "x", reward=1)], metadata={"scenario_id": "s"})]
    store = RunStore(tmp_path)
    store.write_groups("train", 1, groups)
    Journal(tmp_path).append([Judgment("s", 0, 0.5, 1)])
    for rows in (load_all(groups), load_all(tmp_path)):
        assert select(rows, "scenario=s").tolist() == [0]
        assert find_row(rows, "train", rows.parts[0].step, 1, 0) == 0
    assert rows.table["ruler"].tolist() == [0.5]


def test_a_damaged_step_hides_no_other(tmp_path):
    store = RunStore(tmp_path)
    for step in (1, 2, 3):
        store.write_groups("train", step, [TrajectoryGroup([thread("?", f"x {step}")])])
    (tmp_path / "trajectories" / "train" / "0003.parquet").write_bytes(b"PAR1 torn")
    index = open_rollouts(tmp_path)
    assert search(index, "x").tolist() == [0, 1]
    told, _ = replies.index_reply(index)
    assert (told["total"], len(told["lost"]), told["lost"][0][:16]) == (2, 1, "step 3 of train:")
    assert index.refresh() is False


def test_a_filter_sees_one_index_while_others_load(tmp_path):
    store = RunStore(tmp_path)
    for step in range(1, 60):
        store.write_groups("train", step, [TrajectoryGroup([thread("?", "x", metrics={"win": 1})])])
    index = open_rollouts(tmp_path)
    index.load(0)
    loading = threading.Thread(target=lambda: all(not index.load(0) for _ in range(60)))
    loading.start()
    while loading.is_alive():
        found = select(index, "win and split=train", sort="-win")
        assert len({*found.tolist()}) == len(found) > 0
    loading.join()


def test_what_is_read_once_is_kept_for_the_frozen_form():
    viewer = view(TrajectoryGroup([thread("?", f"x {i}")]) for i in range(2))
    assert "2 rollouts" in viewer.html()
    viewer.close()


def test_what_all_share_is_what_a_reader_sees_of_it():
    trained, given = thread("?", "Hi\U0001f642 a"), thread("?", "Hi\U0001f642 b")
    given.messages_and_choices[1] = {"role": "assistant", "content": "Hi\U0001f642 a"}
    threads = [conversation_of(trained), conversation_of(given)]
    assert (shared_count(threads), shared_count(threads[:1])) == (2, 0)
    assert shared_units([conversation_of(one)[1:] for one in (trained, thread("?", "Hi\U0001f642 b"))]) == 5


def test_rewards_are_sums_of_their_parts_or_it_is_said():
    index = load_all(
        [
            thread("?", "x", reward=1.5, metrics={"reward/right": 1, "reward/short": 0.5, "tokens": 3}),
            thread("?", "x", reward=2, metrics={"reward/right": 1}),
            thread("?", "x", reward=2),
        ]
    )
    told = [replies.traj_reply(index, row)[0]["breakdown"] for row in range(3)]
    assert [one["sums"] for one in told] == [True, False, None]
    assert told[0]["parts"] == [["reward/right", 1.0], ["reward/short", 0.5]]
    assert "names begin with reward/" in told[2]["why"]


@settings(max_examples=300)
@given(st.text(alphabet="rewadtolsn <>=!~&|()'\"0.19-+_:/", max_size=40))
def test_any_filter_line_is_answered_or_refused(line):
    columns = {"reward": np.array([0.1, np.nan]), "tools": np.array([3, 0]), "scenario": np.array(["a", "b"], object)}
    with suppress(ValueError):
        found = rows_where(line, columns.__getitem__, 2)
        assert found.dtype == bool
        assert len(found) == 2


def test_presets_list_the_rollouts_of_training_before_evaluations(tmp_path):
    store = RunStore(tmp_path)
    for split, rewards in (("val", [-1.0, 3.0]), ("train", [0.0, 2.0])):
        store.write_groups(split, 1, [TrajectoryGroup([thread("?", "a", reward=reward) for reward in rewards])])
    index = load_all(tmp_path)
    rewards = {name: index.table["reward"][select(index, preset=name)].tolist() for name in ("best", "worst")}
    assert rewards == {"best": [2.0, 0.0, 3.0, -1.0], "worst": [0.0, 2.0, -1.0, 3.0]}


def test_the_whole_filter_language(tmp_path):
    groups = [
        TrajectoryGroup(
            [thread("?", "a", reward=i, metrics={"win": i > 1, "len/chars": 7.5}) for i in range(3)],
            metadata={"scenario_id": "red one"},
        ),
        TrajectoryGroup([thread("?", "b"), KeyError("k")]),
    ]
    store = RunStore(tmp_path)
    store.write_groups("train", 4, groups)
    index = load_all(tmp_path)
    cases = {
        "reward<2 and not win": [0, 1, 3],
        "failed": [4],
        "exception and not failed": [3],
        "len/chars=7.5": [0, 1, 2],
        "scenario~red & reward>=1": [1, 2],
        "judged": [],
        "split=train and step=4 and (index=0 or id=2)": [0, 2, 3],
        "metrics.win=true": [2],
        "zero_variance": [3, 4],
        "advantage>1": [2],
        "tokens=0 and turns=1": [0, 1, 2, 3],
    }
    assert {line: select(index, line).tolist() for line in cases} == cases
    assert all(select(index, f"{name}!=1") is not None for name in FIELDS)
    assert select(index, preset="varied").tolist() == [0, 1, 2, 3, 4]
    assert select(index, sort="-reward", preset="worst").tolist() == [2, 1, 0, 3, 4]
    with pytest.raises(ValueError, match="no preset"):
        select(index, preset="nicest")
    with pytest.raises(ValueError, match="no field"):
        select(index, sort="colour")


def test_a_newer_search_ends_an_older_one(tmp_path):
    store = RunStore(tmp_path)
    for step in range(1, 30):
        store.write_groups("train", step, [TrajectoryGroup([thread("?", f"needle {step}")])])
    rows, found = open_rollouts(tmp_path), {}
    slow = threading.Thread(target=lambda: found.update(old=search(rows, "needle", 1)))
    rows.newest_search = 2
    slow.start()
    found["new"] = search(rows, "needle 7", 3)
    slow.join()
    assert found["old"] is None
    assert len(found["new"]) == 1
    told, (ids,) = replies.search_reply(rows, "NEEDLE", limit=10, number=4)
    pages = [np.frombuffer(ids, "<u4")]
    while told["more"]:
        told, (ids,) = replies.search_reply(rows, "NEEDLE", after_id=int(pages[-1][-1]), limit=10, number=4)
        pages.append(np.frombuffer(ids, "<u4"))
    assert np.concatenate(pages).tolist() == [*range(29)]
    assert told["total"] == 29


def sendable(reply):
    """What Jupyter does to a message."""
    told, buffers = reply
    assert all(isinstance(buffer, bytes) for buffer in buffers)
    return json.loads(json.dumps(told, ensure_ascii=False, allow_nan=False).encode("utf-8").decode())


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_every_reply_can_be_sent(text):
    call = {"id": text, "type": "function", "function": {"name": text, "arguments": text}}
    one = Trajectory(
        messages_and_choices=[
            {"role": "system", "content": text},
            {"role": text, "content": [{"type": "text", "text": text}]},
            say(text, ids=0, tool_calls=[call]),
            {"role": "tool", "content": text, "tool_call_id": text},
        ],
        reward=1,
        metrics={text.encode("utf-8", "replace").decode(): 1},
        metadata={text: [text]},
        logs=[text],
        tools=[{"type": "function", "function": {"name": text}}],
    )
    group = TrajectoryGroup(
        [one, one.model_copy(update={"reward": 0.0}), ValueError(text)], metadata={"scenario_id": text}
    )
    index = load_all(group)
    for reply in (
        replies.index_reply(index),
        replies.page_reply(index, [0, 1, 2]),
        replies.traj_reply(index, 0),
        replies.traj_reply(index, 2),
        replies.compare_reply(index, [0, 1]),
        replies.step_diff_reply(index, 0),
        replies.board_reply(index, 0),
        tokens_reply(index, 0, 0),
        replies.select_reply(index),
        replies.search_reply(index, text),
    ):
        sendable(reply)


def test_a_line_of_five_megabytes_comes_in_parts():
    index = load_all(thread("?", "\x00" + "x" * 5_000_000))
    first = sendable(replies.traj_reply(index, 0))
    parts = [first, *(sendable(replies.traj_reply(index, 0, part)) for part in range(1, first["parts"]))]
    assert all(len(json.dumps(part["messages"])) <= MAX_PART_BYTES for part in parts)
    text = "".join(m["content"] for part in parts for m in part["messages"] if m["i"] == 1)
    assert text == "\x00" + "x" * 5_000_000
    with pytest.raises(ValueError, match="no part"):
        replies.traj_reply(index, 0, first["parts"])


@settings(max_examples=60)
@given(st.lists(st.text(max_size=60_000), max_size=4))
def test_parts_put_together_are_the_thread(texts):
    messages = conversation_of(Trajectory(messages_and_choices=[{"role": "user", "content": text} for text in texts]))
    joined = {}
    for part in paginate(messages):
        for message in part:
            joined[message["i"]] = joined.get(message["i"], "") + message["content"]
    assert [joined[m["i"]] for m in messages] == [m["content"] for m in messages]


def test_thinking_and_calls_are_laid_apart():
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    one = Trajectory(
        messages_and_choices=[
            say("<think>first</think>\nthen", tool_calls=[call]),
            {"role": "tool", "content": "seen", "tool_call_id": "c"},
            say("done", reasoning="quietly"),
        ],
        additional_histories=[History(messages_and_choices=[say("apart")])],
    )
    messages = conversation_of(one)
    assert [m.get("thinking") for m in messages] == ["first", None, "quietly", None]
    assert [m["turn"] for m in messages] == [0, None, 1, 2]
    assert [m["history"] for m in messages] == [0, 0, 0, 1]
    assert messages[0]["tool_calls"] == [{"id": "c", "name": "look", "arguments": "{}"}]


def test_comparing_marks_the_first_difference():
    ends = ["q2", "🙂 one"], ["q2", "🙂 two"], []
    index = load_all(TrajectoryGroup(thread("q", "same", *end) for end in ends))
    told = sendable(replies.compare_reply(index, [0, 1]))
    assert told["prefix"] == 3
    assert [item["shared_chars"] for item in told["items"]] == [3, 3]  # the smile is two units
    assert [len(item["messages"]) for item in told["items"]] == [1, 1]
    told = sendable(replies.compare_reply(index, [0, 2]))
    assert (told["prefix"], told["items"][0]["shared_chars"], told["identical"]) == (2, 0, False)
    assert sendable(replies.compare_reply(index, [1, 1]))["identical"]
    with pytest.raises(ValueError, match="two to four"):
        replies.compare_reply(index, [0])


@pytest.mark.parametrize("named", [True, False])
def test_the_same_scenario_at_other_steps(tmp_path, named):
    store = RunStore(tmp_path)
    for step in (1, 2, 5):
        groups = [
            TrajectoryGroup(
                [thread(f"solve {s}", f"try {step}", reward=i * step) for i in range(2)],
                metadata={"scenario_id": s} if named else {},
            )
            for s in ("a", "b")
        ]
        store.write_groups("train", step, groups)
    index = load_all(tmp_path)
    told = sendable(replies.step_diff_reply(index, 1))
    assert [place["step"] for place in told["places"]] == [1, 2, 5]
    assert [place["mean"] for place in told["places"]] == [0.5, 1, 2.5]
    assert told["by"] == ("scenario_id" if named else "first messages")
    best = told["places"][-1]["best"]
    assert index.locate(best).trajectory.messages_and_choices[0]["content"] == "solve b"


def test_tokens_of_texts_in_any_script():
    text = "é🙂日本\x00"
    index = load_all([thread("?", "x"), Trajectory(messages_and_choices=[say(text, ids=2)])])
    told, (offsets, *halves) = tokens_reply(index, 1, 0)
    ends = np.frombuffer(offsets, "<u4").tolist()
    units = told["text"].encode("utf-16-le")
    assert [units[2 * a : 2 * b].decode("utf-16-le") for a, b in zip(ends, ends[1:], strict=False)] == [*text]
    assert "logprob" in told["channels"]
    assert "ratio" in told["why"]
    assert {*told["why"], *told["channels"]} == set(CHANNELS)
    assert len(halves[0]) == 2 * told["n"]
    told, (offsets,) = tokens_reply(index, 0, 0)
    assert told["n"] == 0
    assert told["text"] == "x"
    assert set(told["why"]) == set(CHANNELS)


def test_what_is_asked_wrongly_is_refused():
    index = load_all(thread("?", "x"))
    asked = [
        lambda: replies.traj_reply(index, 9),
        lambda: replies.traj_reply(index, -1),
        lambda: tokens_reply(index, 0, 5),
        lambda: replies.page_reply(index, [0] * 201),
        lambda: replies.step_diff_reply(index, 7),
    ]
    for ask in asked:
        with pytest.raises(ValueError, match="there is no|at most 200"):
            ask()
    with pytest.raises(TypeError, match="no rollouts"):
        open_rollouts(3)
    with pytest.raises(TypeError, match="neither"):
        open_rollouts([thread("?", "x"), 3])


def test_an_empty_group_is_nothing_to_see():
    index = open_rollouts(TrajectoryGroup([]))
    told, buffers = replies.index_reply(index)
    assert told["total"] == 0
    assert told["done"]
    assert told["groups"]["sizes"] == [0]
    assert FLAGS["zero_variance"] == 1
    assert not any(buffers)


def test_the_index_needs_no_torch():
    import subprocess
    import sys

    modules = "art_nb.views.replies, art_nb.views.token_values, art_nb.reports.static_html, art_nb.reports.report"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


FORCED = {"index": 0, "finish_reason": "tool_calls", "logprobs": None}
RICE = {"id": "a", "type": "function", "function": {"name": "lookup_price", "arguments": '{"item": "rice"}'}}


def test_a_forced_call_is_decoded_without_its_beginning():
    """The beginning of a forced call is part of the prompt, and so is the name of the tool."""
    tokenizer = tokenizer_of("smollm2-135m")
    ids = tokenizer.encode(' {"item": "rice"}}\n</tool_call><|im_end|>')
    message = {"role": "assistant", "content": None, "tool_calls": [RICE]}
    whole = Choice.model_validate(FORCED | {"message": message, "token_ids": ids})
    assert "".join(token_texts(whole, "smollm2-135m")) == ' {"item": "rice"}}\n</tool_call><|im_end|>'
    escaped = json.dumps({"text": "line1\nline2 é"})  # the style of Qwen3-Coder has the texts without escapes
    call = RICE | {"function": {"name": "write", "arguments": escaped}}
    ids = tokenizer.encode("<parameter=text>\nline1\nline2 é\n</parameter>")
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    written = Choice.model_validate(FORCED | {"message": message, "token_ids": ids})
    assert "line1\nline2 é" in "".join(token_texts(written, "smollm2-135m"))
    cut = {"role": "assistant", "content": '<tool_call>\n{"name": "lookup_price", "arguments": {"item": "ri'}
    choice = Choice.model_validate(FORCED | {"message": cut, "token_ids": tokenizer.encode(' {"item": "ri')})
    assert token_texts(choice, "smollm2-135m")


def test_threads_that_load_a_tokenizer_at_the_same_time_get_it():
    """In a fresh process, several turns request their tokens at once. A parallel import would fail in one."""
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from art_nb.views.conversation import tokenizer_of\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    print(*[value is not None for value in pool.map(tokenizer_of, ['smollm2-135m'] * 8)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 8, done.stderr


def test_rollouts_of_a_large_group_have_their_own_numbers():
    """An evaluation is one group, for example of 500 rollouts."""
    trajectories = [Trajectory(messages_and_choices=[], reward=0.0) for _ in range(500)]
    index = open_rollouts(TrajectoryGroup(trajectories))
    index.load()
    assert index.table["idx_in_group"].tolist() == list(range(500))


async def test_an_evaluation_is_not_a_scenario(tmp_path):
    """Its group contains the rollouts of all scenarios."""

    async def rollout(model, question):
        return Trajectory(messages_and_choices=[{"role": "user", "content": question}], reward=1.0)

    stores = []
    for name in ("slow", "fast"):
        model = Model(name=name, project="tests", base_path=str(tmp_path))
        await evaluate(model, rollout, ["a", "b"], step=0, show_progress=False)
        for split in ("train", "val"):  # groups of `PipelineTrainer` have their own names
            group = TrajectoryGroup([Trajectory(reward=0.0)], metadata={"scenario_id": "evaluation of a"})
            model.store.write_groups(split, 1, [group])
        stores.append(model.store)
    comparison = RunComparison(stores)
    assert comparison.read(10.0)
    found = [(row["split"], row["scenario"]) for row in shared_scenarios(comparison.index)]
    assert found == [("train", "evaluation of a"), ("val", "evaluation of a")]
