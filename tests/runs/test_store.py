"""Races, kills, full disks, and the files of ART's older versions."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openai.types.chat.chat_completion import Choice
from support.conversations import make_choice, make_groups

from art_nb.core.events import Bus, StepDone, Warned
from art_nb.core.files import append_lines, atomic_write, read_lines
from art_nb.core.types import StoreError
from art_nb.rollouts.trajectories import Trajectory, TrajectoryGroup
from art_nb.runs.formats import group_tokens, pack_tokens, parquet_bytes, unpack_tokens
from art_nb.runs.store import RunStore, find_runs, is_complete_safetensors, open_run
from art_nb.views.step_table import table_of_file


def dump(groups):
    return [group.model_dump(mode="json") | {"times": [t.start_time for t in group]} for group in groups]


@pytest.mark.parametrize("seed", range(40))
def test_what_is_written_is_read(tmp_path, seed):
    groups = make_groups(random.Random(seed))
    store = RunStore(tmp_path)
    store.write_groups("train", 12, groups)
    assert dump(store.read_groups("train", 12)) == dump(groups)
    text = (tmp_path / "trajectories/train/0012.parquet").read_bytes()
    assert "token_ids" not in "".join(filter(None, pq.read_table(io.BytesIO(text))["trajectory_json"].to_pylist()))


def test_a_long_conversation_is_stored_once():
    entries, before = [], []
    for turn in range(50):
        prompt = before + list(range(turn * 100, turn * 100 + 20))
        message = {"role": "assistant", "content": "x"}
        data = {"finish_reason": "stop", "index": 0, "message": message, "logprobs": None}
        entries.append(Choice.model_validate(data | {"prompt_token_ids": prompt, "token_ids": [7, 8]}))
        before = [*prompt, 7, 8]
    packed = pack_tokens([TrajectoryGroup([Trajectory(messages_and_choices=entries)])])
    assert len(packed["prompt_ids"]) == 50 * 20


def test_odd_values_do_not_lose_the_step(tmp_path):
    odd = Trajectory(
        messages_and_choices=[{"role": "user", "content": "\ud800 broken"}],
        reward=float("nan"),
        metadata={"when": datetime.now(UTC), "array": np.arange(3), "object": object(), "set": {1}},
    )
    odd.metrics["np"], odd.metrics["nan"], odd.metrics["text"] = np.float32(0.5), float("nan"), "three"
    odd.logs.append("\udfff")
    store = RunStore(tmp_path)
    store.write_groups("val", 0, [TrajectoryGroup([odd, Trajectory(reward=True)])])
    back = store.read_groups("val", 0)[0].trajectories
    assert np.isnan(back[0].reward)
    assert back[0].metrics["np"] == 0.5
    assert "text" not in back[0].metrics
    assert back[0].metadata["array"] == [0, 1, 2]
    assert back[1].reward == 1.0


def test_empty_steps_and_rewrites(tmp_path):
    store = RunStore(tmp_path)
    groups = make_groups(random.Random(3))
    store.write_groups("train", 1, groups)
    store.write_groups("train", 1, [])
    assert store.read_groups("train", 1) == []
    assert not list(tmp_path.rglob("*.npz"))
    assert not list(tmp_path.rglob("*.tmp"))
    assert store.steps("train") == [1]


def test_a_step_that_is_written_again_fits_what_a_reader_had_opened(tmp_path):
    heard, bus = [], Bus()
    bus.subscribe(heard.append, Warned)
    store = RunStore(tmp_path, bus)
    groups = make_groups(random.Random(3))
    path = store.write_groups("train", 1, groups)
    before = path.read_bytes()
    store.write_groups("train", 1, groups)
    path.write_bytes(before)  # of a reader who came between the two files, or after a kill
    back = store.read_groups("train", 1)
    assert len(pack_tokens(back)["sizes"])
    assert not heard


def test_rows_that_are_appended_together_stay_together(tmp_path):
    path = tmp_path / "judgements.jsonl"
    write = lambda who: [append_lines(path, *({"who": who, "batch": n} for _ in range(4))) for n in range(40)]
    threads = [threading.Thread(target=write, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = read_lines(path)
    assert len(rows) == 3 * 40 * 4
    assert all(rows[i : i + 4] == [rows[i]] * 4 for i in range(0, len(rows), 4))


def test_every_torn_end_is_repaired(tmp_path):
    path = tmp_path / "history.jsonl"
    whole = [json.dumps({"step": i, "text": "ü" * i}).encode() + b"\n" for i in range(3)]
    for cut in range(len(whole[2]) + 1):
        path.write_bytes(b"".join(whole[:2]) + whole[2][:cut])
        kept = read_lines(path)
        assert [row["step"] for row in kept] in ([0, 1], [0, 1, 2])
        append_lines(path, {"step": 9})
        assert read_lines(path) == [*kept, {"step": 9}]
        assert path.read_bytes().count(b"\n") == len(kept) + 1


def test_a_long_torn_line_is_found_from_the_end(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": "' + b"x" * 200_000)
    append_lines(path, {"c": 1})
    assert read_lines(path) == [{"a": 1}, {"c": 1}]


def test_a_bad_line_in_the_middle_is_said_once(tmp_path):
    heard, bus = [], Bus()
    bus.subscribe(heard.append, Warned)
    (tmp_path / "history.jsonl").write_bytes(b'{"step": 1}\n{"st{"step": 2}\nnull\n{"step": 3}\n')
    store = RunStore(tmp_path, bus)
    assert [row["step"] for row in store.history()] == [row["step"] for row in store.history()] == [1, 3]
    assert len(heard) == 1


def test_threads_append_whole_lines(tmp_path):
    def work(worker):
        for i in range(100):
            RunStore(tmp_path).append_event(StepDone(step=i, metrics={"worker": worker, "pad": "x" * (i * 7)}))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = sorted((event.metrics["worker"], event.step) for event in RunStore(tmp_path).events())
    assert found == [(worker, i) for worker in range(4) for i in range(100)]


WRITER = """
import random, sys, itertools
sys.path.insert(0, {tests!r})
from support.conversations import make_groups
from art_nb.runs.store import RunStore
from art_nb.core.events import StepDone
store, groups = RunStore({path!r}), make_groups(random.Random(5))
print("ready", flush=True)
for i in itertools.count():
    store.write_groups("train", 1, groups)
    store.write_state({{"i": i, "pad": "x" * 5000}})
    store.append_history({{"step": i}})
    store.append_event(StepDone(step=i, metrics={{"pad": "y" * 3000}}))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("delay_s", [0.03, 0.1, 0.2])
