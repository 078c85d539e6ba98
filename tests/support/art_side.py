"""What openpipe-art itself does with files, run by an interpreter that has it: art_side.py TASK FOLDER."""

import asyncio
import importlib
import json
import sys
from pathlib import Path

import art
import numpy as np
import torch
import yaml
from openai.types.chat.chat_completion import Choice

SEED = 0


def entry(told):
    return Choice.model_validate(told) if "finish_reason" in told else told


def trajectory(told):
    histories = [
        art.trajectories.History(messages_and_choices=[*map(entry, h["messages_and_choices"])], tools=h.get("tools"))
        for h in told.get("additional_histories", [])
    ]
    return art.Trajectory(
        **told
        | {"messages_and_choices": [*map(entry, told["messages_and_choices"])], "additional_histories": histories}
    )


def group(told):
    failed = [ValueError(text) for text in told.get("exceptions", [])]
    more = {name: told.get(name) for name in ("metadata", "metrics", "logs")}
    return art.TrajectoryGroup([trajectory(one) for one in told["trajectories"]], exceptions=failed, **more)


def groups(folder):
    return [group(told) for told in json.loads((folder / "groups.json").read_text())]


def packed(folder, scale_rewards, balance):
    "The tensors on which ART's LocalBackend trains: a sequence a row."
    from art.preprocessing.pack import packed_tensors_from_tokenized_results
    from art.preprocessing.tokenize import tokenize_trajectory_groups
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    results = list(tokenize_trajectory_groups(tokenizer, groups(folder), False, scale_rewards))
    return packed_tensors_from_tokenized_results(
        results, 256, pad_token_id=0, truncate_long_results=False, advantage_balance=balance, pack_results=False
    )


def scored(inputs, case, new, reference, learner):
    "ART's loss of a batch, and its gradient by the new logprobs."
    from art.loss import loss_fn, shift_tensor

    new, inputs = new.clone().requires_grad_(), dict(inputs)
    old = shift_tensor(inputs["logprobs"], float("nan")).double()
    known = torch.where(old.isnan(), new.detach(), old)
    if case.pop("precalculated", False):
        own = torch.where(old.isnan(), new.detach(), learner)  # unknown to the sampler: as in the first step
        inputs |= {"original_logprobs": inputs["logprobs"], "logprobs": torch.nn.functional.pad(own[:, :-1], (1, 0))}
    if case.pop("kl_of_sample", False):  # ART measures the model
        reference = new.detach() - (known - reference)
    inputs["advantages"] = inputs["advantages"].clone()  # kimi_k2_tau is subtracted in place
    loss = loss_fn(inputs, new, reference if "kl_penalty_coef" in case else None, None, case)
    loss.policy_loss.backward()
    return loss.policy_loss.item(), new.grad


def parity(folder):
    "cases.json: [scale_rewards, balance, [options of the loss …]] each; the numbers of each into an npz."
    torch.manual_seed(SEED)
    for i, (scale, balance, cases) in enumerate(json.loads((folder / "cases.json").read_text())):
        inputs = packed(folder, scale, balance)
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        old = torch.nn.functional.pad(tensors["logprobs"][:, 1:], (0, 1), value=float("nan")).double()
        shape = old.shape
        new = torch.where(old.isnan(), -torch.rand(shape).double(), old) + 0.4 * torch.randn(shape).double()
        reference, learner = (new + 0.3 * torch.randn(shape).double() for _ in range(2))
        found = [scored(tensors, dict(case), new, reference, learner) for case in cases]
        names = ("tokens", "assistant_mask", "logprobs", "advantages", "weights")
        kept = {name: tensors[name].numpy() for name in names}
        np.savez(
            folder / f"case{i}.npz",
            **kept,
            new=new,
            reference=reference,
            learner=learner,
            losses=[loss for loss, _ in found],
            gradients=np.stack([gradient.numpy() for _, gradient in found]),
        )


def written(folder):
    "A run directory as ART's LocalBackend and `model.log` leave it."
    from art.local import LocalBackend

    async def run():
        told = json.loads((folder / "model.json").read_text())
        model = art.TrainableModel(**told)
        await art.Model.register(model, LocalBackend(path=str(folder / ".art")))
        for split, step in (("train", 1), ("train", 2), ("val", 2)):
            await model.log(groups(folder), split=split, step=step, metrics={"loss/train": 0.25})
        await model.log([], split="val", step=3)
        model.merge_state({"scenario": 7})

    asyncio.run(run())


def legacy(folder):
    "Trajectories as ART wrote them in 2025: JSON lines, before that YAML; and a copy that ART migrated itself."
    from art.utils.trajectory_migration import migrate_model_dir, serialize_trajectory_groups, trajectory_group_to_dict

    for name in ("older", "migrated"):
        where = folder / ".art" / "p" / "models" / name / "trajectories" / "train"
        where.mkdir(parents=True)
        (where / "0001.jsonl").write_text(serialize_trajectory_groups(groups(folder)))
        (where.parent / "val").mkdir()
        if name == "older":
            (where / "0000.yaml").write_text(yaml.dump([trajectory_group_to_dict(one) for one in groups(folder)]))
            (where.parent / "val" / "0001.jsonl").write_text(serialize_trajectory_groups(groups(folder)[:1]))
        else:
            told = migrate_model_dir(where.parents[1])
            assert told.files_migrated == 1 and not told.errors


def read(folder):
    "What ART's own readers find in .art: rows of `load_trajectories`, groups of its Parquet reader."
    root = importlib.import_module("art.utils.get_repo_root_path")
    root.get_repo_root_path = lambda: str(folder)  # where the loader makes a directory for its cache
    from art.utils.benchmarking.load_trajectories import load_trajectories
    from art.utils.get_model_step import get_step_from_dir
    from art.utils.trajectory_logging import read_trajectory_groups_parquet

    table = asyncio.run(load_trajectories("p", art_path=str(folder / ".art")))
    run = folder / ".art" / "p" / "models" / "ours"
    files = sorted(run.glob("trajectories/*/*.parquet"))
    found = {
        f"{file.parent.name}/{file.stem}": [one.model_dump(mode="json") for one in read_trajectory_groups_parquet(file)]
        for file in files
    }
    told = {"rows": table.to_dicts(), "groups": found, "step": get_step_from_dir(str(run))}
    (folder / "read.json").write_text(json.dumps(told, default=str))


if __name__ == "__main__":
    {"parity": parity, "written": written, "legacy": legacy, "read": read}[sys.argv[1]](Path(sys.argv[2]))
