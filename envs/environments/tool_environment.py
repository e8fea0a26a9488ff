"""Environments of tools: native calls, tags in the text, and the request to think again.

    turn with calls ─▶ ToolEnvironment ─▶ one `tool` message for each call, in order
    other turn      ─▶ inner environment, such as ReflectionEnvironment; without one the episode ends

These environments give no reward, so the task scores the last turn.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from envs.environments.interface import Environment, EpisodeError, Observation, Step
from envs.environments.replies import tool_message
from envs.example import Example, Message
from envs.group import ToolOutcome
from envs.tool_calls import Tool
from envs.tools.tool_set import ToolResult


class Tools(Protocol):
    """Tools of one episode, with their schemas for the chat template."""

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]: ...

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Calls a tool; raises nothing that the tool causes."""

    async def close(self) -> None: ...


@dataclass
class ToolEnvironment:
    """Environment that answers the tool calls of a turn together.

    inner: environment for turns without calls, which declares no tools of its own.
    """

    tools: Tools
    inner: Environment | None = None

    async def reset(self, example: Example) -> Observation:
        observation = Observation() if self.inner is None else await self.inner.reset(example)
        if observation.tools:
            names = ", ".join(schema["function"]["name"] for schema in observation.tools)
            raise EpisodeError(f"the environment has tools of its own ({names}): leave env.tools empty")
        return replace(observation, tools=self.tools.schemas)

    async def step(self, turn: Message) -> Step:
        calls: Sequence[Mapping[str, Any]] = turn.get("tool_calls") or ()
        malformed_calls: Sequence[str] = turn.get("malformed") or ()
        if not calls and not malformed_calls:
            return Step() if self.inner is None else await self.inner.step(turn)
        answers = await asyncio.gather(
            *[self.tools.call(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        )
        messages = [tool_message(call, answer.text) for call, answer in zip(calls, answers, strict=True)]
        messages += [{"role": "tool", "content": f"error: {problem}"} for problem in malformed_calls]
        outcomes: list[ToolOutcome] = [answer.outcome for answer in answers]
        outcomes += ["malformed" for _ in malformed_calls]
        return Step(tuple(messages), tool_outcomes=tuple(outcomes))

    async def close(self) -> None:
        try:
            if self.inner is not None:
                await self.inner.close()
        finally:
            await self.tools.close()


@dataclass
class ReflectionEnvironment:
    """Environment with a fixed reply, without a hint on whether the answer is right.

    replies: number of turns that get a reply.
    """

    prompt: str
    replies: int

    async def reset(self, example: Example) -> Observation:
        return Observation()

    async def step(self, turn: Message) -> Step:
        self.replies -= 1
        return Step(({"role": "user", "content": self.prompt},)) if self.replies >= 0 else Step()

    async def close(self) -> None:
        """Does nothing."""


@dataclass
class TagsEnvironment:
    """Environment of tools that the model calls by tags at the end of a turn.

    The reply is a user message, which every chat template has. tools: the first with a reply answers. inner:
    environment for turns without a call.
    """

    tools: Sequence[Tool]
    inner: Environment | None = None

    async def reset(self, example: Example) -> Observation:
        return Observation() if self.inner is None else await self.inner.reset(example)

    async def step(self, turn: Message) -> Step:
        # Tools may be slow, and threads also bound their deadlines.
        reply = await asyncio.to_thread(self._reply, turn["content"])
        if reply is not None:
            # A lone surrogate has no encoding.
            return Step(({"role": "user", "content": reply.encode("utf-8", "replace").decode()},))
        return Step() if self.inner is None else await self.inner.step(turn)

    def _reply(self, text: str) -> str | None:
        return next((reply for each in self.tools if (reply := each.reply(text)) is not None), None)

    async def close(self) -> None:
        if self.inner is not None:
            await self.inner.close()