def test_kill_at_any_moment(tmp_path, delay_s):
    code = WRITER.format(tests=str(Path(__file__).parents[1]), path=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
    store = RunStore(tmp_path, Bus())
    steps = [row["step"] for row in store.history()]
    assert steps == list(range(len(steps)))
    assert store.read_state() is None or store.read_state()["i"] in (len(steps), len(steps) - 1)
    if store.steps("train"):
        sizes = [len(group) for group in make_groups(random.Random(5))]
        assert [len(group) for group in store.read_groups("train", 1)] == sizes
    store.append_history({"step": len(steps)})
    assert [row["step"] for row in store.history()] == list(range(len(steps) + 1))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_on_append(tmp_path):
    os.symlink("/dev/full", tmp_path / "history.jsonl")
    with pytest.raises(StoreError, match=r"Could not write .*history.jsonl: no space left: \d+ bytes are needed"):
        RunStore(tmp_path).append_history({"step": 1})


def test_a_file_in_the_directory_s_place_is_named(tmp_path):
    (tmp_path / "run").write_text("no directory")
    with pytest.raises(StoreError, match=r"state\.json"):
        atomic_write(tmp_path / "run" / "state.json", b"new")
    assert (tmp_path / "run").read_text() == "no directory"


LIMITED = """
import resource
from art_nb.core.files import atomic_write
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
atomic_write({path!r}, b"x" * 9000)
"""


def test_a_write_the_system_refuses_leaves_the_old_file(tmp_path):
    path = tmp_path / "state.json"
    atomic_write(path, b"old")
    code = LIMITED.format(path=str(path))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "WriteError" in run.stderr
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"old"]


