"""A run directory as a training leaves it, written from its events, and a run of the tiny model without a loop."""

import asyncio
import math
import random
import threading
import time

import art_nb as art
from art_nb.core.events import (
    AdapterServed,
    Failed,
    GradientStep,
    GroupDone,
    Judged,
    RolloutDone,
    RolloutStarted,
    SignalReport,
    StepDone,
)
from art_nb.runs.store import RunStore
from art_nb.training.heartbeat import write_run_record

GROUPS, ROLLOUTS, BATCHES = 8, 8, 9


class Script:
    """Writes a run as it would have gone, event by event."""

    def __init__(self, path, steps=40, ago_s=None, name="ttt-001", scenario="{{'seed': {}, 'opponent': 'random'}}"):
        self.store, self.steps, self.name, self.scenario = RunStore(path), steps, name, scenario
        self.dice, self.step, self.now = random.Random(0), 0, time.time() - (ago_s or 0)
        self.store.write_model({"name": name})
        self.record("running")

    def record(self, status):
        write_run_record(
            self.store,
            name=self.name,
            status=status,
            step=self.step,
            steps=self.steps,
            groups=GROUPS,
            rollouts=GROUPS * ROLLOUTS,
        )

    def emit(self, seconds, event):
        self.now += seconds
        event.time = self.now
        self.store.append_event(event)

    def rollouts(self, groups=GROUPS):
        """The rollouts of a step; with fewer groups it stops in the middle."""
        k, skill = self.step, 1 / (1 + math.exp(-(self.step - 10) / 5))
        for g in range(GROUPS):
            for r in range(ROLLOUTS):
                self.emit(
                    0,
                    RolloutStarted(
                        rollout=f"{k}-{g}-{r}",
                        group=f"g{k}-{g}",
                        step=k + 1,
                        scenario=self.scenario.format(k * GROUPS + g),
                    ),
                )
        for g in range(groups):
            flat = self.dice.random() < 0.1 + 0.4 * k / self.steps
            rewards = [1.0] * ROLLOUTS if flat else [float(self.dice.random() < skill) for _ in range(ROLLOUTS)]
            for r, reward in enumerate(rewards):
                self.emit(
                    0.6,
                    RolloutDone(
                        rollout=f"{k}-{g}-{r}",
                        group=f"g{k}-{g}",
                        step=k + 1,
                        reward=reward,
                        metrics={"completion_tokens": 30},
                    ),
                )
            self.emit(
                0, GroupDone(group=f"g{k}-{g}", step=k + 1, rewards=rewards, exceptions=int(g == 3 and k % 4 == 0))
            )
            self.emit(0.2, Judged(group=f"g{k}-{g}", judge="rule", scores=rewards, cost=0.0012))

    def training(self, batches=BATCHES):
        self.emit(1, SignalReport(step=self.step + 1, groups=GROUPS, trainable_groups=GROUPS - 1))
        for n in range(batches):
            self.emit(2, GradientStep(step=self.step + 1, micro_batch=n + 1, micro_batches=BATCHES, tokens=560))

    def row(self):
        k = self.step
        return {
            "train/reward": 0.2 + 0.7 / (1 + math.exp(-(k - 10) / 5)) + self.dice.gauss(0, 0.03),
            "train/reward_std_dev": 0.4 * math.exp(-k / 25),
            "loss/entropy": 0.35 * math.exp(-k / 14) + 0.06,
            "loss/grad_norm": abs(self.dice.gauss(0.4, 0.1)),
            "train/completion_tokens": 32 - k * 0.2 + self.dice.gauss(0, 1),
            "train/truncated": max(0.0, self.dice.gauss(0.05, 0.03)),
            "train/exception_rate": 0.0,
            "offpolicy/kl_sampler": abs(self.dice.gauss(0.002, 0.001)),
            "offpolicy/logprob_diff_mean": 0.01,
            "data/step_num_groups_submitted": GROUPS,
            "data/step_num_groups_trainable": max(2, GROUPS - k // 6),
            "data/step_num_trajectories": GROUPS * ROLLOUTS,
            "data/step_trainer_tokens": 5040,
            "time/step_wall_s": 62 + self.dice.gauss(0, 4),
            "time/step_rollout_s": 40,
            "time/step_backend_train_s": 20,
        }

    def done(self, **numbers):
        """The end of a step."""
        self.step += 1
        row = self.row() | {"step": self.step} | numbers
        self.emit(0.7, AdapterServed(step=self.step, name=self.name))
        self.store.append_history(row)
        self.emit(0.5, StepDone(step=self.step, metrics=row))
        self.record("running")

    def whole(self, steps):
        """Some steps from beginning to end."""
        for _ in range(steps):
            self.rollouts()
            self.training()
            self.done()
        return self

    def fail(self, message="RuntimeError: out of memory", traceback="Traceback (most recent call last):\n  boom"):
        self.emit(0.1, Failed(where=f"step {self.step}", message=message, traceback=traceback))
        self.record("failed")


async def say(model, scenario):
    """One short reply; what it is worth hangs on its first token."""
    messages = [{"role": "user", "content": f"free: {scenario}"}]
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=4, logprobs=True
    )
    choice = reply.choices[0]
    reward = choice.model_extra["token_ids"][0] % 7
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=reward)


class Home:
    """A registered tiny model, for tests that have no event loop of their own."""

    def __init__(self, directory, path, name="tiny"):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.model = art.TrainableModel(name=name, project="tests", base_model=str(directory))
        self.backend = art.LocalBackend(path=path, verbose=False)
        self.wait(self.model.register(self.backend))

    def wait(self, work, timeout_s=60):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def train(self, rollout=say, **options):
        options = {"steps": 100_000, "groups_per_step": 2, "rollouts_per_group": 4, "show": False} | options
        return art.train(self.model, rollout, range(9), **options)

    def close(self):
        self.wait(self.backend.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
