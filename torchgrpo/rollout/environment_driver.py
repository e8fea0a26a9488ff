"""Plays an episode in an environment: the model's turns and the environment's replies.

reset ─▶ messages ─▶ Conversation.sample_turn ─▶ message ─▶ step ─▶ replies, reward
                              ▲                                        │
                              └────────────────────────────────────────┘
"""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from envs.environments.episode_environments import EpisodeEnvironments
from envs.environments.interface import Environment, EpisodeError, Observation, Step
from envs.environments.replies import first_messages
from envs.example import Example, Message
from envs.group import FinishReason, Turn
from torchgrpo.rollout.conversation import Conversation, LimitError, PromptError
from torchgrpo.rollout.engines.interface import Sampler
from torchgrpo.rollout.episode_player import EpisodeReward


@dataclass(eq=False)
class EnvironmentDriver:
    """Plays each episode in an environment of its own.

    environments: makes the environment of each episode.
    """

    sampler: Sampler
    environments: EpisodeEnvironments

    async def play(
        self, conversation: Conversation, example: Example, reward: EpisodeReward, on_end: AsyncExitStack
    ) -> FinishReason:
        """Plays one episode, as `EpisodeDriver.play`."""
        with self.sampler.outside_engine():
            environment = await self.environments.make()
        on_end.push_async_callback(self._close, environment)
        with self.sampler.outside_engine():
            observation = await environment.reset(example)
        try:
            return await self._play_turns(environment, conversation, example, observation, reward)
        except PromptError as error:
            raise EpisodeError(str(error)) from error

    async def _close(self, environment: Environment) -> None:
        with self.sampler.outside_engine():
            await environment.close()

    async def _play_turns(
        self,
        environment: Environment,
        conversation: Conversation,
        example: Example,
        observation: Observation,
        reward: EpisodeReward,
    ) -> FinishReason:
        """Plays turns until the episode ends; returns the reason."""
        tools = (*example.tools, *(tool for tool in observation.tools if tool not in example.tools))
        messages: Sequence[Message] = first_messages(example.messages, observation)
        opening: tuple[Message, ...] = observation.messages
        while True:
            try:
                sampled = await conversation.sample_turn(messages, tools)
            except LimitError as error:
                return error.finish_reason
            turn, sampled_at = sampled.record, time.perf_counter()
            turn.opening, opening = opening, ()
            if conversation.has_invalid_turn:
                return sampled.finish_reason
            notes: Message = {"malformed": list(sampled.malformed)} if sampled.malformed else {}
            notes |= {"truncated": True} if sampled.finish_reason != "stop" else {}
            with self.sampler.outside_engine():
                step = await environment.step(sampled.message | notes)
            turn.env_seconds = time.perf_counter() - sampled_at
            _record_step(turn, step, reward)
            if sampled.is_last:
                return sampled.finish_reason
            if step.ends_episode:
                return "stop"
            history = (*messages, sampled.message) if step.history is None else step.history
            messages = (*history, *step.messages)

    def metrics(self) -> dict[str, float]:
        """Returns no metrics: those of episodes come from their turns."""
        return {}

    async def close(self) -> None:
        """Ends all threads and processes of the environments."""
        await self.environments.close()


def _record_step(turn: Turn, step: Step, reward: EpisodeReward) -> None:
    """Records reward, components and replies of a step."""
    turn.replies, turn.tool_outcomes = step.messages, step.tool_outcomes
    if step.reward is not None:
        turn.reward, reward.is_given = step.reward, True
    reward.add_components(step.components)
