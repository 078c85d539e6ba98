"""Run directories that openpipe-art wrote open and go on here, and ours open there (`make test-art`)."""

import json
from importlib.util import find_spec

import pytest

if find_spec("art") is None:  # not imported here: it patches transformers
    pytest.skip("openpipe-art is not in this environment: make test-art", allow_module_level=True)

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.art_parts import ask_art, told_groups
from transformers import AutoModelForCausalLM

import art_nb as art
from art_nb.policy import adapter_files
from art_nb.policy.adapters import load_adapter
from art_nb.policy.loading import load_policy
from art_nb.policy.lora import TARGETS, sequence_logprobs
from art_nb.runs.migrate import migrate
from art_nb.runs.readers import read_groups
from art_nb.runs.store import open_run
from art_nb.views.index import load_all, select

CALL = {"id": "c1", "type": "function", "function": {"name": "move", "arguments": '{"to": "B2"}'}}
TOOL = {"type": "function", "function": {"name": "move", "parameters": {"type": "object", "properties": {}}}}
FURTHER = {"messages_and_choices": [{"role": "user", "content": "sum up"}, {"role": "assistant", "content": "won"}]}


def reply(content, calls=None):
    message = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
    return {"finish_reason": "tool_calls" if calls else "stop", "index": 0, "message": message, "logprobs": None}


def a_trajectory(reward, said="zum Beispiel: grüß 🙂", **more):
    entries = [
        {"role": "system", "content": "Spiel."},
        {"role": "user", "content": "日本"},
        reply("", [CALL]),
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        reply(said),
    ]
    return {
        "messages_and_choices": entries,
        "reward": reward,
        "metrics": {"won": reward, "moves": 3.0},
        "metadata": {"scenario_id": "s1", "seed": 7, "easy": True},
        "logs": ["ein Zug: ü"],
        "tools": [TOOL],
    } | more


GROUPS = [
    {
        "trajectories": [a_trajectory(1.0), a_trajectory(0.0, "nein", additional_histories=[FURTHER])],
        "exceptions": ["the server is gone"],
        "metadata": {"board": "3×3"},
        "metrics": {"ruler": 0.5},
        "logs": ["judged"],
    },
    {"trajectories": []},
    {"trajectories": [a_trajectory(-0.25, '"quoted"\n\ttabs')]},
]
REWARDS = [1.0, 0.0, -0.25]


def facts(groups):
    return [(t.reward, t.messages(), t.metrics, t.metadata, t.logs, t.tools) for group in groups for t in group]


@pytest.fixture(scope="module")
def arts(tmp_path_factory, tiny_model_dir):
    """The directory of a run of ART's, with a checkpoint as PEFT writes it."""
    folder = tmp_path_factory.mktemp("arts")
    told_groups(folder, GROUPS)
    told = {"name": "agent", "project": "p", "base_model": str(tiny_model_dir), "report_metrics": []}
    (folder / "model.json").write_text(json.dumps(told))
    ask_art("written", folder)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model_dir),
        LoraConfig(r=8, lora_alpha=16, target_modules=list(TARGETS), init_lora_weights=False, task_type="CAUSAL_LM"),
    )
    model.save_pretrained(folder / ".art/p/models/agent/checkpoints/0002")
    return folder / ".art"


def test_a_run_of_arts_opens_in_the_viewer(arts):
    path = arts / "p/models/agent"
    store = open_run(path)
    assert store.read_model()["base_model"]
    assert store.read_state()["scenario"] == 7
    assert (store.splits(), store.steps("train"), store.steps("val")) == (["train", "val"], [1, 2], [2, 3])
    assert [row["train/reward"] for row in store.history() if "train/reward" in row] == [pytest.approx(0.25)] * 2
    assert store.read_groups("val", 3) == []
    groups = read_groups(path)[1]  # what ART's columns hold: no failed rollout, no empty group, one history
    first = groups[0]
    assert [len(group) for group in groups] == [2, 1]
    assert (first.metadata, first.metrics, first.logs) == ({"board": "3×3"}, {"ruler": 0.5}, ["judged"])
    assert [t.reward for group in groups for t in group] == REWARDS
    trajectory = first.trajectories[0]
    assert trajectory.messages()[2] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert trajectory.messages()[3]["tool_call_id"] == "c1"
    assert trajectory.metrics == {"won": 1.0, "moves": 3.0}
    assert (trajectory.logs, trajectory.tools) == (["ein Zug: ü"], [TOOL])
    assert trajectory.metadata == {"scenario_id": "s1", "seed": 7, "easy": True}
    index = load_all(path)
    assert sorted(index.table["reward"].tolist()) == sorted(REWARDS * 3)
    assert len(select(index, "won=1 and step=2")) == 2
    assert "日本" in art.view(path).html()