def test_files_that_cannot_be_read_name_themselves(tmp_path):
    store = RunStore(tmp_path)
    for name, read in [("model.json", store.read_model), ("state.json", store.read_state)]:
        (tmp_path / name).write_text("{ torn")
        with pytest.raises(StoreError, match=name):
            read()
    store.write_groups("train", 3, [])
    (tmp_path / "trajectories/train/0003.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(StoreError, match=r"0003\.parquet"):
        store.read_groups("train", 3)


def test_a_broken_sidecar_costs_only_the_tokens(tmp_path):
    heard, bus = [], Bus()
    bus.subscribe(heard.append, Warned)
    groups = make_groups(random.Random(5))
    store = RunStore(tmp_path, bus)
    sidecar = store.write_groups("train", 1, groups).with_suffix(".tokens.npz")
    for content in (sidecar.read_bytes()[:-200], b"", b"\x80\x04N."):
        sidecar.write_bytes(content)
        back = store.read_groups("train", 1)
        assert [t.messages() for g in back for t in g] == [t.messages() for g in groups for t in g]
    assert len(heard) == 1
    sidecar.unlink()
    store.read_groups("train", 1)


def write_safetensors(path, size=16):
    tensor = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    header = json.dumps({"__metadata__": {"a": "b"}, "x": tensor}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * size)
    (path.parent / "adapter_config.json").write_text("{}")


def test_only_whole_checkpoints_count(tmp_path):
    store = RunStore(tmp_path)
    for step in (0, 1, 2, 12345):
        write_safetensors(store.checkpoint_dir(step) / "adapter_model.safetensors", size=3 if step == 2 else 16)
    (tmp_path / "checkpoints" / "0007").mkdir()
    (tmp_path / "checkpoints" / "tmp").mkdir()
    assert store.steps_saved() == [0, 1, 12345]
    whole = store.checkpoint_dir(1) / "adapter_model.safetensors"
    content = whole.read_bytes()
    for cut in range(len(content)):
        whole.write_bytes(content[:cut])
        assert not is_complete_safetensors(whole)


def test_arts_older_layout(tmp_path):
    write_safetensors(tmp_path / "0004" / "adapter_model.safetensors")
    (tmp_path / "history.jsonl").write_text('{"val/reward": 0.5, "step": 4, "recorded_at": "2025-06-14T00:00:00"}\n')
    choice, _ = make_choice(random.Random(1))
    flawed = {"finish_reason": "odd", "index": 0, "message": {"role": "assistant", "content": "B2"}}
    line = {
        "trajectories": [
            {
                "messages_and_choices": [{"role": "user", "content": "go"}, choice.to_dict(), flawed],
                "reward": 1,
                "metrics": {"n": None},
                "metadata": {},
                "tools": None,
                "logs": [],
            },
            {"messages": [{"role": "user", "content": "go"}], "reward": 0},
        ]
    }
    (tmp_path / "trajectories/val").mkdir(parents=True)
    (tmp_path / "trajectories/val/0004.jsonl").write_text(json.dumps(line) + "\n" + json.dumps({"trajectories": []}))
    store = open_run(tmp_path)
    assert (store.steps_saved(), store.splits(), store.steps("val")) == ([4], ["val"], [4])
    assert store.checkpoint_dir(4) == tmp_path / "0004"
    first, second = store.read_groups("val", 4)[0].trajectories
    assert first.messages_and_choices[1].model_extra["token_ids"] == choice.model_extra["token_ids"]
    assert first.messages()[2] == {"role": "assistant", "content": "B2"}
    assert second.reward == 0


def test_arts_flat_parquet(tmp_path):
    rows = [
        {
            "group_index": g,
            "reward": 0.5,
            "metrics": '{"n": 1}',
            "metadata": None,
            "tools": None,
            "logs": ["a"],
            "group_metadata": '{"s": 1}',
            "group_metrics": None,
            "group_logs": None,
            "messages": [
                {"role": "user", "content": "go", "tool_calls": None, "tool_call_id": None, "trainable": False},
                {"role": "assistant", "content": "A1", "tool_calls": "[]", "tool_call_id": None, "trainable": True},
            ],
        }
        for g in (1, 0, 1)
    ]
    path = tmp_path / "trajectories/train/0002.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    groups = open_run(tmp_path).read_groups("train", 2)
    assert [len(group) for group in groups] == [1, 2]
    assert groups[0].metadata == {"s": 1}
    assert isinstance(groups[0].trajectories[0].messages_and_choices[1], Choice)


def test_ours_meets_what_arts_reader_checks():
    groups = make_groups(random.Random(7))
    table = pq.read_table(io.BytesIO(parquet_bytes(groups)))
    assert table.schema.metadata[b"art.trajectory_parquet.version"] == b"2"
    rows = table.to_pylist()
    assert {row["format_version"] for row in rows} == {2}
    assert sorted({row["group_index"] for row in rows}) == list(range(len(groups)))
    for g, group in enumerate(groups):
        mine = [row for row in rows if row["group_index"] == g]
        assert len({row["group_json"] for row in mine}) == 1
        assert "trajectories" not in json.loads(mine[0]["group_json"])
        assert [row["trajectory_index"] for row in mine] == (list(range(len(group))) or [None])
        assert all((row["trajectory_json"] is None) == (not len(group)) for row in mine)
    assert parquet_bytes([])


def test_opening_what_is_no_run(tmp_path):
    RunStore(tmp_path / "ttt/models/a").append_history({"step": 0})
    assert find_runs(tmp_path) == find_runs(tmp_path / "ttt") == [tmp_path / "ttt/models/a"]
    beside = tmp_path / "work"
    RunStore(beside / ".art/ttt/models/a").append_history({"step": 0})
    assert find_runs(beside) == find_runs(beside / ".art") == [beside / ".art/ttt/models/a"]
    with pytest.raises(StoreError, match="ttt/models/a"):
        open_run(tmp_path)
    for path in (tmp_path / "none", Path(__file__)):
        with pytest.raises(StoreError, match="is not a run directory"):
            open_run(path)


def test_logprobs_that_were_not_requested_are_stored(tmp_path):
    message = {"role": "assistant", "content": "hi"}
    data = {"finish_reason": "stop", "index": 0, "message": message, "logprobs": None}
    extras = [
        {"prompt_token_ids": [1], "token_ids": [7, 8], "token_logprobs": [-0.5, -2.0]},
        {"token_ids": [9]},
        {"token_ids": [9], "token_logprobs": "none"},
        {"token_ids": [3], "token_logprobs": [-1.5]},
    ]
    said = [Choice.model_validate(data | extra) for extra in extras]
    groups = [
        TrajectoryGroup([Trajectory(messages_and_choices=said[:3])]),
        TrajectoryGroup([Trajectory(messages_and_choices=said[3:])]),
    ]
    store = RunStore(tmp_path)
    store.write_groups("train", 1, groups)
    back = store.read_groups("train", 1)
    found = [entry for group in back for t in group for entry in t.messages_and_choices]
    assert [entry.model_extra.get("token_logprobs") for entry in found] == [[-0.5, -2.0], None, None, [-1.5]]
    assert [entry.logprobs for entry in found] == [None] * 4
    alone = table_of_file(store, "train", 1).group(1)
    assert alone.trajectories[0].messages_and_choices[0].token_logprobs == [-1.5]


def test_token_data_of_an_older_version_is_read():
    message = {"role": "assistant", "content": "hi"}
    data = {"finish_reason": "stop", "index": 0, "message": message, "logprobs": None, "token_ids": [7, 8]}
    said = [Choice.model_validate(data | {"token_ids": ids}) for ids in ([7, 8], None)]
    group, fresh = (TrajectoryGroup([Trajectory(messages_and_choices=[one])]) for one in said)
    packed = pack_tokens([group])
    older = {name: array for name, array in packed.items() if not name.startswith("bare_")}
    unpack_tokens([fresh], older)
    assert fresh.trajectories[0].messages_and_choices[0].token_ids == [7, 8]
    assert set(group_tokens(older, 0)) == set(older)


@pytest.mark.parametrize("name", [".ipynb_checkpoints", "@eaDir", "-x"])
def test_directories_of_other_programs_are_not_splits(tmp_path, name):
    store = RunStore(tmp_path)
    store.write_groups("val set", 3, [])
    (tmp_path / "trajectories" / name).mkdir()
    (tmp_path / "trajectories" / name / "0003.parquet").touch()
    assert store.splits() == ["val set"]
    with pytest.raises(StoreError, match=r"spaces and `\.@\+=_-`, and start with a letter, digit or `_`"):
        store.write_groups(name, 3, [])
