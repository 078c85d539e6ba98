"""TRL's GRPOTrainer with our rows and our rollouts (`make test-export`)."""

import os

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

import art_nb as art
from art_nb.learners.base import Learner, step_rows
from art_nb.learners.settings import StepConfig
from art_nb.models.weights import adapter_directory, adapter_shape, base_name
from art_nb.policy.adapter_files import read_matching_adapter
from art_nb.policy.loading import load_policy
from art_nb.tokens.rows import group_rows

trl = pytest.importorskip("trl", reason="make test-export installs the packages")
datasets = pytest.importorskip("datasets")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LORA = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)


async def talk(model, scenario):
    """Two turns with a message of the environment between them."""
    messages = list(scenario)
    for text in ("go on", None):
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=_dicts(messages), max_tokens=6, logprobs=True
        )
        messages.append(completion.choices[0])
        messages += [{"role": "user", "content": text}] if text else []
    words = "".join(message["content"] or "" for message in art.Trajectory(messages_and_choices=messages).messages())
    return art.Trajectory(messages_and_choices=messages, reward=sum(map(str.islower, words)) / len(words))


def _dicts(entries):
    return art.Trajectory(messages_and_choices=entries).messages()


def trainer_of(folder, tmp_path, rollouts, reward, adapter=True, **options):
    """A GRPOTrainer on the CPU, in fp32."""
    prompts = [[{"role": "user", "content": text}] for text in ("red", "a dog", "9 + 1", "hello there")]
    settings = dict(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
        num_generations=4,
        max_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=reward,
        args=trl.GRPOConfig(**settings | options),
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA) if adapter else None,
        rollout_func=rollouts,
    )


@pytest.mark.parametrize("adapter", [True, False], ids=["adapter", "whole model"])
def test_two_steps_with_our_rollouts(tiny_model_dir, tmp_path, adapter):
    rollouts, calls = art.trl.rollout_func(talk), []

    def recorded(prompts, trainer):
        columns = rollouts(prompts, trainer)
        model = trainer.accelerator.unwrap_model(trainer.model)
        calls.append((columns, worst_difference(model, columns)))
        return columns

    trainer = trainer_of(tiny_model_dir, tmp_path, recorded, art.trl.reward_func, adapter)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    rollouts.close()
    assert trainer.state.global_step == 2 and len(calls) == 2
    assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters() if name in before)
    for columns, difference in calls:
        assert len(columns["prompt_ids"]) == 4 and len(set(columns["reward"])) > 1
        assert all(0 < sum(mask) < len(mask) for mask in columns["env_mask"])  # the second user message is not trained
        assert difference < 1e-4  # sampled with the weights that the trainer has at this step
    logged = [row for row in trainer.state.log_history if "reward" in row]
    assert logged[0]["reward"] == pytest.approx(np.mean(calls[0][0]["reward"]), abs=1e-6)


def worst_difference(model, columns):
    """The largest difference between the sampler's logprobs and those of the trainer's model."""
    worst = 0.0
    for prompt, completion, logprobs, mask in zip(
        *(columns[k] for k in ("prompt_ids", "completion_ids", "logprobs", "env_mask"))
    ):
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            table = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = table.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        worst = max(worst, float(((expected - torch.tensor(logprobs)) * torch.tensor(mask)).abs().max()))
    return worst


@pytest.fixture(scope="module")
async def group(tiny_model_dir, tmp_path_factory):
    """A group of our sampler in fp32, at step 0."""
    model = art.TrainableModel(name="trl-rows", project="p", base_model=str(tiny_model_dir))
    backend = art.LocalBackend(path=str(tmp_path_factory.mktemp("group") / ".art"), dtype="float32")
    await model.register(backend)
    group = await art.TrajectoryGroup(talk(model, [{"role": "user", "content": "red"}]) for _ in range(4))
    await backend.close()
    return group


LENGTH = 64  # the constant of Dr. GRPO, in tokens
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
LOSSES = {  # settings of TRL, and ours
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.1}, {"loss": "cispo", "loss_options": {"is_max": 1.1}}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"loss": "dapo"}),
    "bnpo": ({"loss_type": "bnpo"}, {"loss": "grpo"}),
    "grpo": ({"loss_type": "grpo"}, {"loss": "grpo", "reduction": "sequence"}),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "max_completion_length": LENGTH},
        {"loss": "dr_grpo", "reduction": "constant", "max_tokens": LENGTH},
    ),
    "gspo": ({"loss_type": "grpo", **SEQUENCE}, {"loss": "gspo", "reduction": "sequence"}),
}


CASES = [(name, 0.3) for name in LOSSES] + [("cispo", 0.0)]  # without noise, the other losses are 0


@pytest.mark.parametrize(("name", "noise"), CASES)
def test_the_loss_on_our_rows_is_ours(group, tiny_model_dir, tmp_path, name, noise):
    """With noise, the sampler's logprobs are those of another policy, and ratios are clipped."""
    theirs, ours = LOSSES[name]
    rows, shifted = group.to_trl(), group_rows(group)
    for row in shifted:
        row.logprobs += np.random.default_rng(len(row.tokens)).normal(0, noise, len(row.tokens)).astype(np.float32)
    losses = []

    def given(prompts, trainer):
        names = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "advantage")
        return {name: [row[name] for row in rows] for name in names}

    def compute(model, inputs):
        old = np.zeros(tuple(inputs["completion_ids"].shape), np.float32)
        for i, (ids, mask) in enumerate(zip(inputs["completion_ids"], inputs["completion_mask"], strict=True)):
            place = [row["completion_ids"] for row in rows].index(ids[mask.bool()].tolist())  # TRL shuffles the rows
            values = shifted[place].logprobs[len(rows[place]["prompt_ids"]) :]
            old[i, : len(values)] = np.nan_to_num(values)
        losses.append(original(model, inputs | {"old_per_token_logps": torch.tensor(old)}))
        return losses[-1]

    settings = {"max_steps": 1, "scale_rewards": "none"} | theirs
    trainer = trainer_of(tiny_model_dir, tmp_path, given, lambda advantage, **_: advantage, **settings)
    original, trainer._compute_loss = trainer._compute_loss, compute
    trainer.train()

    policy = load_policy(tiny_model_dir, dtype=torch.float32, rank=4, alpha=8, targets=tuple(LORA["target_modules"]))
    config = StepConfig(learning_rate=1e-3, **ours)
    value = Learner(policy).step(step_rows([[t.reward for t in group]], [shifted], config), config)["loss/train"]
    print(f"| {name} | {noise} | {losses[0].item():.8f} | {value:.8f} | {abs(losses[0].item() - value):.1e} |")
    assert abs(value) > 1e-3 and losses[0].item() == pytest.approx(value, rel=1e-4)


def test_adapters_of_trl_are_base_models(tiny_model_dir, tmp_path):
    rollouts = art.trl.rollout_func(talk)
    trainer = trainer_of(tiny_model_dir, tmp_path, rollouts, art.trl.reward_func)
    trainer.train()
    rollouts.close()
    trainer.save_model(str(tmp_path / "saved"))
    folder = adapter_directory(tmp_path / "saved")
    assert folder is not None and base_name(folder) == str(tiny_model_dir)
    policy = load_policy(tiny_model_dir, dtype=torch.float32, **adapter_shape(folder))
    assert len(read_matching_adapter(folder, policy)) == 2 * 3 * 2
