"""Builds tools that are called by tags, their system-prompt instructions, and their replies.

This is `env.tool_format=tags`. A tool is a function from text to text, or a class with `run(request)` and `close()`
whose constructor takes the `env` section. The system prompt includes the first paragraph of a tool's docstring.
`envs/tools/tool_set.py` has the tools that a model calls in its native form.
"""

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from config.schema.env import TOOLS, EnvConfig
from config.schema.errors import ConfigError
from envs.tools.mcp_address import MCP_PREFIX
from envs.tools.results import replace_surrogates, result_text, shorten_result
from envs.user_code import describe_exception, is_user_code, load_user_object

log = logging.getLogger(__name__)


@dataclass
class Tool:
    """Tool that replies to turns ending in `<NAME>request</NAME>`.

    run: returns the result of a request. is_slow: replies run in a thread, in parallel with generation.
    """

    name: str
    run: Callable[[str], str]
    is_slow: bool
    close: Callable[[], None]

    def reply(self, text: str) -> str | None:
        """Returns the result of the call at the end of a turn, or None."""
        closing_tag = f"</{self.name}>"
        if not text.rstrip().endswith(closing_tag):
            return None
        _, opening_tag, request = text.rstrip().removesuffix(closing_tag).rpartition(f"<{self.name}>")
        return f"{self.name}: {self.run(request)}" if opening_tag else None


def find_tools(env: EnvConfig) -> list[tuple[str, Any]]:
    """Finds the functions and classes of `env.tools`, each with the name of its tag.

    Raises:
        ConfigError: a tool does not exist, is neither function nor class, or has no docstring; two tools have one name.
    """
    tools = [(path.rpartition(":")[2], _find_tool(path)) for path in env.tools]
    names = [name for name, _ in tools]
    duplicate_names = [name for name in names if names.count(name) > 1]
    if duplicate_names:
        raise ConfigError(
            f"env.tools={env.tools}: two tools are called {duplicate_names[0]}; give each tool its own name"
        )
    return tools


def _find_tool(path: str) -> Any:
    """Loads one tool and checks its form."""
    place = f"env.tools={path}"
    if path.startswith(MCP_PREFIX):
        raise ConfigError(f"{place}: an MCP server has no tags; set env.tool_format=native")
    found: Any = load_user_object("env.tools", path) if is_user_code(path) else TOOLS.load(path)
    is_class = inspect.isclass(found)
    if is_class:
        for method in ("run", "close"):
            if not callable(getattr(found, method, None)):
                raise ConfigError(f"{place}: the class has no method {method}; define run(request) and close()")
        _check_request(place, found.run, ("self", "request"))
    elif callable(found):
        _check_request(place, found, ("request",))
    else:
        raise ConfigError(f"{place}: {found!r} is neither a function nor a class")
    if not (found.__doc__ or "").strip():
        raise ConfigError(
            f"{place}: no docstring; write a docstring whose first paragraph describes the tool to the model"
        )
    return found


def _check_request(place: str, function: Callable[..., Any], names: tuple[str, ...]) -> None:
    """Raises ConfigError unless a function takes these parameters, the last one a str."""
    parameters = list(inspect.signature(function).parameters.values())
    required = [each for each in parameters if each.default is each.empty and each.kind != each.VAR_KEYWORD]
    if len(required) != len(names):
        raise ConfigError(
            f"{place}: the parameters are ({', '.join(each.name for each in required)}); change them to "
            f"({', '.join(names)}), the text between the tool's tags"
        )
    request = required[-1]
    if request.annotation not in (request.empty, str, "str"):
        raise ConfigError(
            f"{place}: {request.name} is annotated {request.annotation!r}; annotate the model's request as str"
        )


def tool_instructions(env: EnvConfig) -> str:
    """Returns the instructions for the system prompt, one line for each tool."""
    lines = []
    for name, tool in find_tools(env):
        description = " ".join(inspect.cleandoc(tool.__doc__).split("\n\n")[0].split())
        usage = f"To use it, end your message with <{name}>...</{name}>; the result comes in the next message."
        lines.append(f"{description} {usage}")
    return "\n".join(lines)


def make_tools(env: EnvConfig) -> list[Tool]:
    """Makes the tools of `env.tools`, in their order.

    Raises:
        ConfigError: as `find_tools`, or the construction of a class fails.
    """
    tools = []
    for path, (name, function_or_class) in zip(env.tools, find_tools(env), strict=True):
        tool, is_class = function_or_class, inspect.isclass(function_or_class)
        if is_class:
            try:
                tool = function_or_class(env)
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(f"env.tools={path}: creating the tool failed: {describe_exception(error)}") from error
        run, close = (tool.run, tool.close) if is_class else (tool, lambda: None)
        if is_user_code(path):
            guarded = GuardedTool(name, run, close, env.tool_timeout_s, env.tool_result_characters)
            tools.append(Tool(name, guarded.run, is_slow=True, close=guarded.close))
        else:
            tools.append(Tool(name, run, is_slow=is_class, close=close))
    return tools


class GuardedTool:
    """User tool with a deadline, which returns and counts exceptions as error texts.

    A call beyond the deadline stays in its daemon thread, which does not keep the process alive.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[str], Any],
        close_tool: Callable[[], None],
        seconds: float,
        max_characters: int,
    ) -> None:
        self.name, self.function, self.close_tool = name, function, close_tool
        self.seconds, self.max_characters = seconds, max_characters
        self.num_calls = self.num_failures = 0
        self._lock = threading.Lock()

    def run(self, request: str) -> str:
        """Returns the result as text of at most `max_characters` characters, or `error: ...`."""
        outcome: list[str | BaseException] = []
        thread = threading.Thread(target=self._call, args=(request, outcome), name=self.name, daemon=True)
        thread.start()
        thread.join(min(self.seconds, threading.TIMEOUT_MAX))
        result = outcome[0] if outcome else TimeoutError(f"took longer than {self.seconds:g} s")
        with self._lock:
            self.num_calls += 1
            self.num_failures += isinstance(result, BaseException)
            is_first_failure = self.num_failures == 1
        if isinstance(result, str):
            return shorten_result(result, self.max_characters)
        if is_first_failure:
            log.warning("tool %s failed, and the model gets the error: %s", self.name, describe_exception(result))
        return shorten_result(replace_surrogates(f"error: {type(result).__name__}: {result}"), self.max_characters)

    def _call(self, request: str, outcome: list[str | BaseException]) -> None:
        try:
            result = self.function(request)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            outcome.append(result_text(result))
        except BaseException as error:  # the thread ends here, so `run` reports any exception
            outcome.append(error)

    def close(self) -> None:
        """Logs the number of failed calls and closes the tool."""
        if self.num_failures:
            log.warning("tool %s: %d of %d calls failed", self.name, self.num_failures, self.num_calls)
        self.close_tool()
