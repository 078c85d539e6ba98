"""Directories of ART's older versions: conflicts, torn files, hostile YAML, a kill in the middle."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

import art_nb as art
from art_nb.rollouts.trajectories import Trajectory, TrajectoryGroup
from art_nb.runs.migrate import migrate
from art_nb.runs.readers import read_groups
from art_nb.runs.store import RunStore


def told(step):
    entries = [
        {"role": "user", "content": f"step {step}: ß 🙂"},
        {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": "B2"}},
    ]
    one = {
        "messages_and_choices": entries,
        "reward": step / 2,
        "metrics": {"won": 1},
        "metadata": {"seed": step},
        "logs": ["a line"],
        "tools": None,
        "additional_histories": [],
    }
    return {"trajectories": [one, one | {"reward": None}]}


def older(run, steps, split="train", ending=".jsonl"):
    """A run as ART left it in June 2025."""
    folder = run / "trajectories" / split
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        text = yaml.dump([told(step)]) if ending == ".yaml" else json.dumps(told(step)) + "\n"
        (folder / f"{step:04d}{ending}").write_text(text)
        (run / f"{step:04d}").mkdir(exist_ok=True)
        (run / f"{step:04d}" / "adapter_config.json").write_text("{}")
        (run / f"{step:04d}" / "adapter_model.bin").write_bytes(b"weights")
    return run


def held(run):
    return {step: [[t.for_logging() for t in group] for group in groups] for step, groups in read_groups(run).items()}


@pytest.mark.parametrize("ending", [".jsonl", ".yaml"])
def test_a_run_takes_the_form_of_today(tmp_path, ending):
    run = older(tmp_path / "p/models/agent", range(3), ending=ending)
    before = held(run)
    assert RunStore(run).steps_saved() == [0, 1, 2]
    assert migrate(tmp_path, dry_run=True).checkpoints == 3
    assert held(run) == before and not (run / "checkpoints").exists()
    done = migrate(tmp_path)
    assert (done.files, done.checkpoints, done.skipped) == (3, 3, [])
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "trajectories"]
    assert sorted(path.suffix for path in (run / "trajectories/train").iterdir()) == [".parquet"] * 3
    assert held(run) == before
    assert RunStore(run).steps_saved() == [0, 1, 2]
    assert migrate(tmp_path).files == migrate(tmp_path).checkpoints == 0


def test_ambiguous_files_are_not_moved(tmp_path):
    run = older(tmp_path / "run", [1, 2, 3, 4])
    RunStore(run).write_groups("train", 1, [TrajectoryGroup([Trajectory(reward=9.0)])])
    folder = run / "trajectories/train"
    (folder / "0002.jsonl").write_text('{"trajectories": [{"mess')
    (folder / "0003.jsonl").write_text("[1, 2]\n")
    (folder / "notes.jsonl").write_text("{}\n")
    (run / "checkpoints/0004").mkdir(parents=True)
    foreseen, done = migrate(run, dry_run=True), migrate(run)
    assert (done.files, done.checkpoints, len(done.skipped)) == (1, 3, 5)
    assert (foreseen.files, foreseen.checkpoints, foreseen.skipped) == (1, 3, done.skipped)
    assert sorted(path.name for path in folder.glob("*.jsonl")) == [
        "0001.jsonl",
        "0002.jsonl",
        "0003.jsonl",
        "notes.jsonl",
    ]
    assert RunStore(run).read_groups("train", 1)[0].trajectories[0].reward == 9.0
    assert (run / "0004/adapter_model.bin").exists()
    assert "something else" in str(done)


def test_the_only_copy_of_logprobs_stays(tmp_path):
    run, token = tmp_path / "run", {"token": "B2", "bytes": None, "logprob": -0.5, "top_logprobs": []}
    step = told(1)
    step["trajectories"][0]["messages_and_choices"][1]["logprobs"] = {"content": [token], "refusal": None}
    older(run, [1])
    file = run / "trajectories/train/0001.jsonl"
    with_logprobs = json.dumps(step) + "\n"
    RunStore(run).write_groups("train", 1, RunStore(run).read_groups("train", 1))  # as ART's own migration does
    file.write_text(with_logprobs)
    done = migrate(run)
    assert (done.files, len(done.skipped), file.read_text()) == (0, 1, with_logprobs)
    assert "lacks token data" in str(done)
    file.with_suffix(".parquet").unlink()
    assert migrate(run, keep_jsonl=True).files == 1
    assert migrate(run).skipped == [] and not file.exists()
    choice = RunStore(run).read_groups("train", 1)[0].trajectories[0].messages_and_choices[1]
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.5]


def test_yaml_is_data(tmp_path):
    folder = tmp_path / "run/trajectories/train"
    folder.mkdir(parents=True)
    bad = folder / "0001.yaml"
    bad.write_text(f"!!python/object/apply:os.system ['touch {tmp_path}/done']")
    assert "YAML" in migrate(tmp_path / "run").skipped[0]
    assert bad.exists() and not (tmp_path / "done").exists()


async def test_a_registered_run_has_its_checkpoints_in_one_place(tmp_path, tiny_model_dir):
    async def register(backend):
        model = art.TrainableModel(name="agent", project="p", base_model=str(tiny_model_dir))
        await model.register(backend)
        return model

    async with art.LocalBackend(path=tmp_path, verbose=False) as backend:
        run = (await register(backend)).store.path
    (run / "checkpoints/0000").rename(run / "0000")
    shutil.copytree(run / "0000", run / "0007")
    (run / "checkpoints").rmdir()
    async with art.LocalBackend(path=tmp_path, verbose=False) as backend:
        model = await register(backend)
        assert await model.get_step() == 7
        assert RunStore(run).steps_saved() == [0, 7] and not (run / "0007").exists()
        await model.delete_checkpoints("train/reward")
        assert RunStore(run).steps_saved() == [7]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("delay_s", [0.02, 0.1, 0.25])
def test_a_killed_migration_resumes(tmp_path, delay_s):
    run = older(tmp_path / "run", range(60))
    before = held(run)
    code = f"from art_nb.runs.migrate import migrate; print('ready', flush=True); migrate({str(run)!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
    assert held(run) == before
    assert RunStore(run).steps_saved() == [*range(60)]
    assert migrate(run).skipped == []
    assert held(run) == before
    assert not list(run.rglob("*.jsonl"))
