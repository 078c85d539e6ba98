"""The audit's kills: at random moments, and aimed between a checkpoint and its history row."""

import json
import os
import random
import signal

import pytest
from support.audit import count
from support.forked_runs import the_job
from test_crash import check_disk, of_training, raw_rows

import art_nb as art

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the children are forked from one warm process")
MOMENTS = ["registered", "RolloutStarted", "RolloutDone", "GradientStep", "AdapterServed", "CheckpointSaved"]
JOBS = {"train": {"steps": 10**6}, "sft": {"steps": 10**6}, "pipeline": {"scenarios": 10**6}}
OVER = {"train": {"steps": 0}, "sft": {"steps": 0}, "pipeline": {"scenarios": 0}}
SILENT = {"sft": {"RolloutStarted", "RolloutDone"}}


def follow(nursery, job, kills):
    """Kill lives of a job at these moments; after each, nothing that was finished is missing. The rebuilt rows."""
    store, reached = art.RunStore(job["root"] / "crash" / "models" / job["name"]), 0
    rollouts = {}
    for moment, often, delay_s in kills:
        life = nursery.live({**job, "root": None}, moment, often, delay_s)
        assert life.status == signal.SIGKILL
        saved = max([reached, *life.steps("CheckpointSaved")])
        reached = check_disk(store, rows_lag=1)
        assert reached in (saved, saved + 1)
        for step in [step for step in store.steps("train") if step <= reached]:
            content = (store.path / "trajectories" / "train" / f"{step:04d}.parquet").read_bytes()
            assert rollouts.setdefault(step, content) == content, "finished rollouts are never written again"
    last = nursery.live({**job, "root": None, **OVER[job["do"]]})
    assert last.lines[-1] == ["finished"]
    assert check_disk(store) == reached
    assert [row["step"] for row in filter(of_training, store.history())] == [*range(1, reached + 1)]
    assert store.steps("train") == ([] if job["do"] == "sft" else [*range(1, reached + 1)])
    assert raw_rows(store)[1] == b"" and [path.name for path in store.path.rglob(".*")] == []
    return [row["step"] for row in store.history() if row.get("recovered")], reached


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("do", JOBS)
def test_kills_lose_no_finished_step_row_or_rollout(nursery, tmp_path, tiny_model_dir, do):
    rng, job = random.Random(do), the_job(do, do, tmp_path, tiny_model_dir, **JOBS[do]) | {"root": tmp_path}
    moments = [moment for moment in MOMENTS if moment not in SILENT.get(do, ())]
    at_random = [(rng.choice(moments), 1, rng.random() * 0.3) for _ in range(count(201, 6) // 3)]
    aimed = [
        ("CheckpointSaved", rng.randint(1, 3), 0.0 if i % 2 else rng.random() * 0.01) for i in range(count(60, 6) // 3)
    ]
    recovered, reached = follow(nursery, job, at_random + aimed)
    print(
        json.dumps(
            {"do": do, "random": len(at_random), "aimed": len(aimed), "steps": reached, "rows rebuilt": len(recovered)}
        )
    )
