"""Plays an episode with an agent, a program that sends requests to the run's endpoint.

key ─▶ agent process ── HTTP ──▶ endpoint ─▶ Conversation.sample_turn
            │
            └─ end of the process ─▶ reward: reported by request, or printed, else of the task
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from envs.agents.runner import AgentRunner
from envs.environments.interface import EpisodeError
from envs.example import Example
from envs.group import FinishReason
from torchgrpo.rollout.conversation import Conversation
from torchgrpo.rollout.endpoint.server import Endpoint
from torchgrpo.rollout.engines.interface import Sampler
from torchgrpo.rollout.episode_player import EpisodeReward


@dataclass(eq=False)
class AgentDriver:
    """Plays each episode with a process of the agent.

    endpoint: starts with the first episode, in the loop of the run.
    """

    sampler: Sampler
    runner: AgentRunner
    endpoint: Endpoint
    _start_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def play(
        self, conversation: Conversation, example: Example, reward: EpisodeReward, on_end: AsyncExitStack
    ) -> FinishReason:
        """Plays one episode, as `EpisodeDriver.play`.

        An agent that fails after the limits of its episode refused a request does not count as failed.
        """
        async with self._start_lock:
            if not self.endpoint.url:
                await self.endpoint.start()
        key, result = self.endpoint.open_episode(conversation), None
        try:
            with self.sampler.outside_engine():
                result = await self.runner.run(example, self.endpoint.url, key)
        except EpisodeError as error:
            if conversation.end_reason is None:
                refusal = self.endpoint.last_refusal(key)
                hint = f"\nthe last refused request: {refusal}" if refusal else ""
                raise EpisodeError(f"{error}{hint}") from error
        finally:
            conversation.end("the agent has ended")
            result = self.endpoint.close_episode(key) or result
            if result is not None and result.reward is not None and conversation.turns:
                conversation.turns[-1].reward, reward.is_given = result.reward, True
                reward.add_components(result.components)
        if not conversation.turns:
            raise EpisodeError(f"env.agent={self.runner.agent}: the agent ended without a request for a turn")
        return conversation.end_reason or "stop"

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the endpoint."""
        return self.endpoint.metrics()

    async def close(self) -> None:
        """Ends all agents and the endpoint."""
        try:
            await self.runner.close()
        finally:
            if self.endpoint.url:
                await self.endpoint.stop()
