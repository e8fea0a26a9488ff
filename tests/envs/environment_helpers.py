"""Helpers of the tests of environments: examples, turns, and whole episodes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from config.schema.env import EnvConfig
from envs.chat_suffix import GrowingChat
from envs.environments.definition import find_environment
from envs.environments.interface import Environment, EpisodeError, Step
from envs.environments.make import EnvironmentFactory
from envs.example import Example, Message

MODULE = "tests.envs.user_environments"
Result = TypeVar("Result")


def env_config(environment: str, **fields: Any) -> EnvConfig:
    """Returns settings with an environment of `user_environments`."""
    return EnvConfig(**{"dataset": "arithmetic", "environment": f"{MODULE}:{environment}"} | fields)


def example(answer: Any = "3", row: int = 0, **columns: Any) -> Example:
    return Example(({"role": "user", "content": "?"},), answer, row, row_data=columns)


def turn(text: str = "", *calls: tuple[str, dict[str, Any]], malformed_calls: tuple[str, ...] = ()) -> Message:
    """Returns a message of the model with tool calls, each a name and arguments."""
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ]
    return message | ({"malformed": list(malformed_calls)} if malformed_calls else {})


def suffix_ids(
    tokenizer: Any,
    before: Sequence[Message],
    after: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    end_token: int | None,
) -> list[int] | None:
    """Encodes what the template writes after an answer, in a chat without earlier turns."""
    return GrowingChat(tokenizer, tools).suffix_ids(before, after, end_token)


def make_factory(env: EnvConfig) -> EnvironmentFactory:
    definition = find_environment(env)
    assert definition is not None
    return EnvironmentFactory(env, definition)


def run_with_factory(env: EnvConfig, use: Callable[[EnvironmentFactory], Awaitable[Result]]) -> Result:
    """Runs a function with a factory, which is closed afterwards."""

    async def run() -> Result:
        factory = make_factory(env)
        try:
            return await use(factory)
        finally:
            await factory.close()

    return asyncio.run(run())


async def play(environment: Environment, first: Example, *turns: Message | str) -> list[Step | str]:
    """Plays an episode; returns the steps, and an error's message as the last entry."""
    steps: list[Step | str] = []
    try:
        await environment.reset(first)
        for each in turns:
            steps.append(await environment.step(turn(each) if isinstance(each, str) else each))
    except EpisodeError as error:
        steps.append(str(error))
    await environment.close()
    return steps


def play_once(env: EnvConfig, first: Example, *turns: Message | str) -> list[Step | str]:
    """Plays one episode of an environment."""

    async def use(factory: EnvironmentFactory) -> list[Step | str]:
        return await play(factory.make(), first, *turns)

    return run_with_factory(env, use)


def reply_ids(tokenizer: Any, environment: Environment, text: str, end_token: int = 2) -> list[int]:
    """Plays one turn, and encodes the replies as the chat template writes them.

    Returns an empty list at the end of the episode.
    """
    question, answer = {"role": "user", "content": "6*7?"}, turn(text)
    step = asyncio.run(environment.step(answer))
    if step.ends_episode:
        return []
    ids = suffix_ids(tokenizer, [question, answer], [question, answer, *step.messages], (), end_token)
    assert ids is not None
    return ids


def reply_text(step: Step | str) -> str:
    """Returns the content of a step's only message."""
    assert isinstance(step, Step)
    (message,) = step.messages
    return str(message["content"])
