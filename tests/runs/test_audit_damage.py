"""Files that are damaged or written to harm: a clear error in bounded memory, and the other files are still read."""

import io
import json
import os
import random
import subprocess
import sys
import tracemalloc
import zipfile
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.audit import count
from support.conversations import make_choice

from art_nb.core.events import StepDone, from_json, to_json
from art_nb.core.files import DAMAGED, load_arrays, parse_json, read_file, read_lines
from art_nb.core.types import StoreError
from art_nb.reports.report import report
from art_nb.rewards.journal import Journal
from art_nb.rollouts.trajectories import Trajectory, TrajectoryGroup
from art_nb.runs.formats import READERS, unpack_tokens
from art_nb.runs.store import RunStore, is_complete_checkpoint, is_complete_safetensors
from art_nb.training.run import Run
from art_nb.views.index import load_all

DEEP = b"[" * 100_000


def write_run(path, steps=3):
    """A run of a few steps, with a journal, a history and events."""
    store = RunStore(path)
    store.write_model({"name": "ttt", "base_model": "tiny"})
    for step in range(1, steps + 1):
        talk = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "on"}]
        group = [Trajectory(messages_and_choices=talk, reward=reward) for reward in (0.0, 1.0)]
        store.write_groups("train", step, [TrajectoryGroup(group)])
        store.append_history({"step": step, "train/reward": 0.5})
        store.append_event(StepDone(step=step, metrics={"train/reward": 0.5}))
    return store


@pytest.mark.parametrize(
    "text", [DEEP, b'{"a":' * 100_000, b"[" * 201 + b"]" * 201, b'{"a":' * 201 + b"1" + b"}" * 201]
)
def test_deep_json_is_a_value_error(text):
    with pytest.raises(ValueError, match="nested more than"):
        parse_json(text)


def test_ordinary_json_is_read():
    assert parse_json("[" * 200 + "]" * 200) and parse_json("[" * 200 + "1" + "]" * 200)
    assert parse_json(json.dumps([[{"a": "[[["}]] * 1000)) == [[{"a": "[[["}]] * 1000


LAUGHS = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))]).encode()


def test_yaml_cannot_end_the_process(tmp_path):
    """libyaml overflowed the stack: the kernel died of a file of 100 KB (another case of reliability 5)."""
    for i, text in enumerate((DEEP, b"- " * 100_000 + b"a", b"a: &a [*a]", DEEP + b"]" * 100_000, LAUGHS)):
        (tmp_path / f"{i}.yaml").write_bytes(text)
    code = (
        "import sys; from art_nb.runs.formats import read_yaml\nfor path in sys.argv[1:]:\n"
        " try: read_yaml(open(path, 'rb'))\n except ValueError: print('refused')"
    )
    paths = sorted(map(str, tmp_path.iterdir()))
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, timeout=120)
    assert done.stdout == b"refused\n" * 5, done.stderr[-500:]


@pytest.mark.parametrize("length", [3 << 30, (1 << 63) - 1, 200_000_000])
def test_a_header_that_lies_is_not_read(tmp_path, length):
    path = tmp_path / "adapter_model.safetensors"
    with open(path, "wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(4 << 30)
    tracemalloc.start()
    assert not is_complete_safetensors(path)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("header", [DEEP, b"[]", b'{"x": 3}', b'{"x": {"data_offsets": ["a", "b"]}}', b'{"x": null}'])
def test_a_header_of_another_shape_is_not_whole(tmp_path, header):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert not is_complete_checkpoint(tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_a_small_parquet_of_many_long_texts_is_refused(tmp_path, nested):
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array(["x" * 5_000_000]))
    column = pa.ListArray.from_arrays(pa.array(range(1001), pa.int32()), texts) if nested else texts
    path = RunStore(tmp_path)._file("train", 1, ".parquet")
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"group_index": pa.array([0] * 1000), "group_json": column}), path, compression="zstd")
    assert path.stat().st_size < 10_000
    with pytest.raises(StoreError, match="texts have more than"):
        RunStore(tmp_path).read_groups("train", 1)


def test_arrays_that_unpack_to_too_much_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("ids.npy", bytes(1_000_000))
    content, size = path.read_bytes(), (1_000_000).to_bytes(4, "little")
    path.write_bytes(content.replace(size, (3 << 30).to_bytes(4, "little")))  # as a file of 3 GB states it
    with pytest.raises(ValueError, match="but the limit is"):
        load_arrays(path, {})


def test_pipes_folders_and_giant_files_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(20 << 30)
    for name in ("pipe", "folder", "sparse"):
        with pytest.raises(DAMAGED):
            read_file(tmp_path / name)
        with pytest.raises(StoreError, match=name):
            read_lines(tmp_path / name)