def test_its_checkpoint_means_here_what_it_means_there(arts, tiny_model_dir):
    directory, tokens = arts / "p/models/agent/checkpoints/0002", [1, 9, 30, 77, 5, 12]
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model_dir), directory)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    policy = load_policy(tiny_model_dir, device="cpu", dtype=torch.float32)
    before = sequence_logprobs(policy, tokens)
    load_adapter(policy, adapter_files.read_matching_adapter(directory, policy))
    ours = sequence_logprobs(policy, tokens)
    torch.testing.assert_close(ours, expected[range(5), tokens[1:]], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(ours, before, atol=1e-2)


async def test_a_run_of_art_resumes(arts, tiny_model_dir):
    model = art.TrainableModel(name="agent", project="p", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path=arts, verbose=False) as backend:
        await model.register(backend)
        assert await model.get_step() == 2
        question = [{"role": "user", "content": "free: A1"}]
        ask = lambda seed: model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=question, max_tokens=6, logprobs=True, seed=seed
        )
        replies = [(await ask(seed)).choices[0] for seed in range(4)]
        group = art.TrajectoryGroup(
            [
                art.Trajectory(messages_and_choices=[*question, choice], reward=float(i % 2))
                for i, choice in enumerate(replies)
            ]
        )
        result = await backend.train(model, [group], learning_rate=1e-3, reduction="art")
        await model.log([group], split="train", step=result.step, metrics=result.metrics)
        assert result.step == 3
    store = open_run(arts / "p/models/agent")
    assert store.steps_saved() == [2, 3]
    assert adapter_files.read_training_json(store.checkpoint_dir(3))["parent"] == str(store.checkpoint_dir(2))
    assert {"train/reward", "loss/train"} <= store.history()[-1].keys()


async def test_ours_is_read_by_art(tiny_model_dir, tmp_path):
    (tmp_path / ".art").mkdir()
    model = art.TrainableModel(name="ours", project="p", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path=tmp_path / ".art", verbose=False) as backend:
        await model.register(backend)
        question = [{"role": "user", "content": "free: grüß 🙂"}]
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=question, max_tokens=6, logprobs=True, n=4
        )
        group = art.TrajectoryGroup(
            [
                art.Trajectory(
                    messages_and_choices=[*question, choice],
                    reward=i / 4,
                    metrics={"won": i / 2, "n": i},
                    metadata={"seed": i},
                    logs=["é"],
                )
                for i, choice in enumerate(completion.choices)
            ],
            metadata={"board": "3×3"},
            metrics={"ruler": 0.5},
            exceptions=[ValueError("gone")],
        )
        others = [
            art.TrajectoryGroup([art.Trajectory.model_validate(t) for t in told["trajectories"]]) for told in GROUPS
        ]
        result = await backend.train(model, [group], learning_rate=1e-3)
        await model.log([group, *others], split="train", step=result.step, metrics=result.metrics)
        await model.log([group], split="val", step=result.step)
    ask_art("read", tmp_path)
    told = json.loads((tmp_path / "read.json").read_text())
    assert told["step"] == 1
    for split in ("train", "val"):
        mine = [g for g in model.store.read_groups(split, 1) if len(g)]
        theirs = told["groups"][f"{split}/0001"]
        assert [g["metadata"] for g in theirs] == [g.metadata for g in mine]
        assert [g["metrics"] for g in theirs] == [g.metrics for g in mine]
        for ours, one in zip([t for g in mine for t in g], [t for g in theirs for t in g["trajectories"]], strict=True):
            assert (one["reward"], one["metrics"], one["metadata"], one["logs"]) == (
                ours.reward,
                ours.metrics,
                ours.metadata,
                ours.logs,
            )
            assert list(map(plain_message, one["messages_and_choices"])) == list(map(plain_message, ours.messages()))
        rows = [row for row in told["rows"] if row["split"] == split]
        assert sorted(row["reward"] for row in rows) == sorted(t.reward for g in mine for t in g)
        assert {row["metric_won"] for row in rows} == {t.metrics["won"] for g in mine for t in g}
        assert [m["trainable"] for m in rows[0]["messages"]][-1]


def plain_message(message):
    return {name: message.get(name) for name in ("role", "content", "tool_calls", "tool_call_id") if message.get(name)}


def test_arts_older_files_are_read_and_migrated(tmp_path):
    told_groups(tmp_path, GROUPS)
    ask_art("legacy", tmp_path)
    older, migrated = (tmp_path / ".art/p/models" / name for name in ("older", "migrated"))
    for step in (0, 1):
        groups = read_groups(older)[step]
        assert [len(group) for group in groups] == [2, 0, 1]
        assert [t.reward for group in groups for t in group] == REWARDS
        assert groups[0].trajectories[1].additional_histories[0].messages() == FURTHER["messages_and_choices"]
        assert groups[0].trajectories[0].tools == [TOOL]
    theirs = read_groups(migrated)[1]
    assert [fact[:2] for fact in facts(theirs)] == [fact[:2] for fact in facts(read_groups(older)[1])]
    assert theirs[0].trajectories[1].additional_histories[0].messages() == FURTHER["messages_and_choices"]
    held = lambda: [facts(groups) for split in ("train", "val") for groups in read_groups(older, split).values()]
    before = held()
    told = migrate(tmp_path / ".art", dry_run=True)
    assert told.files == 3 and not list(older.rglob("*.parquet"))
    done = migrate(tmp_path / ".art")
    assert (done.files, done.skipped) == (3, [])
    assert not [*older.rglob("*.jsonl"), *older.rglob("*.yaml")]
    assert held() == before
    assert migrate(tmp_path / ".art").files == 0
    (tmp_path / ".art/p/models/ours").mkdir()
    ask_art("read", tmp_path)
    rows = json.loads((tmp_path / "read.json").read_text())["rows"]
    of_step = [row for row in rows if (row["model"], row["split"], row["step"]) == ("older", "train", 1)]
    assert sorted(row["reward"] for row in of_step) == sorted(REWARDS)
