"""Mutated run directories: opened, they show what is whole; resumed, they train on or name what is damaged."""

import os
import random
import shutil

import pytest
from support.audit import count
from support.conversations import make_choice

import art_nb as art
from art_nb.core.events import StepDone, to_json
from art_nb.core.files import append_lines
from art_nb.core.types import ArtError
from art_nb.reports.report import report
from art_nb.reports.static_html import static_run
from art_nb.rewards.journal import Journal, override
from art_nb.runs.store import RunStore
from art_nb.tokens.learner_records import read_record
from art_nb.training.run import Run
from art_nb.views.index import load_all

DEEP = b"[" * 100_000
WORDS = (b"null", b"[]", b"{}", b'"x"', b"-1", b"1e308", b"NaN", b"9" * 400, DEEP, b"\\ud800", b"true", b"\xff\xfe")


async def make_run(named, folder):
    """A run of two steps with trained groups, records, a journal and checkpoints."""
    model = named()
    async with art.LocalBackend(path=folder, verbose=False) as backend:
        await model.register(backend)
        for step in (1, 2):
            result = await backend.train(model, [await a_group(model, step)], learning_rate=1e-3)
            await model.log([await a_group(model, step)], split="train", step=result.step, metrics=result.metrics)
    store = model.store
    Journal(store.path).append(override("g1", {0: 0.5, 1: None}, step=1))
    append_lines(store.path / "events.jsonl", to_json(StepDone(step=2, metrics={"train/reward": 1.0})))
    store.write_state({"mine": 1})
    return store.path


async def a_group(model, number):
    """Answers to one question with rewards that differ."""
    ask, client = [{"role": "user", "content": "go"}], model.openai_client()
    made = []
    for i in range(2):
        answer = await client.chat.completions.create(
            model=model.get_inference_name(), messages=ask, max_tokens=3, logprobs=True, seed=i
        )
        made.append(art.Trajectory(messages_and_choices=[*ask, answer.choices[0]], reward=float(i)))
    return art.TrajectoryGroup(made, metadata={"group_id": f"g{number}"})


def flip(rng, content):
    """Change one to four bytes."""
    content = bytearray(content or b"x")
    for _ in range(rng.randrange(1, 5)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


def splice(rng, content):
    """Replace a piece by something of another type."""
    start = rng.randrange(len(content) + 1)
    return content[:start] + rng.choice(WORDS) + content[start + rng.randrange(12) :]


def retype(rng, content):
    """Replace a value of JSON by something of another type."""
    places = [i for i in range(len(content)) if content[i : i + 1] == b":"]
    if not places:
        return splice(rng, content)
    start = rng.choice(places) + 1
    end = min(
        (place for place in (content.find(mark, start) for mark in (b",", b"}", b"\n")) if place >= 0),
        default=len(content),
    )
    return content[:start] + rng.choice(WORDS) + content[end:]


CHANGES = (
    flip,
    flip,
    splice,
    retype,
    retype,
    retype,
    lambda rng, content: content[: rng.randrange(len(content) + 1)],
    lambda rng, content: b"",
    lambda rng, content: content * 2,
    lambda rng, content: rng.choice(WORDS),
    lambda rng, content: rng.randbytes(2000),
    lambda rng, content: content[:4] + b"\xc6" + content[5:],  # the version that a zip archive needs
    lambda rng, content: (1 << 62).to_bytes(8, "little") + content[8:],  # the header's length in safetensors
)


def mutate(rng, folder):
    """Damage one or two files of a run."""
    for _ in range(rng.randrange(1, 3)):
        path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()))
        kind = rng.randrange(len(CHANGES) + 4)
        if kind < len(CHANGES):
            path.write_bytes(CHANGES[kind](rng, path.read_bytes()))
            continue
        path.unlink()
        if kind == len(CHANGES):
            path.mkdir()
        elif kind == len(CHANGES) + 1:
            os.mkfifo(path)
        elif kind == len(CHANGES) + 2:
            path.symlink_to("/nowhere")


