"""Rows on Weights & Biases: what its own client wrote into its own files, and what becomes of a training without it."""

import ast
import asyncio
import json
import os
import socket
import struct
import subprocess
import sys
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from wandb.proto import wandb_internal_pb2 as wire

import art_nb as art
from art_nb.runs.reporters import is_installed, merge_wandb_config

ROOT = Path(__file__).parents[2]
BLOCK, WHOLE, LAST = 32768, 1, 4  # of the log that a run's file is: whole records, and last parts of others
UNSENT = ("step", "recorded_at")


@dataclass
class Sent:
    """What a run's file holds for W&B."""

    name: str = ""
    project: str = ""
    rows: list[dict] = field(default_factory=list)
    config: dict = field(default_factory=dict)
    axes: dict = field(default_factory=dict)  # by the metrics that they are for
    ended: bool = False


def records(path):
    """The records of a run's file: LevelDB's log format behind seven bytes of W&B's own."""
    content, at, record = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        if (left := BLOCK - at % BLOCK) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (WHOLE, LAST):
            yield wire.Record.FromString(record)
            record = b""


def flat(items):
    """Names and values of a record; those that W&B adds begin with an underscore."""
    named = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
    return {name: value for name, value in named.items() if not name.startswith("_")}


def read(path):
    """One run's file."""
    sent = Sent()
    for record in records(path):
        match record.WhichOneof("record_type"):
            case "run":
                assert record.run.run_id == record.run.display_name
                sent.name, sent.project = record.run.run_id, record.run.project
                sent.config |= flat(record.run.config.update)
            case "config":
                sent.config |= flat(record.config.update)
            case "history":
                sent.rows.append(flat(record.history.item))
            case "metric":
                sent.axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
            case "exit":
                sent.ended = True
    return sent


def found(folder):
    """What lies in a folder to be sent, a file a run, in the order of their beginning."""
    paths = sorted((folder / "wandb").glob("*run-*/*.wandb"), key=lambda path: path.stat().st_ctime_ns)
    return [read(path) for path in paths]


def kept(folder, project="p", name="a"):
    """The rows of a run's history as W&B is meant to have them."""
    rows = art.RunStore(folder / ".art" / project / "models" / name).history()
    return [{name: value for name, value in row.items() if name not in UNSENT} for row in rows]


def metric_rows(sent):
    """The rows of metrics. Rollouts are rows of their own."""
    return [row for row in sent.rows if not any(name.startswith("rollouts/") for name in row)]


