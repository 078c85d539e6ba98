"""A judge that says what it is told, and groups for it to judge."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from support.view_parts import games

import art_nb as art
from art_nb.panels.judging_panel import JudgingPanel, judge
from art_nb.rewards.llm_judges import JudgeReply
from art_nb.rewards.rubrics import Verdict

SCORES = (0.9, 0.7, 0.5, 0.1, 0.3, 0.6)
QUESTION = {"role": "user", "content": "The capital of France?"}


class Says:
    """A judge with a score for each rollout, by its number; None says nothing of it."""

    lasting = False

    def __init__(self, name="strict", scores=SCORES, lean=0.0, cost=0.002):
        self.name, self.scores, self.lean, self.cost, self.rubrics = name, scores, lean, cost, []

    async def judge(self, question, repeat=0):
        self.rubrics.append(question.rubric)
        return JudgeReply([self._verdict(place, t) for place, t in enumerate(question.trajectories)], self.cost, 600)

    def _verdict(self, place, trajectory):
        number = trajectory.metadata["number"]
        score = self.scores[number]
        if score is None:
            return Verdict(problem="the judge gave no score")
        return Verdict(min(1.0, max(0.0, score - self.lean * place)), f"{self.name} of {number}")


def answers(*texts, rewards=(), **metadata):
    """A group of one-line answers."""
    said = [[QUESTION, {"role": "assistant", "content": text}] for text in texts]
    made = [
        art.Trajectory(messages_and_choices=one, metadata={"number": i}, reward=rewards[i] if rewards else 0.0)
        for i, one in enumerate(said)
    ]
    return art.TrajectoryGroup(made, metadata=metadata or {"scenario_id": "capitals"})


def numbered(count=6, seed=7):
    """A group of games whose rollouts know their number."""
    group = games(seed, count, tools=True)
    for i, trajectory in enumerate(group):
        trajectory.metadata["number"] = i
    return group


def now(coroutine):
    """Run a coroutine in a thread of its own: a browser's loop lives in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def judged(folder, group=None, by=None, **options) -> JudgingPanel:
    """A panel with a judged group."""
    group = numbered() if group is None else group
    return now(judge(group, by or Says(), journal=folder, cache=None, show=False, **options))
