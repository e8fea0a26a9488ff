"""Tools that are methods of an environment's instance, called one after another."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from envs.environments.calls import EnvironmentTimeout
from envs.environments.interface import TOOL_METHODS, EpisodeError
from envs.tool_schemas import function_schema
from envs.tools.results import replace_surrogates, shorten_result
from envs.tools.tool_set import ToolChecks, ToolResult
from envs.tools.tool_sources import public_methods
from envs.user_code import describe_error


def make_method_checks(place: str, kind: type[Any]) -> ToolChecks:
    """Makes schemas and checks of the methods that are tools.

    place: config key and value, for messages.

    Raises:
        ConfigError: a method lacks type hints, or a docstring.
    """
    # A method that is bound to any object has a signature without the instance.
    methods = {name: MethodType(getattr(kind, name), kind) for name in tool_names(kind)}
    schemas = tuple(function_schema(place, name, method) for name, method in methods.items())
    return ToolChecks([(place, schemas)])


def tool_names(kind: type[Any]) -> list[str]:
    """Returns the names of the methods that are tools, in the order of their definition.

    A class with `step` marks them by the decorator `tool`. Without `step` they are all public methods with a docstring,
    except `examples`.
    """
    functions = {name: getattr(kind, name) for name in public_methods(kind) if name != "examples"}
    methods = {name: each for name, each in functions.items() if each is inspect.getattr_static(kind, name)}
    if "step" in dir(kind):
        return [name for name, method in methods.items() if method in TOOL_METHODS]
    return [name for name, method in methods.items() if inspect.getdoc(method)]


@dataclass
class MethodTools:
    """Tool set of methods with shared state, so calls of one turn run in order.

    call_method: calls a method of the instance under its deadline, and returns its text. max_characters:
        `env.tool_result_characters`.
    """

    checks: ToolChecks
    call_method: Callable[[str, dict[str, Any]], Awaitable[str]]
    max_characters: int
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        return self.checks.schemas

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Calls a method.

        Raises:
            EnvironmentTimeout: the method did not return, so the instance can no longer be used.
        """
        if (problem := self.checks.find_problem(name, arguments)) is not None:
            return problem
        async with self._lock:
            try:
                text = await self.call_method(name, arguments)
                return ToolResult(shorten_result(text, self.max_characters), "ok")
            except EnvironmentTimeout:
                raise
            except EpisodeError as error:
                text = replace_surrogates(f"error: {describe_error(error.__cause__ or error)}")
                return ToolResult(shorten_result(text, self.max_characters), "error")

    async def close(self) -> None:
        """Does nothing; the environment closes its instance."""
