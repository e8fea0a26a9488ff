"""Model rewards of a run, added to the verdicts of the reward workers.

    completions ─▶ reward workers ─▶ verdicts ─▶ scored:          judge and reward model, concurrently ─▶ verdicts
                                                 invalid, error:  no request

Runs in the run's asyncio loop; the engine continues meanwhile. Only completions with the outcome `scored` are sent to a
model. The failure of a model reward makes the outcome `error`.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from config.schema.env import EnvConfig
from envs.example import Completion, Example
from envs.group import Verdict
from envs.reward_workers.group_reward import CompletionScorer
from envs.reward_workers.outcome_counts import OutcomeCounts
from envs.reward_workers.scoring import ScoringResult
from envs.reward_workers.service import RewardService
from envs.reward_workers.task_scorer import add_model_scores
from envs.rewards import model_reward_names
from envs.task import Task
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.model_rewards.interface import ModelReward, ModelRewardError
from torchgrpo.rollout.model_rewards.judge import JudgeReward


@dataclass(eq=False)
class ModelRewards:
    """Judge and reward model, shared by training and evaluations.

    Args:
        rewards: those that `env.reward` or an evaluation set names, by name; may be empty.
        counts: outcomes of the model rewards, apart from those of the workers.
    """

    rewards: Mapping[str, ModelReward]
    counts: OutcomeCounts

    async def add_scores(
        self, task: Task, completions: Sequence[Completion], examples: Sequence[Example], verdicts: Sequence[Verdict]
    ) -> list[Verdict]:
        """Adds the scores of model rewards to verdicts, in order.

        Raises:
            ConfigError: more completions fail than `env.max_error_rate` allows.
            RunError: the run cannot continue.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._add_score(task.members.get(item[1].source, task).env, *item))
                    for item in zip(completions, examples, verdicts, strict=True)
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self.counts.check_error_rate()
        return [one.result() for one in tasks]

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of all model rewards."""
        return {name: value for reward in self.rewards.values() for name, value in reward.metrics().items()}

    def state(self) -> dict[str, Any]:
        """Returns the state of a checkpoint: the number of requests, which count against the budget."""
        judge = self.rewards.get("judge")
        return {"judge_requests": judge.num_requests} if isinstance(judge, JudgeReward) else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state` returned; a checkpoint without a judge has none."""
        judge = self.rewards.get("judge")
        if isinstance(judge, JudgeReward):
            judge.num_requests = state.get("judge_requests", 0)

    async def close(self) -> None:
        """Closes all model rewards."""
        async with AsyncExitStack() as ending:
            for reward in self.rewards.values():
                ending.push_async_callback(reward.close)

    async def _add_score(self, env: EnvConfig, completion: Completion, example: Example, verdict: Verdict) -> Verdict:
        """Adds the scores of one completion to its verdict."""
        names = model_reward_names(env)
        if not names or verdict.outcome != "scored":
            return verdict
        began = time.perf_counter()
        results = await asyncio.gather(*(self._score(name, completion, example) for name in names))
        seconds = time.perf_counter() - began
        failures = [str(one) for one in results if isinstance(one, ModelRewardError)]
        if failures:
            self.counts.add(example, ScoringResult(0.0, {}, "error", seconds, "; ".join(failures)))
            return Verdict(0.0, {}, "error", verdict.seconds + seconds)
        scores = {name: one for name, one in zip(names, results, strict=True) if not isinstance(one, ModelRewardError)}
        scored = add_model_scores(verdict, scores, seconds, env)
        self.counts.add(example, ScoringResult(scored.score, scored.components, "scored", seconds))
        return scored

    async def _score(self, name: str, completion: Completion, example: Example) -> float | ModelRewardError:
        try:
            return await self.rewards[name].score(completion, example)
        except ModelRewardError as error:
            return error


def make_model_rewards(env: EnvConfig, names: set[str]) -> ModelRewards:
    """Builds the model rewards among these names.

    names: of all rewards of the run.

    Raises:
        ConfigError: the settings of a model reward are wrong, or its model cannot be loaded.
    """
    rewards: dict[str, ModelReward] = {}
    if "reward_model" in names:
        from torchgrpo.rollout.model_rewards.reward_model import RewardModel

        rewards["reward_model"] = RewardModel(env.reward_model)
    if "judge" in names:
        rewards["judge"] = JudgeReward(env.judge)
    failures, remedy = "completions have no score of a model reward", "Correct the judge or the reward model"
    return ModelRewards(rewards, OutcomeCounts(env.max_error_rate, failures, remedy))


def make_completion_scorer(loop: EngineLoop, service: RewardService, model_rewards: ModelRewards) -> CompletionScorer:
    """Returns an async scorer with the rewards of the service and the model rewards."""
    score_in_workers = loop.make_scorer(service)
    if not model_rewards.rewards:
        return score_in_workers

    async def score_completions(completions: Sequence[Completion], examples: Sequence[Example]) -> list[Verdict]:
        verdicts = await score_in_workers(completions, examples)
        loop.wake()  # lets groups start in the engine's free room, although no request is in flight
        with loop.outside_engine():
            return await model_rewards.add_scores(service.task, completions, examples, verdicts)

    return score_completions