def test_one_flipped_byte_in_the_tokens_hides_nothing(tmp_path):
    """zip version 19.8: NotImplementedError, and the whole run could not be viewed or reported."""
    store = write_run(tmp_path / "run")
    rng = random.Random(0)
    said = [make_choice(rng)[0] for _ in range(4)]
    group = [Trajectory(messages_and_choices=[one], reward=1) for one in said]
    store.write_groups("train", 2, [TrajectoryGroup(group)])
    tokens = store.path / "trajectories" / "train" / "0002.tokens.npz"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:4] + b"\xc6" + whole[5:])
    for place in (4, whole.index(b"PK\x01\x02") + 6):
        tokens.write_bytes(whole[:place] + b"\xc6" + whole[place + 1 :])
        index = load_all(store.path)
        assert sorted(index.steps()) == [("train", 1), ("train", 2), ("train", 3)]
        assert not index.lost
        assert len(store.read_groups("train", 2)[0]) == 4
        report(store.path, tmp_path / "report.html")


NAMES = (
    "run.json",
    "model.json",
    "history.jsonl",
    "events.jsonl",
    "judgements.jsonl",
    "state.json",
    "trajectories/train/0002.parquet",
    "trajectories/train/0002.learner.npz",
)
CONTENTS = (
    b"",
    DEEP,
    b"[]",
    b'"x"',
    b"\xff\xfe",
    b"{}",
    b'{"status": 3, "beat": "x"}',
    b'{"status": "running", "pid": 1e99, "host": 0, "beat": 1}',
    "folder",
    "pipe",
)
PAIRS = [(name, content) for content in CONTENTS for name in NAMES]


@pytest.mark.parametrize(("name", "content"), PAIRS[:: count(1, 7)], ids=lambda part: str(part)[:20])
def test_any_file_may_be_anything(tmp_path, name, content):
    store = write_run(tmp_path / "run")
    path = store.path / name
    path.unlink(missing_ok=True)
    if content == "folder":
        path.mkdir()
    elif content == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    for what in (
        lambda: load_all(store.path),
        lambda: report(store.path, tmp_path / "report.html"),
        store.history,
        lambda: Run.attach(store.path).refresh(),
        lambda: Journal(store.path).read(),
        lambda: list(store.events()),
        store.read_state,
        lambda: store.read_groups("train", 2),
    ):
        with suppress(StoreError):
            what()
    index = load_all(store.path)
    assert {("train", 1), ("train", 3)} <= {*index.steps()}


def test_records_of_wrong_types_are_skipped(tmp_path):
    store = write_run(tmp_path / "run")
    good = to_json(StepDone(step=1, metrics={"a": 1.0}))
    assert from_json(good) is not None
    for wrong in (
        {"step": "1"},
        {"step": None},
        {"metrics": []},
        {"metrics": {"a": []}},
        {"event": []},
        {"run": 3},
        {"time": 10**400},
    ):
        assert from_json(good | wrong) is None
    with open(store.path / "history.jsonl", "a") as file:
        file.write('{"step": "x", "train/reward": {}}\n')
        file.write('{"step": 4, "train/reward": "high", "loss": 1' + "0" * 3999 + "}\n")
    assert store.history()[-2:] == [{}, {"step": 4}]
    with open(store.path / "judgements.jsonl", "w") as file:
        for group, score, by in (([], 1, "judge"), ("a", "1", "judge"), ("a", 1, "x"), ("a", 1, "human")):
            file.write(json.dumps({"group": group, "trajectory": 0, "score": score, "by": by}) + "\n")
    assert len(Journal(store.path).read()) == 1


def test_names_that_are_no_steps(tmp_path):
    store = write_run(tmp_path / "run")
    for name in ("9" * 200, "٣", "-1", "x"):
        (store.path / "checkpoints" / name).mkdir(parents=True)
        (store.path / "trajectories" / "train" / f"{name}.parquet").write_bytes(b"")
        (store.path / "trajectories" / "train" / f"{name}.learner.npz").write_bytes(b"")
    assert store.steps("train") == [1, 2, 3]
    assert store.steps_saved() == []
    assert len(load_all(store.path)) == 6


def test_every_reader_of_trajectories_raises_what_counts_as_damage():
    for read in READERS.values():
        for content in (b"", b"x", DEEP, b"[[[]]]", b"{}", b'{"trajectories": [{"reward": []}]}', b"null"):
            with suppress(*DAMAGED):
                read(io.BytesIO(content))


def test_a_sidecar_whose_sizes_contradict(tmp_path):
    arrays = {
        "choice": np.zeros((1, 4), np.int32),
        "sizes": np.array([[0, 5, 2**31 - 1, 2**31 - 1]], np.int32),
        "tops": np.zeros(0, np.uint8),
        "logprobs": np.zeros(0, np.float16),
        "text": np.zeros(0, np.uint8),
        "text_sizes": np.zeros((0, 2), np.int32),
        "prompt_ids": np.zeros(0, np.int32),
        "token_ids": np.zeros(0, np.int32),
    }
    with pytest.raises(ValueError, match="contradict"):
        unpack_tokens([], arrays)
