"""Files as TRL, verl and verifiers write them, and what a viewer makes of them."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from art_nb.core.types import StoreError
from art_nb.rollouts.trajectories import Trajectory, TrajectoryGroup
from art_nb.runs.readers import read_groups
from art_nb.runs.store import RunStore
from art_nb.views.index import load_all, select
from art_nb.views.replies import index_reply, traj_reply


def trl_file(folder, step, mode=None, **more):
    """The table that GRPOTrainer logs with log_completions=True."""
    path = folder / "completions" / (mode or "") / f"completions_{step:05d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 4
    columns = {"mode": [mode] * count} if mode else {}
    columns |= {
        "step": [step] * count,
        "prompt": ["user: 2+2", "user: 2+2", "user: 3+3", "user: 3+3"],
        "completion": ["4", "5", "6", "9"],
        "accuracy_reward_func": [1.0, 0.0, 1.0, float("nan")],
        "format_reward": [0.5, 0.5, 0.0, 0.25],
        **more,
        "advantage": [0.7, -0.7, 0.7, -0.7],
    }
    pq.write_table(pa.table(columns), path)
    return path


def test_trl(tmp_path):
    for step in (2, 10):
        trl_file(tmp_path, step, notes=["a", None, "b", "c"], length=[1, 2, 3, 4])
    index = load_all(tmp_path)
    assert index_reply(index)[0]["done"]
    assert index.table["step"].tolist() == [10] * 4 + [2] * 4
    assert index.table["reward"].tolist() == [1.5, 0.5, 1.0, 0.25] * 2
    assert index.table["advantage"].tolist() == pytest.approx([0.7, -0.7] * 4)  # the trainer's own
    told = traj_reply(index, 3)[0]
    assert told["breakdown"]["parts"] == [["reward/format_reward", 0.25]]
    assert told["breakdown"]["sums"]
    assert told["metrics"]["length"] == 4
    assert json.loads(told["metadata"])["notes"] == "c"
    assert "weights" in json.loads(told["metadata"])["reward"]
    assert [m["role"] for m in told["messages"]] == ["user", "assistant"]
    assert select(index, "step=2 and reward/format_reward>0.3").tolist() == [4, 5]


def test_trl_by_mode_and_with_messages(tmp_path):
    said = [[{"role": "assistant", "content": "4", "tool_calls": None}]] * 4
    path = trl_file(tmp_path, 1, mode="train")
    table = pq.read_table(path)
    table = table.set_column(table.column_names.index("completion"), "completion", pa.array(said))
    pq.write_table(table, path)
    groups = read_groups(tmp_path)[1]
    assert [len(group) for group in groups] == [2, 2]
    assert groups[0].trajectories[0].messages()[1] == {"role": "assistant", "content": "4"}


def test_older_trl_with_one_reward(tmp_path):
    path = tmp_path / "completions_00001.parquet"
    columns = {"step": ["1", "1"], "prompt": ["a", "a"], "completion": ["x", "y"], "reward": [0.25, 0.5]}
    pq.write_table(pa.table(columns), path)
    groups = read_groups(path)[1]
    assert [t.reward for t in groups[0]] == [0.25, 0.5]


@pytest.mark.parametrize("with_gts", [True, False])
def test_verl(tmp_path, with_gts):
    for step in (1, 7):
        said = ("2+2", "4", 1.0), ("2+2", "é🙂", 0.0), ("x", "", -1.0)
        lines = [
            {"input": f"user\n{q}\nassistant\n", "output": a, "score": s, "step": step, "acc": s > 0, "pred": a}
            | ({"gts": "4"} if with_gts else {})
            for q, a, s in said
        ]
        text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
        (tmp_path / f"{step}.jsonl").write_text(text + "\n")
    index = load_all(tmp_path)
    assert index.table["step"].tolist() == [7, 7, 7, 1, 1, 1]
    assert index.table["group"].tolist() == [0, 0, 1, 2, 2, 3]
    assert index.table["reward"].tolist() == [1, 0, -1] * 2
    assert index.locate(1).trajectory.messages()[1]["content"] == "é🙂"
    assert select(index, "acc and step=1").tolist() == [3]
    assert json.loads(traj_reply(index, 0)[0]["metadata"]).get("gts") == ("4" if with_gts else None)


def verifiers_line(example, reward, **more):
    """A line of results.jsonl of a verifiers evaluation."""
    calls = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    completion = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "a board", "tool_call_id": "1"},
        {"role": "assistant", "content": "done"},
    ]
    return {
        "example_id": example,
        "prompt": [{"role": "user", "content": f"task {example}"}],
        "completion": completion,
        "reward": reward,
        "timing": {"total": 1.5},
        "is_completed": True,
        "is_truncated": False,
        "stop_condition": "done",
        "metrics": {"correct": reward, "num_turns": 2.0},
        "correct": reward,
        "num_turns": 2.0,
        "task": "t",
        "token_usage": {"output_tokens": 12.0},
    } | more


def test_verifiers(tmp_path):
    error = {"error": "ToolError", "error_chain_repr": "ToolError('no')", "error_chain_str": "Traceback …"}
    lines = [
        verifiers_line(0, 1.0),
        verifiers_line(1, 0.0, is_truncated=True),
        verifiers_line(0, 0.0, info={"a": 1}),
        verifiers_line(1, 0.0, prompt=None, completion=None, error=error),
        verifiers_line(1, None),
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"example_id": 3, "torn')
    (tmp_path / "metadata.json").write_text("{}")
    index = load_all(tmp_path)
    assert index.table["group"].tolist() == [0, 0, 1, 1, 1]
    assert index.table["status"].tolist() == [0, 0, 0, 0, 1]
    assert index.table["tools"].tolist() == [1, 1, 1, 1, 0]
    assert index.table["turns"].tolist() == [2, 2, 2, 2, 0]
    assert select(index, "truncated").tolist() == [2]
    assert math.isnan(index.table["reward"][3])
    assert index.locate(4).trajectory.type == "ToolError"
    assert index.locate(0).trajectory.metrics == {"correct": 1.0, "num_turns": 2.0}
    assert index.locate(1).trajectory.metadata["info"] == {"a": 1}
    assert [m["role"] for m in traj_reply(index, 0)[0]["messages"]] == ["user", "assistant", "tool", "assistant"]


def test_a_run_of_ours(tmp_path):
    store = RunStore(tmp_path / "run")
    group = TrajectoryGroup([Trajectory(messages_and_choices=[{"role": "user", "content": "hi"}])])
    store.write_groups("train", 3, [group])
    store.write_groups("val", 3, [group, group])
    assert {step: len(groups) for step, groups in read_groups(tmp_path / "run").items()} == {3: 1}
    assert len(read_groups(tmp_path / "run", "val")[3]) == 2


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b"", "no known format"),
        ("a.jsonl", b'{"x": 1}\n', "no known format"),
        ("a.parquet", b"PAR1", "Could not read"),
        ("a.pkl", b"\x80\x04.", "only .jsonl, .json, .parquet, .arrow files are supported"),
        ("a.jsonl", b'{"input": 1, "output": {"a": 1}, "score": "x"}\n', None),
        ("a.jsonl", b'{"input": [1], "output": ["a", null], "score": true}\n', None),
        ("a.jsonl", b'{"example_id": null, "prompt": 3, "completion": [3], "reward": {}}\n', None),
        (
            "a.jsonl",
            b'{"example_id": 1, "prompt": [], "completion": [], "reward": 1, "metrics": 3}\n',
            "line 1: invalid record",
        ),
    ],
)
def test_files_that_are_something_else(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    if says is None:
        assert sum(map(len, read_groups(path).values())) == 1
    else:
        with pytest.raises(StoreError, match=says):
            read_groups(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    import art_nb.runs.row_files

    path = tmp_path / "1.jsonl"
    path.write_text('{"input": "a", "output": "b", "score": 1}\n')
    monkeypatch.setattr(art_nb.runs.row_files, "MAX_FILE_BYTES", 10)
    with pytest.raises(StoreError, match="Split it"):
        read_groups(path)


def test_nothing_is_executed(tmp_path):
    path = tmp_path / "1.jsonl"
    path.write_text(json.dumps({"input": "__import__('os')", "output": "!!python/object:os.system", "score": 1}) + "\n")
    (group,) = read_groups(path)[1]
    assert group.trajectories[0].messages()[1]["content"] == "!!python/object:os.system"


def test_traces_of_verifiers():
    """The file was written by `verifiers.v1.utils.trace_store` of verifiers 0.4.0."""
    steps = read_groups(Path(__file__).with_name("verifiers_traces.jsonl"))
    assert [*steps] == [0, 3]
    (group,) = steps[3]
    assert group.metadata == {"scenario_id": "sum-0 g1"}
    tools, branches = group.trajectories
    assert [error.type for error in group.exceptions] == ["ProviderError"]
    assert tools.reward == 1.25
    assert tools.metrics == {"reward/correct": 1.0, "reward/brief": 0.5, "turns": 2.0}
    assert [message["role"] for message in tools.messages()] == ["system", "user", "assistant", "tool", "assistant"]
    call, answer = tools.messages_and_choices[2], tools.messages_and_choices[4]
    assert call.finish_reason == "tool_calls" and call.message.tool_calls[0].function.arguments == '{"a": 2}'
    assert answer.finish_reason == "stop" and tools.tools[0]["function"]["name"] == "add"
    first, second = branches.histories()
    assert first.messages()[0] == second.messages()[0]
    assert [h.messages_and_choices[1].finish_reason for h in (first, second)] == ["length", "stop"]
    assert {g.metadata["scenario_id"]: len(g.exceptions) for g in steps[0]} == {"sum-0": 1, "sum-0 (judge)": 0}
    assert math.isnan(steps[0][1].trajectories[0].reward)


@pytest.mark.parametrize("change", [{"traces": 3}, {"traces": [{"nodes": [{}]}]}, {"task": None}, {"run": {"work": 1}}])
def test_damaged_traces_are_a_store_error(tmp_path, change):
    line = json.loads(Path(__file__).with_name("verifiers_traces.jsonl").read_text().splitlines()[0])
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(line | change))
    with pytest.raises(StoreError, match=r"traces\.jsonl"):
        read_groups(path)


def test_a_graph_with_a_cycle_is_a_store_error(tmp_path):
    line = json.loads(Path(__file__).with_name("verifiers_traces.jsonl").read_text().splitlines()[0])
    line["traces"][0]["nodes"][0]["parent"] = 4
    (tmp_path / "traces.jsonl").write_text(json.dumps(line))
    with pytest.raises(StoreError, match=r"traces\.jsonl"):
        read_groups(tmp_path)
