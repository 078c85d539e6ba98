"""The real training loop of TRL's GRPOTrainer. It waits for a request before each step and reports its duration.

The hook `rollout_func` supplies multi-turn rollouts: one row per trajectory, with the tokens between two replies
masked. Each turn uses TRL's generation without vLLM (`generate` of transformers over the batch). If a request contains
`given` rows, nothing is generated, and the step trains on these rows."""

import tempfile
import time

import torch
from datasets import Dataset
from peft import LoraConfig
from shapes import between, opening, rows
from talk import Talk, peak_mb
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def config(groups: int, size: int, new: int, micro: int, checkpointing: bool) -> GRPOConfig:
    """Return the configuration. Settings that are not needed for the comparison have TRL's defaults."""
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        model_init_kwargs={"dtype": "bfloat16"},
        gradient_checkpointing=checkpointing,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=groups * size // micro,
        num_generations=size,
        max_completion_length=new,
        generation_kwargs={"min_new_tokens": new},
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        max_steps=10**6,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


class Loop(TrainerCallback):
    """A callback that pauses the training loop between two requests and measures its parts."""

    def __init__(self, talk: Talk):
        self.talk, self.request, self.spent, self.counts, self.trainer = talk, {}, {}, {}, None

    def watch(self, trainer: GRPOTrainer) -> None:
        """Measure generation and training of the trainer."""
        self.trainer = trainer
        trainer._generate_and_score_completions = self._timed("generate", trainer._generate_and_score_completions)
        trainer.training_step = self._timed("train", trainer.training_step)

    def _timed(self, name: str, function):
        def call(*args, **kwargs):
            start = time.perf_counter()
            result = function(*args, **kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - start
            return result

        return call

    def on_step_begin(self, args, state, control, **_):
        self.request = self.talk.receive()
        if self.request is None:
            raise SystemExit
        self.spent, self.start = {}, time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        seconds = time.perf_counter() - self.start
        train = self.spent["train"] - self.spent["generate"]  # training_step includes the generation
        self.talk.reply(
            seconds=seconds,
            generate_seconds=self.spent["generate"],
            train_seconds=train,
            peak_mb=peak_mb(),
            **self.counts,
        )

    def rollouts(self, prompts: list[str], trainer: GRPOTrainer) -> dict:
        """Return rollouts to TRL; this is its `rollout_func`."""
        request = self.request
        result = (
            self._given(**request["given"]) if "given" in request else self._played(len(prompts), **request["play"])
        )
        total_tokens = sum(map(len, result["prompt_ids"])) + sum(map(len, result["completion_ids"]))
        self.counts = {
            "tokens": total_tokens,
            "trained": sum(map(sum, result["env_mask"])),
            "rows": len(result["prompt_ids"]),
        }
        return result | {"logprobs": None}

    @staticmethod
    def _given(**shape) -> dict:
        token_rows = rows(**shape)
        return {
            "prompt_ids": [row["tokens"][: shape["prompt"]] for row in token_rows],
            "completion_ids": [row["tokens"][shape["prompt"] :] for row in token_rows],
            "env_mask": [list(map(int, row["sampled"][shape["prompt"] :])) for row in token_rows],
        }

    def _played(self, n: int, size: int, prompt: int, turns: int, gap: int, seed: int) -> dict:
        first = [self._ids(opening(seed + i // size, prompt)) for i in range(n)]
        completions, mask = [[] for _ in first], [[] for _ in first]
        for turn in range(turns):
            replies, _ = self.trainer._generate_single_turn([p + s for p, s in zip(first, completions)], None, {}, size)
            for i, reply in enumerate(replies):
                gap_ids = [] if turn == turns - 1 else self._gap(between(seed + 1000 * turn + i, gap))
                completions[i] += reply + gap_ids
                mask[i] += [1] * len(reply) + [0] * len(gap_ids)
        return {"prompt_ids": first, "completion_ids": completions, "env_mask": mask}

    def _ids(self, messages: list[dict]) -> list[int]:
        tokenizer = self.trainer.processing_class
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def _gap(self, message: dict) -> list[int]:
        """Return the tokens that the chat template adds between two replies."""
        empty = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
        tokenizer = self.trainer.processing_class
        before = tokenizer.apply_chat_template(empty, return_dict=False)
        return self._ids([*empty, message])[len(before) - 2 :]  # the reply has no <|im_end|> and newline of its own


def main() -> None:
    talk = Talk()
    request, loop = talk.receive(), Loop(talk)
    trainer = GRPOTrainer(
        model=request["model"],
        reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        args=config(request["groups"], request["size"], request["new"], request["micro"], request["checkpointing"]),
        train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(request["groups"])]),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
        rollout_func=loop.rollouts,
    )
    loop.watch(trainer)
    trainer.add_callback(loop)
    talk.reply(threads=torch.get_num_threads())
    trainer.train()


if __name__ == "__main__":
    main()
