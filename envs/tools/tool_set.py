"""Tools that a model calls in the native form of its chat template.

A `ToolSetFactory` is made once for a run from `env.tools`; it makes a `ToolSet` for each episode:

    factory = ToolSetFactory(env)
    tools = await factory.make()
    result = await tools.call("calculator", {"expression": "6*7"})      # ToolResult("42", "ok")
    await tools.close()
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.group import ToolOutcome
from envs.tools.arguments import ArgumentCheck
from envs.tools.execution import DeadlineExceeded
from envs.tools.failure_log import FailureLog
from envs.tools.mcp_address import MCP_PREFIX, read_mcp_address
from envs.tools.mcp_servers import McpSource, ServerToolError
from envs.tools.results import replace_surrogates, shorten_result
from envs.tools.tool_sources import (
    BuiltinSource,
    OpenTools,
    ToolSource,
    make_user_source,
    run_in_new_loop,
)
from envs.user_code import describe_error, is_user_code

Schemas = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class ToolResult:
    """Answer to a call.

    Args:
        text: for the model, at most `env.tool_result_characters` characters.
        outcome: `error`: the tool raised an exception; `unknown`: there is no such tool; `malformed`: the arguments do
            not fit the schema; `timeout`: the call exceeded `env.tool_timeout_s`.
    """

    text: str
    outcome: ToolOutcome


class ToolChecks:
    """Schemas of tools with distinct names, and the checks of arguments.

    Raises:
        ConfigError: two tools have one name, or the parameters of a tool are no JSON schema.
    """

    def __init__(self, schemas_by_place: Sequence[tuple[str, Schemas]]) -> None:
        self.schemas: Schemas = tuple(schema for _, schemas in schemas_by_place for schema in schemas)
        self.by_name: dict[str, ArgumentCheck] = {}
        for place, schemas in schemas_by_place:
            for schema in schemas:
                name = schema["function"]["name"]
                if name in self.by_name:
                    raise ConfigError(f"{place}: two tools are called {name}; give each tool its own name")
                self.by_name[name] = ArgumentCheck(place, schema)

    def find_problem(self, name: str, arguments: Any) -> ToolResult | None:
        """Returns the error of a call with unknown tool or wrong arguments, if any."""
        check = self.by_name.get(name)
        if check is None:
            known = ", ".join(self.by_name)
            return ToolResult(f"error: there is no tool {name!r}; the tools are: {known}", "unknown")
        problem = check.problem(arguments)
        return None if problem is None else ToolResult(f"error: {problem}", "malformed")


class ToolSet:
    """Tools of one episode.

    Args:
        schemas: for the chat template, each `{"type": "function", "function": {...}}`.
    """

    def __init__(self, checks: ToolChecks, sources: Sequence[OpenTools], env: EnvConfig, failures: FailureLog) -> None:
        self.schemas = checks.schemas
        self._checks, self._sources, self._failures = checks, sources, failures
        self._max_characters = env.tool_result_characters

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Calls a tool; only a cancellation of the caller is raised."""
        result = self._checks.find_problem(name, arguments) or await self._call(name, arguments)
        return replace(result, text=shorten_result(replace_surrogates(result.text), self._max_characters))

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        source = next(source for source in self._sources if name in source.calls)
        value = await source.calls[name](arguments)
        if isinstance(value, str):
            return ToolResult(value, "ok")
        if isinstance(value, DeadlineExceeded):
            return ToolResult(f"error: {value}", "timeout")
        self._failures.warn_of_failure(name, value, source.functions.get(name))
        text = str(value) if isinstance(value, ServerToolError) else describe_error(value)
        return ToolResult(f"error: {text}", "error")

    async def close(self) -> None:
        """Closes what belongs to this episode.

        A cancelled caller does not wait for the end, but everything ends.
        """
        await _close_together(self._sources)


async def _close_together(sources: Sequence[OpenTools | ToolSource]) -> None:
    """Closes sources, each one even if the caller is cancelled."""
    closing_tasks = [asyncio.ensure_future(source.close()) for source in sources]
    if closing_tasks:
        await asyncio.shield(asyncio.gather(*closing_tasks))


def _make_sources(env: EnvConfig, failures: FailureLog) -> list[ToolSource]:
    sources: list[ToolSource] = []
    for path in env.tools:
        place = f"env.tools={path}"
        if path.startswith(MCP_PREFIX):
            sources.append(McpSource(read_mcp_address(path), env))
        elif is_user_code(path):
            sources.append(make_user_source(place, path, env, failures))
        else:
            sources.append(BuiltinSource(place, path, env))
    return sources


def check_tools(env: EnvConfig) -> None:
    """Checks the tools of `env.tools` without making an instance or starting a server.

    Raises:
        ConfigError: a tool does not exist or has no schema, or two tools have one name.
    """
    ToolChecks([(source.place, source.schemas) for source in _make_sources(env, FailureLog())])


class ToolSetFactory:
    """Maker of tool sets, one for each episode.

    Args:
        env: `tools`, `tool_timeout_s` and `tool_result_characters` are read.

    Attributes:
        schemas: of all tools, in the order of `env.tools`.
        failures: log of the tools' first failures.

    Raises:
        ConfigError: as `check_tools`, or a class cannot be made, or an MCP server does not start.
    """

    def __init__(self, env: EnvConfig) -> None:
        self.env, self.failures = env, FailureLog()
        self._sources = _make_sources(env, self.failures)
        started_sources: list[ToolSource] = []
        try:
            for source in self._sources:
                source.start()
                started_sources.append(source)
            self._checks = ToolChecks([(source.place, source.schemas) for source in self._sources])
        except BaseException:
            run_in_new_loop(_close_together(started_sources))
            raise
        self.schemas = self._checks.schemas

    async def make(self) -> ToolSet:
        """Makes the tools of an episode.

        Raises:
            ToolStartError: a constructor fails, or an MCP server does not start.
        """
        opened: list[OpenTools] = []
        try:
            for source in self._sources:
                opened.append(await source.open())
        except BaseException:
            await _close_together(opened)
            raise
        return ToolSet(self._checks, opened, self.env, self.failures)

    async def close(self) -> None:
        """Closes what all episodes share, and all servers that still run."""
        self.failures.blocking_calls.close()
        await _close_together(self._sources)
