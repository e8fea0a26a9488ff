"""Tools that are methods of an environment's instance, called one after another."""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from config.schema.errors import ConfigError
from envs.environments.calls import EnvironmentTimeout
from envs.environments.interface import TOOL_METHODS, EpisodeError
from envs.tool_calls import shorten_result
from envs.user_code import describe_exception

RESERVED_METHODS = ("reset", "step", "close", "examples", "get_reward", "reward")
"""Public methods that are no tools."""


@dataclass(frozen=True)
class MethodResult:
    """Result of a call of a method."""

    text: str
    outcome: str


@dataclass
class MethodTools:
    """Tool set of methods with shared state, so calls of one turn run in order.

    schemas: as `method_schemas` returns them. call_method: calls a method of the instance under its deadline.
    """

    schemas: tuple[dict[str, Any], ...]
    call_method: Callable[[str, dict[str, Any]], Awaitable[Any]]
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def call(self, name: str, arguments: dict[str, Any]) -> MethodResult:
        """Calls a method.

        Raises:
            EnvironmentTimeout: the method did not return, so the instance can no longer be used.
        """
        names = [schema["function"]["name"] for schema in self.schemas]
        if name not in names:
            return MethodResult(f"error: no tool is called {name}; choose one of {', '.join(names)}", "unknown")
        async with self._lock:
            try:
                return MethodResult(_result_text(await self.call_method(name, arguments)), "ok")
            except EnvironmentTimeout:
                raise
            except EpisodeError as error:
                cause = error.__cause__
                reason = str(error) if cause is None else f"{type(cause).__name__}: {cause}"
                return MethodResult(shorten_result(f"error: {reason}"), "error")

    async def close(self) -> None:
        """Does nothing; the environment closes its instance."""


def tool_names(kind: type[Any]) -> list[str]:
    """Returns the names of the methods that are tools, in the order of their definition.

    A class with `step` marks them by the decorator `tool`; without `step` they are all public methods.
    """
    members = {name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()}
    methods = {name: member for name, member in members.items() if inspect.isfunction(member)}
    if "step" in methods:
        return [name for name, method in methods.items() if method in TOOL_METHODS]
    return [name for name in methods if not name.startswith("_") and name not in RESERVED_METHODS]


def method_schemas(place: str, kind: type[Any]) -> tuple[dict[str, Any], ...]:
    """Builds the schemas of the methods that are tools.

    place: config key and value, for messages.

    Raises:
        ConfigError: a method lacks type hints, or a docstring that describes it and its parameters.
    """
    names = tool_names(kind)
    if not names:
        return ()
    from transformers.utils.chat_template_utils import get_json_schema

    schemas = []
    for name in names:
        try:
            schemas.append(get_json_schema(vars(kind).get(name) or getattr(kind, name)))
        except Exception as error:  # the library has several exceptions of its own
            raise ConfigError(
                f"{place}: the method {name} cannot be a tool: {describe_exception(error)}; give each parameter a "
                "type, and write a docstring that describes the method and, under `Args:`, each parameter"
            ) from error
    return tuple(schemas)


def _result_text(value: Any) -> str:
    """Returns a method's result as text: dictionaries and lists as JSON."""
    if value is None:
        return "(no result)"
    text = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, dict | list) else str(value)
    return shorten_result(text.encode("utf-8", "replace").decode())
