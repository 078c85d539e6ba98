"""A run directory whose newest files are damaged or missing: what is rebuilt, what is moved aside, what is said."""

import json
import shutil

import pytest
from support.registered import a_group, ask, at_home, better_and_worse, heard, until

import art_nb as art
from art_nb.core.events import Warned
from art_nb.core.files import read_lines
from art_nb.core.types import StoreError

try:
    import resource
except ImportError:
    resource = None


async def rollout(model, scenario):
    return better_and_worse([await ask(model)], [rollout.rewards.pop(0)]).trajectories[0]


async def train(model, steps, **options):
    """`art.train` with two rollouts a step of rewards 0 and 1."""
    rollout.rewards = [0.0, 1.0] * 50
    return await art.train(
        model,
        rollout,
        [0],
        steps=steps,
        groups_per_step=1,
        rollouts_per_group=2,
        learning_rate=1e-2,
        show=False,
        **options,
    )


def raw_rows(store):
    return read_lines(store.path / "history.jsonl")


def drop_last_row(store, counted):
    """As after a kill before the last row was written; `counted`: its sums were."""
    file = store.path / "history.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]))
    if not counted:
        state = json.loads((store.path / "state.json").read_text())
        state["_metrics_builder_state"] = {}
        (store.path / "state.json").write_text(json.dumps(state))
    return json.loads(lines[-1])


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


async def test_a_damaged_newest_checkpoint_is_moved_aside_and_said(tmp_path, tiny_model_dir):
    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        await train(model, 3)
    store = model.store
    optimizer = store.checkpoint_dir(3) / "optimizer.safetensors"
    optimizer.write_bytes(optimizer.read_bytes()[:-1])
    weights = store.checkpoint_dir(2) / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1  # one bit of one weight
    weights.write_bytes(data)
    before = {step: contents(store.checkpoint_dir(step)) for step in (1, 2, 3)}
    rollouts = contents(store.path / "trajectories" / "train")
    model = art.TrainableModel(name="tiny", project="tests", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path=tmp_path, verbose=False) as backend:
        warned = heard(backend, Warned)
        await model.register(backend)
        assert await model.get_step() == 1
        said = [event.message for event in warned if "damaged" in event.message]
        assert len(said) == 2
        assert all("training continues from step 1" in message for message in said)
        assert [row["step"] for row in store.history()] == [1]
        assert [row["step"] for row in raw_rows(store) if row.get("undone")] == [2, 3]
        assert (art.Run.attach(store.path).refresh().step, store.steps_saved()) == (1, [0, 1])
        await train(model, 2)
    folder = store.path / "checkpoints"
    assert contents(folder / "0003.damaged") == before[3]
    assert contents(folder / "0002.damaged") == before[2]
    assert contents(folder / "0001") == before[1]
    kept = contents(store.path / "trajectories" / "train")
    for name, content in rollouts.items():
        where = name if name.startswith("0001") else f"{name[:4]}.damaged{name[4:]}"
        assert kept[where] == content
    assert [row["step"] for row in store.history()] == [1, 2]
    assert store.steps("train") == [1, 2]


async def test_if_all_checkpoints_are_damaged_no_new_run_starts(tmp_path, tiny_model_dir):
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        pass
    facts = model.store.checkpoint_dir(0) / "training.json"
    facts.write_text("")
    with pytest.raises(StoreError, match="All checkpoints of .* are damaged .*give this model another name"):
        async with at_home(tiny_model_dir, tmp_path):
            pass
    assert facts.read_text() == "" and not list(model.store.path.glob("**/*.damaged"))


@pytest.mark.parametrize("counted", [True, False])
async def test_the_row_of_a_finished_step_is_rebuilt(tmp_path, tiny_model_dir, counted):
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        await train(model, 2)
    lost = drop_last_row(model.store, counted)
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        rows = model.store.history()
        assert [row["step"] for row in rows] == [1, 2]
        assert (rows[-1]["recovered"], "recovered" in rows[0]) == (1, False)
        if counted:
            assert rows[-1] == lost | {"recovered": 1}
        for name in ("train/reward", "loss/train", "data/step_num_trajectories", "time/step_backend_train_s"):
            assert rows[-1][name] == lost[name]
    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        assert model.store.history() == rows, "it is rebuilt once"
        fork = art.TrainableModel(name="fork", project="tests", base_model=str(tiny_model_dir))
        await backend._experimental_fork_checkpoint(fork, from_model="tiny")
        await fork.register(backend)
        assert (await fork.get_step(), fork.store.history()) == (2, []), "its steps were trained elsewhere"


def keep_lines(store, chosen):
    """Leave only these lines of the history."""
    file = store.path / "history.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[i] for i in chosen))


