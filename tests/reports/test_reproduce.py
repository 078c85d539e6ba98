"""`run.reproduce()` writes a notebook that repeats a run: executed in a new kernel, it gives the same rewards."""

import json

import nbformat
import pytest
from support.jupyter_kernels import run_notebook

import art_nb as art
from art_nb.core.types import StoreError
from art_nb.reports.reproduce import calls_to_repeat, reproduce
from art_nb.runs.sessions import write_session
from art_nb.runs.store import RunStore

TASK = """
import art_nb as art

WORDS = ["free", "and now"]
scenarios = [f"{WORDS[n % 2]}: {n}" for n in range(5)]


def score(choice):
    return float(sum(choice.model_extra["token_ids"]) % 11)


async def rollout(model, scenario):
    "The model continues a line."
    messages = [{"role": "user", "content": scenario}]
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=6, logprobs=True)
    return art.Trajectory(messages_and_choices=[*messages, reply.choices[0]], reward=score(reply.choices[0]))
"""
TRAIN = """
import torch

torch.set_num_threads(1)
model = art.TrainableModel(name="first", project="tests", base_model={base!r}, lora_config={{"rank": 4}})
await model.register(art.LocalBackend(verbose=False, max_running=8))
run = art.train(model, rollout, scenarios, steps=2, groups_per_step=2, rollouts_per_group=4, seed=7,
                learning_rate=1e-2, show=False)
await run
run.reproduce("again.ipynb")
"""


@pytest.mark.slow
def test_the_notebook_gives_the_same_rewards(tiny_model_dir, tmp_path):
    cells = [TASK, "unrelated = open('missing') if False else 1", TRAIN.format(base=str(tiny_model_dir))]
    first = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    run_notebook(first, tmp_path)
    again = nbformat.read(tmp_path / "again.ipynb", as_version=4)
    nbformat.validate(again)
    code = "\n".join(cell.source for cell in again.cells)
    assert "unrelated" not in code
    assert "torch.set_num_threads(1)" in code
    assert "LocalBackend(max_running=8" in code
    run_notebook(again, tmp_path)
    said = "".join(output.get("text", "") for cell in again.cells for output in cell.get("outputs", []))
    assert "All versions are the same." in said
    assert "All rewards are equal (2 steps)." in said
    assert "differ" not in said.replace("Versions differ", "")
    rows = [RunStore(tmp_path / ".art/tests/models" / name).history() for name in ("first", "first-reproduced")]
    rewards = [[row["train/reward"] for row in history] for history in rows]
    assert rewards[0] == rewards[1]
    assert len({*rewards[0]}) == 2, "the steps differ, so equal rewards mean something"


def a_run(folder, sessions, steps=6):
    store = RunStore(folder / "agent")
    store.write_model({"name": "agent", "project": "demo", "base_model": "smollm2-135m"})
    for session in sessions:
        write_session(store, session)
    for step in range(1, steps + 1):
        store.append_history({"step": step, "train/reward": 0.5})
    return store


def text_of(path):
    return "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])


def test_a_file_is_never_replaced(tmp_path):
    store = a_run(tmp_path, [{"call": "art.train", "step": 0, "options": {"steps": 6}}])
    path = reproduce(store, tmp_path / "again.ipynb")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="already exists"):
        reproduce(store, path)
    assert path.read_bytes() == before


def test_a_run_without_sessions_cannot_be_repeated(tmp_path):
    with pytest.raises(StoreError, match="no recorded session"):
        reproduce(a_run(tmp_path, []), tmp_path / "again.ipynb")


def test_sessions_with_other_options_are_calls_of_their_own(tmp_path):
    def session(step, **options):
        return {"call": "art.train", "step": step, "options": options}

    rates = [session(0, steps=9, learning_rate=1), session(2, steps=9, learning_rate=1), session(4, learning_rate=2)]
    calls = calls_to_repeat([*rates, session(6, learning_rate=3)], 6)
    assert [call["options"] for call in calls] == [
        {"steps": 4, "learning_rate": 1},
        {"steps": 6, "learning_rate": 2},
    ], "the last one has no finished step"


def test_what_is_missing_is_named(tmp_path):
    program = {"code": 'KEY = "[redacted]"', "names": {"scenarios": "scenarios"}, "undefined": ["rollout", "helper"]}
    tuning = {"call": "model.train_sft", "step": 0, "options": {"learning_rate": 1e-3}}
    training = {"call": "art.train", "step": 1, "options": {"steps": 6}, "program": program}
    text = text_of(reproduce(a_run(tmp_path, [tuning, training]), tmp_path / "again.ipynb"))
    for part in (
        "# Not recorded: rollout, helper.",
        "await model.train_sft(trajectories, art.TrainSFTConfig(learning_rate=0.001))",
        "no `seed`",
        "Insert them again",
        "art.train(model, rollout, scenarios, steps=6)",
    ):
        assert part in text, part


def test_a_run_has_the_method():
    art.Run  # noqa: B018
    assert art.Run.reproduce is reproduce
