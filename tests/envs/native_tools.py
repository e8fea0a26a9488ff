"""Calls of native tools in an event loop of a test."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from config.schema.env import TOOLS, EnvConfig
from envs.tools.tool_set import ToolResult, ToolSetFactory

MODULE = "tests.envs.user_tools"
LONG = 3600.0
"""Deadline in seconds that no test reaches."""


def tool_env(*names: str, seconds: float = LONG, **fields: Any) -> EnvConfig:
    paths = [name if name in TOOLS.names or ":" in name else f"{MODULE}:{name}" for name in names]
    return EnvConfig(dataset="x", max_steps=2, tools=paths, tool_timeout_s=seconds, **fields)


def with_tools(env: EnvConfig, use: Callable[[ToolSetFactory], Coroutine[Any, Any, Any]]) -> Any:
    """Returns what a coroutine does with a factory, which is closed afterwards."""

    async def make_and_use() -> Any:
        factory = ToolSetFactory(env)
        try:
            return await use(factory)
        finally:
            await factory.close()

    return asyncio.run(make_and_use())


def call_tools(env: EnvConfig, *calls: tuple[str, dict[str, Any]]) -> list[ToolResult]:
    """Returns the results of calls in one episode."""

    async def use(factory: ToolSetFactory) -> list[ToolResult]:
        tools = await factory.make()
        results = [await tools.call(name, arguments) for name, arguments in calls]
        await tools.close()
        return results

    results: list[ToolResult] = with_tools(env, use)
    return results


def function_of(env: EnvConfig, name: str) -> dict[str, Any]:
    schemas = with_tools(env, lambda factory: asyncio.sleep(0, factory.schemas))
    (schema,) = [schema for schema in schemas if schema["function"]["name"] == name]
    assert schema["type"] == "function"
    function: dict[str, Any] = schema["function"]
    return function