@pytest.mark.parametrize("kept", [[], [0]], ids=["no history", "an older history"])
async def test_rows_before_the_counted_one_are_rebuilt_and_not_counted_again(tmp_path, tiny_model_dir, kept):
    """As after a kill between the copies of the sums and of the history."""
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        await train(model, 3)
    before = model.store.history()
    keep_lines(model.store, kept)
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        rows = model.store.history()
        assert [(row["step"], row.get("recovered")) for row in rows] == [
            (n + 1, None if n in kept else 1) for n in range(3)
        ]
        assert rows[-1] == before[-1] | {"recovered": 1}
        for name in ("train/reward", "loss/train", "data/step_num_trajectories"):
            assert [row[name] for row in rows] == [row[name] for row in before]
        await train(model, 4)
    counts = [row["data/step_num_trajectories"] for row in model.store.history()]
    assert model.store.history()[-1]["data/cum/num_trajectories"] == sum(counts)


async def test_a_row_that_was_never_counted_is_counted(tmp_path, tiny_model_dir):
    """As after a loop of the user that was interrupted between `backend.train` and `model.log`, and went on."""
    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        await train(model, 1)
        groups = [better_and_worse([await ask(model), await ask(model)], [0.0, 1.0])]
        await backend.train(model, groups)
        result = await backend.train(model, groups)
        await model.log(groups, split="train", step=result.step, metrics=result.metrics)
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        assert sorted(row["step"] for row in model.store.history()) == [1, 2, 3]
        await train(model, 4)
        rows = model.store.history()
    assert rows[-1]["data/cum/num_gradient_steps"] == sum(row["data/step_num_gradient_steps"] for row in rows)


async def test_the_row_of_an_undone_step_is_not_that_of_the_step_that_replaces_it(tmp_path, tiny_model_dir):
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        await train(model, 2)
    undone = model.store.history()[-1]
    (model.store.checkpoint_dir(2) / "training.json").write_text("")
    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        groups = [better_and_worse([await ask(model), await ask(model)], [1.0, 0.0])]
        await backend.train(model, groups)  # the process ends before the row is written
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        row = model.store.history()[-1]
    assert (row["step"], row["recovered"]) == (2, 1) and row["recorded_at"] != undone["recorded_at"]


async def test_the_row_of_a_supervised_step_is_rebuilt(tmp_path, tiny_model_dir):
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        await model.train_sft([art.Trajectory(messages_and_choices=said)] * 2)
    lost = drop_last_row(model.store, counted=False)
    async with at_home(tiny_model_dir, tmp_path) as (model, _):
        (row,) = model.store.history()
    assert (row["step"], row["recovered"], row["sft/loss"]) == (1, 1, lost["sft/loss"])


@pytest.mark.skipif(resource is None, reason="this system has no limit on the size of a file")
async def test_a_full_disk_pauses_the_run_and_a_resume_saves_the_step(tmp_path, tiny_model_dir, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        warned = heard(backend, Warned)

        def disk_messages():
            return [event.message for event in warned if event.key == "disk 2"]

        def fill(run):
            if run.step == 1:
                size = (model.store.checkpoint_dir(1) / "optimizer.safetensors").stat().st_size
                resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, hard))

        rollout.rewards = [0.0, 1.0] * 50
        run = art.train(
            model,
            rollout,
            [0],
            steps=3,
            groups_per_step=1,
            rollouts_per_group=2,
            learning_rate=1e-2,
            show=False,
            on_step=fill,
        )
        try:
            await until(lambda: disk_messages() and run.status == "paused")
            assert (run.step, model.store.steps_saved()) == (2, [0, 1])
            assert [row["step"] for row in model.store.history()] == [1], "the step is not over"
            assert "bytes are needed" in disk_messages()[0] and "are available" in disk_messages()[0]
            run.resume()
            await until(lambda: len(disk_messages()) == 2 and run.status == "paused")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        run.resume()
        await run
        assert "is paused at step 2" in capsys.readouterr().out
        assert model.store.steps_saved() == [0, 1, 2, 3]
        assert [row["step"] for row in raw_rows(model.store)] == [1, 2, 3]


async def test_an_explicit_loop_trains_at_most_one_step_that_is_not_saved(tmp_path, tiny_model_dir):
    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        group, place = await a_group(model), model.store.path / "checkpoints"
        place.rename(place.with_name("elsewhere"))
        place.write_text("in the way")
        assert (await backend.train(model, [group])).checkpoint_path is None
        for again in (lambda: backend.train(model, [group]), lambda: backend.save_checkpoint(model)):
            with pytest.raises(StoreError, match="checkpoint of step 1 was not saved: .*still in memory"):
                await again()
        place.unlink()
        place.with_name("elsewhere").rename(place)
        await backend.save_checkpoint(model)
        assert model.store.steps_saved() == [0, 1]
        shutil.rmtree(model.store.checkpoint_dir(1))
        await backend.save_checkpoint(model)
        assert model.store.steps_saved() == [0], "saved once"