def state_of(folder):
    """Every name and content below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def view(folder):
    index = load_all(folder)
    for number in range(index.groups):
        ref = index.locate_group(number)
        ref.read_group()
        str(ref.key)
    return index.refresh()


def journal(folder):
    return Journal(folder).current("g1"), Journal(folder).rubrics()


def attach(folder):
    run = Run.attach(folder)
    return repr(run.refresh()), run.status, run.groups, run.history


READERS = {
    "view": view,
    "report": lambda folder: report(folder, folder.parent / "report.html"),
    "attach": attach,
    "journal": journal,
    "frozen": static_run,
    "history": lambda folder: RunStore(folder).history(),
    "events": lambda folder: [*RunStore(folder).events()],
    "state": lambda folder: (RunStore(folder).read_state(), RunStore(folder).read_own_state("_pipeline_trainer")),
    "model": lambda folder: RunStore(folder).read_model(),
    "saved": lambda folder: RunStore(folder).steps_saved(),
    "groups": lambda folder: [RunStore(folder).read_groups("train", 1), RunStore(folder).read_groups("train", 2)],
    "records": lambda folder: [read_record(RunStore(folder), step) for step in (1, 2)],
}


@pytest.fixture(scope="module")
async def run_folder(tmp_path_factory, tiny_model_dir):
    def named():
        return art.TrainableModel(name="ttt", project="tests", base_model=str(tiny_model_dir))

    return await make_run(named, tmp_path_factory.mktemp("whole"))


@pytest.mark.timeout(count(7200, 300))
async def test_mutated_runs_are_opened(run_folder, tmp_path):
    """No raw exception, nothing changed by opening."""
    raw = []
    for seed in range(count(700, 10)):
        folder = tmp_path / str(seed) / "ttt"
        shutil.copytree(run_folder, folder)
        mutate(random.Random(seed), folder)
        before = state_of(folder)
        for name, read in READERS.items():
            try:
                read(folder)
            except ArtError:
                pass
            except Exception as error:  # what must not come out
                raw.append((seed, name, f"{type(error).__name__}: {error}"[:150]))
        assert state_of(folder) == before, seed
        shutil.rmtree(folder.parent)
    assert not raw


@pytest.mark.timeout(count(7200, 300))
async def test_mutated_runs_are_resumed(run_folder, tmp_path, named):
    """Registered again, a damaged run trains on, or an error says what is damaged. No adapter is lost."""
    raw = []
    for seed in range(10_000, 10_000 + count(100, 3)):
        folder = tmp_path / str(seed) / "tests" / "models" / "ttt"
        shutil.copytree(run_folder, folder)
        mutate(random.Random(seed), folder)
        contents = {content for name, content in state_of(folder).items() if name.endswith("adapter_model.safetensors")}
        model = named()
        try:
            async with art.LocalBackend(path=tmp_path / str(seed), verbose=False) as backend:
                await model.register(backend)
                result = await backend.train(model, [await a_group(model, 3)], learning_rate=1e-3)
                await model.log(metrics=result.metrics, split="train", step=result.step)
        except ArtError:
            pass
        except Exception as error:  # what must not come out
            raw.append((seed, f"{type(error).__name__}: {error}"[:150]))
        assert contents <= {*state_of(folder).values()}, seed
        shutil.rmtree(tmp_path / str(seed))
    assert not raw


@pytest.mark.parametrize(
    "field",
    [
        {"role": "a\ud800b"},
        {"role": "tool", "tool_call_id": "a\ud800b"},
        {"role": "tool", "tool_call_id": 3},
        {"name": "a\ud800b"},
        {"a\ud800b": 1},
        {"content": 3},
        {"tool_calls": [{"id": "\ud800", "type": "function", "function": {"name": "\ud800", "arguments": "\ud800"}}]},
    ],
)
def test_odd_fields_of_messages_are_stored(tmp_path, field):
    check_stored(tmp_path, art.Trajectory(messages_and_choices=[{"role": "user", "content": "x"} | field], reward=1))


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"\ud800": "\ud800"}},
        {"metrics": {"\ud800": 1.0}},
        {"logs": ["\ud800"]},
        {"tools": [{"type": "function", "function": {"name": "\ud800", "parameters": {"\ud800": "\ud800"}}}]},
    ],
)
def test_odd_fields_of_trajectories_are_stored(tmp_path, fields):
    said = [{"role": "user", "content": "x"}, make_choice(random.Random(1))[0]]
    check_stored(tmp_path, art.Trajectory(messages_and_choices=said, reward=1, **fields))


def test_deep_metadata_is_stored(tmp_path):
    value = 1
    for _ in range(800):
        value = [value]
    check_stored(
        tmp_path,
        art.Trajectory(messages_and_choices=[{"role": "user", "content": "x"}], reward=1, metadata={"deep": value}),
    )


def check_stored(folder, trajectory):
    store = RunStore(folder)
    store.write_model({"name": "a\ud800b"})
    store.write_groups("train", 1, [art.TrajectoryGroup([trajectory])])
    assert len(store.read_groups("train", 1)[0]) == 1
    assert not load_all(folder).lost
    report(folder, folder / "report.html")
