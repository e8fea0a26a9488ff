"""Where completions are judged."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from config.env import EnvConfig
from envs.task import Completion, Example, Outcome, Task


@dataclass(frozen=True)
class Scored:
    """A verdict with the seconds it took."""

    score: float
    parts: dict[str, float]
    outcome: Outcome
    seconds: float


class RewardService:
    """Judges batches of completions with the task's reward."""

    def __init__(self, task: Task, env: EnvConfig) -> None:
        self.task = task
        self.env = env

    def score(self, completions: Sequence[Completion], examples: Sequence[Example]) -> list[Scored]:
        scored = []
        for completion, example in zip(completions, examples, strict=True):
            began = time.perf_counter()
            reward = self.task.reward(completion, example)
            seconds = time.perf_counter() - began
            scored.append(Scored(reward.score, reward.parts, reward.outcome, seconds))
        return scored

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass
