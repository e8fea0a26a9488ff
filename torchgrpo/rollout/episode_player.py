"""Plays the episodes of a run, each with its deadline and its verdict.

    place ─▶ conversation ─▶ driver: an environment, or an agent ─▶ completion, verdict
                  ▲                │
                  └─ messages ─────┘  Conversation.sample_turn

Every episode is a coroutine, so a slow episode delays no other episode. A failure of a user's environment or agent is
the outcome of its episode and does not end the run.
"""

import asyncio
import logging
import math
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol

from envs.environments.interface import EpisodeError
from envs.example import Example
from envs.group import FinishReason, SampledCompletion, Verdict
from envs.reward_workers.outcome_counts import OutcomeCounts
from envs.reward_workers.scoring import ScoringResult
from torchgrpo.rollout.conversation import Conversation, ConversationParts
from torchgrpo.rollout.engines.interface import Request

log = logging.getLogger(__name__)


@dataclass
class EpisodeReward:
    """Reward that an environment or agent gives to its episode.

    Without it the task's reward scores the last turn. components: named parts, summed over the turns.
    """

    is_given: bool = False
    components: dict[str, float] = field(default_factory=dict)

    def add_components(self, components: Mapping[str, float]) -> None:
        for name, value in components.items():
            self.components[name] = self.components.get(name, 0.0) + value


class EpisodeDriver(Protocol):
    """Asks a conversation for turns until the episode ends."""

    async def play(
        self, conversation: Conversation, example: Example, reward: EpisodeReward, on_end: AsyncExitStack
    ) -> FinishReason:
        """Plays one episode, writes its reward, and returns the reason of its end.

        on_end: takes what must be closed after the episode; the deadline of the episode does not end it.

        Raises:
            EpisodeError: the environment or the agent failed.
        """

    def metrics(self) -> dict[str, float]:
        """Returns metrics since the last call."""

    async def close(self) -> None:
        """Ends all threads and processes, after the last episode."""


@dataclass(eq=False)
class EpisodePlayer:
    """Plays the episodes of a run.

    Args:
        parts: shared by all conversations.
        driver: environment or agent of the episodes.
        seconds: for a whole episode.
        max_alive: episodes at a time.
        error_counts: counts failures of episodes, and raises above `env.max_error_rate`.
    """

    parts: ConversationParts
    driver: EpisodeDriver
    seconds: float
    max_alive: int
    error_counts: OutcomeCounts
    num_alive: int = 0
    has_logged_failure: bool = False
    _places: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.max_alive)

    async def play(self, request: Request, example: Example, row: int) -> SampledCompletion:
        """Plays one episode and returns its completion.

        The completion has a verdict if the episode has a reward of its own.

        request: of the group, with the prompt of the example. row: index of the completion in the group.

        Raises:
            ConfigError: too many episodes failed.
        """
        async with self._places:
            self.num_alive += 1
            try:
                return await self._play_with_deadline(request, example, row)
            finally:
                self.num_alive -= 1

    async def _play_with_deadline(self, request: Request, example: Example, row: int) -> SampledCompletion:
        conversation, reward = Conversation(self.parts, example, request, row), EpisodeReward()
        finish_reason: FinishReason
        error = ""
        async with AsyncExitStack() as on_end:
            try:
                async with asyncio.timeout(self.seconds) as deadline:
                    finish_reason = await self.driver.play(conversation, example, reward, on_end)
            except TimeoutError:
                if not deadline.expired():
                    raise
                finish_reason = "deadline"
            except EpisodeError as failure:
                finish_reason, error = "error", str(failure)
                if not self.has_logged_failure:
                    self.has_logged_failure = True
                    log.warning("the first failure of an episode, which is left out: %s", failure)
        completion = conversation.completion(finish_reason)
        completion.error = error
        verdict = _episode_verdict(completion, reward, conversation.has_invalid_turn)
        if verdict is not None:
            completion.verdict = verdict
            result = ScoringResult(verdict.score, verdict.components, verdict.outcome, verdict.seconds, error)
            self.error_counts.add(example, result)
            self.error_counts.check_error_rate()
        return completion


def _episode_verdict(completion: SampledCompletion, reward: EpisodeReward, is_invalid: bool) -> Verdict | None:
    """Returns the verdict of the episode; None where the task's reward scores the completion."""
    seconds = sum(turn.env_seconds for turn in completion.turns)
    if completion.finish_reason == "error":
        return Verdict(0.0, reward.components, "error", seconds)
    if reward.is_given and is_invalid:
        return Verdict(0.0, {"control_tokens": 1.0}, "invalid", seconds)
    if reward.is_given:
        return Verdict(math.fsum(turn.reward for turn in completion.turns), reward.components, "scored", seconds)
    return Verdict(0.0, {}, "invalid", seconds) if completion.finish_reason == "deadline" else None