@pytest.fixture
def script(tmp_path):
    """A function that runs a program in a process of its own, where W&B writes files and sends nothing."""

    def run(source, **env):
        mine = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        mine |= {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
        started = f"import asyncio, art_nb as art\nfrom art_nb import Model, TrainableModel\n{source}"
        done = subprocess.run(
            [sys.executable, "-W", "always", "-c", started],
            cwd=tmp_path,
            env=mine | env,
            text=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done

    return run


# what is sent

ROWS = """
async def main():
    model = Model(name="a", project="p", report_metrics=["wandb"])
    model.update_wandb_config({"seed": 7, "game": {"size": 3}})
    won = art.TrajectoryGroup([art.Trajectory(reward=1.0, metrics={"moves": 3}), art.Trajectory(reward=0.0)])
    await model.log([won], split="train", step=2, metrics={"loss/train": 0.5, "loss/kl": float("nan"), "mine": 4})
    model.update_wandb_config({"game": {"dice": 2}})
    await model.log([won], split="val", step=1)
    await model.log(metrics={"costs/gpu": 0.25}, split="train", step=3)

asyncio.run(main())
"""


def test_every_row_of_the_history_is_sent_with_its_step(script, tmp_path):
    script(ROWS)
    [sent] = found(tmp_path)
    assert (sent.name, sent.project, sent.ended) == ("a", "p", True)
    rows = metric_rows(sent)
    assert rows == kept(tmp_path)
    assert [row["training_step"] for row in rows] == [2, 1, 3]
    assert rows[0]["train/mine"] == 4 and rows[1]["val/reward"] == 0.5
    assert "costs/cum/gpu" in rows[2] and "loss/kl" not in rows[0]
    first, second = (row for row in sent.rows if row not in rows)
    assert (first["rollouts/train/nrows"], first["training_step"], second["training_step"]) == (2, 2, 1)
    assert second["rollouts/val/_type"] == "table-file" and second["rollouts/val_viewer/_type"] == "html-file"
    assert sent.config == {"seed": 7, "game": {"size": 3, "dice": 2}}
    assert sent.axes["*"] == "training_step"


TRAINED = """
async def main():
    model = TrainableModel(name="a", project="p", base_model={base!r}, report_metrics=["wandb"])
    async with art.LocalBackend(verbose=False) as backend:
        await model.register(backend)
        asked = [dict(role="user", content="?")]
        said = (await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=asked, max_tokens=4, logprobs=True)).choices[0]
        group = art.TrajectoryGroup([art.Trajectory(messages_and_choices=[*asked, said], reward=r) for r in (0, 1)])
        result = await backend.train(model, [group], learning_rate=1e-3)
        await model.log([group], metrics=result.metrics, step=result.step, split="train")
        await model.train([group])
        shown = art.Trajectory(messages_and_choices=[*asked, dict(role="assistant", content="B2")])
        await model.train_sft([shown])
        await model.end_reports(200)  # W&B starts slowly on a busy machine

asyncio.run(main())
"""


def test_what_training_measures_is_sent(script, tmp_path, tiny_model_dir):
    script(TRAINED.format(base=str(tiny_model_dir)))
    [sent] = found(tmp_path)
    rows = metric_rows(sent)
    assert rows == kept(tmp_path)
    assert [row["training_step"] for row in rows] == [1, 2, 3]
    assert all("loss/grad_norm" in row and "train/reward" in row for row in rows[:2])
    assert "sft/loss" in rows[2]


def test_a_key_alone_asks_for_it_and_an_empty_list_forbids_it(script, tmp_path):
    one = "asyncio.run(Model(name={!r}, project='p', report_metrics={}).log(metrics={{'x': 1}}))\n"
    program = one.format("asked", None) + one.format("forbidden", [])
    end = "from art_nb.runs.report_queue import end_all\nend_all()\n"
    script(program + end + "import sys; assert 'wandb' in sys.modules", WANDB_API_KEY="0" * 40)
    assert [sent.name for sent in found(tmp_path)] == ["asked"]
    script(program + "import sys; assert 'wandb' not in sys.modules", WANDB_API_KEY="")
    assert len(found(tmp_path)) == 1
    assert len(kept(tmp_path, name="asked")) == len(kept(tmp_path, name="forbidden")) == 2


SEVERAL = """
import wandb

async def log(model, x):
    await model.log(metrics={"x": x}, step=x)

async def main():
    theirs = wandb.init(project="theirs", id="theirs", name="theirs")
    first = Model(name="a", project="p", report_metrics=["wandb"])
    second = first.model_copy(deep=True)
    second.name = "b"
    await asyncio.gather(log(first, 1), log(second, 2), log(first, 3))
    await log(Model(name="a", project="p", report_metrics=["wandb"]), 4)       # the cell is run again
    theirs.log({"mine": 1})
    assert await asyncio.to_thread(first._reports.queues[0].drain, 60)
    wandb.init(project="theirs", id="next", name="next", reinit="finish_previous")
    await log(first, 5)
    assert not first._reports.queues[0].failed

asyncio.run(main())
"""


def test_each_model_has_its_run_whatever_else_is_open(script, tmp_path):
    script(SEVERAL)
    sent = found(tmp_path)
    values = {name: [{row["val/x"] for row in one.rows} for one in sent if one.name == name] for name in "ab"}
    assert values == {"a": [{1, 3, 4}, {5}], "b": [{2}]}
    assert [one.rows for one in sent if one.name == "theirs"] == [[{"mine": 1}]]
    assert all(one.ended for one in sent)


# what becomes of a training without it

FAILING = """
import warnings

async def main():
    model = Model(name="a", project="p", report_metrics=["wandb"])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(3):
            await model.log(metrics={"x": step}, step=step)
        model.update_wandb_config({"seed": 1})
        await model.end_reports(60)
    print([str(warning.message) for warning in said if "wandb" in str(warning.message)])

asyncio.run(main())
"""


@pytest.fixture
def closed():
    """An address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"WANDB_API_KEY": "short"}, "key"),
        ({"WANDB_API_KEY": ""}, "wandb login"),
        ({"WANDB_API_KEY": "0" * 40, "WANDB_INIT_TIMEOUT": "1"}, "a is no longer reported to wandb"),
    ],
)
def test_a_failure_of_the_tracker_is_reported_once_and_the_history_is_still_written(script, tmp_path, closed, env, why):
    done = script(FAILING, WANDB_MODE="online", WANDB_BASE_URL=closed, **env)
    [said] = ast.literal_eval(done.stdout.splitlines()[-1])
    assert why in said
    assert "history.jsonl" in said
    assert [row["val/x"] for row in kept(tmp_path)] == [0, 1, 2]


@pytest.fixture
def without_wandb(monkeypatch, tmp_path):
    """As if it were not installed."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    return lambda **options: art.Model(name="a", project="p", base_path=str(tmp_path / ".art"), **options)


async def test_who_names_it_is_told_what_to_install(without_wandb, tmp_path):
    model = without_wandb(report_metrics=["wandb"])
    with pytest.raises(art.BackendMissing, match=r'pip install "art_nb\[wandb\]"'):
        await model.register(art.LocalBackend(path=tmp_path / ".art", verbose=False))
    with pytest.raises(art.BackendMissing):
        await model.log(metrics={"x": 1}, step=1)
    assert kept(tmp_path) == []


def test_a_missing_package_with_a_key_is_reported_once_and_training_continues(without_wandb, tmp_path, recwarn):
    model = without_wandb()
    for step in range(2):
        asyncio.run(model.log(metrics={"x": 1}, step=step))
    [said] = [str(warning.message) for warning in recwarn if "wandb" in str(warning.message)]
    assert "pip install" in said and "report_to=[]" in said
    assert len(kept(tmp_path)) == 2


@pytest.mark.parametrize("copied", [art.Model.model_copy, deepcopy])
def test_a_copy_is_told_by_itself(without_wandb, tmp_path, recwarn, copied):
    first = without_wandb()
    asyncio.run(first.log(metrics={"x": 1}, step=0))
    second = copied(first)
    second.name = "b"
    for model in (second, first, second):
        asyncio.run(model.log(metrics={"x": 1}, step=1))
    assert ["pip install" in str(warning.message) for warning in recwarn] == [True, True]
    assert (len(kept(tmp_path)), len(kept(tmp_path, name="b"))) == (2, 2)


def test_a_name_that_is_not_known_is_said(without_wandb, recwarn):
    model = without_wandb(report_metrics=["comet"])
    for _ in range(2):
        asyncio.run(model.log(metrics={"x": 1}, step=1))
    [said] = [str(warning.message) for warning in recwarn]
    assert "'comet'" in said and "mlflow, tensorboard, trackio, wandb, weave" in said


def test_a_folder_of_runs_is_no_package(monkeypatch, tmp_path):
    assert is_installed("wandb")
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not is_installed("wandb")


def test_a_nested_setting_cannot_change():
    config = merge_wandb_config({"game": {"size": 3}}, {"game": {"dice": 2}})
    assert config == {"game": {"size": 3, "dice": 2}}
    with pytest.raises(ValueError, match=r"game\.size is recorded as 3 .* Create another model"):
        merge_wandb_config(config, {"seed": 1, "game": {"size": 4}})
