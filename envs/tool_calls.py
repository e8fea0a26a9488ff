"""Tools that the model may call, from their name to their run on a tag's content.

A tool is a function from text to text, or a class with `run(request)` and `close()` that is made with the `env`
section. The first paragraph of its docstring is what the model is told. Those of this project are files of `tools/`,
those of a user `module:function`; both are made in the same way.
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
from envs.user_code import described, is_own, load_own

LONGEST = 2000
"""Characters of a result that the model is shown."""
log = logging.getLogger(__name__)


@dataclass
class Tool:
    """Answers a turn that ends in `<NAME>request</NAME>` with what `run` makes of the request.

    slow: replying is done in a thread, beside generation.
    """

    name: str
    run: Callable[[str], str]
    slow: bool
    close: Callable[[], None]

    def reply(self, text: str) -> str | None:
        """Answer the call that ends a turn's text; None where none of this tool does."""
        closing = f"</{self.name}>"
        if not text.rstrip().endswith(closing):
            return None
        _, opened, request = text.rstrip().removesuffix(closing).rpartition(f"<{self.name}>")
        return f"{self.name}: {self.run(request)}" if opened else None


def find_tools(env: EnvConfig) -> list[tuple[str, Any]]:
    """The functions and classes of `env.tools`, each with the name of its tag.

    Raises:
        ConfigError: one that is not there, is neither, or says nothing of itself; two of one name.
    """
    found = [(path.rpartition(":")[2], _find(path)) for path in env.tools]
    names = [name for name, _ in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(
            f"env.tools={env.tools}: two are called {twice[0]}; the model could not tell them apart"
        )
    return found


def _find(path: str) -> Any:
    place = f"env.tools={path}"
    found: Any = load_own("env.tools", path) if is_own(path) else TOOLS.load(path)
    is_class = inspect.isclass(found)
    if is_class:
        for method in ("run", "close"):
            if not callable(getattr(found, method, None)):
                raise ConfigError(
                    f"{place}: the class has no method {method}; a tool has run(request) and close()"
                )
        _check_request(place, found.run, ("self", "request"))
    elif callable(found):
        _check_request(place, found, ("request",))
    else:
        raise ConfigError(f"{place}: {found!r} is neither a function nor a class")
    if not (found.__doc__ or "").strip():
        raise ConfigError(f"{place}: no docstring; its first paragraph is what the model is told of the tool")
    return found


def _check_request(place: str, function: Callable[..., Any], takes: tuple[str, ...]) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    required = [each for each in parameters if each.default is each.empty and each.kind != each.VAR_KEYWORD]
    if len(required) != len(takes):
        raise ConfigError(
            f"{place}: takes ({', '.join(each.name for each in required)}); a tool takes ({', '.join(takes)}), what "
            "the model wrote between its tags"
        )
    request = required[-1]
    if request.annotation not in (request.empty, str, "str"):
        raise ConfigError(
            f"{place}: {request.name} is annotated {request.annotation!r}; the model's request is str"
        )


def instructions(env: EnvConfig) -> str:
    """Lines of the system prompt on the tools, one each."""
    told = []
    for name, found in find_tools(env):
        what = " ".join(inspect.cleandoc(found.__doc__).split("\n\n")[0].split())
        how = f"To use it, end your message with <{name}>...</{name}>; the result comes in the next message."
        told.append(f"{what} {how}")
    return "\n".join(told)


def make_tools(env: EnvConfig) -> list[Tool]:
    """Tools of `env.tools`, in their order.

    Raises:
        ConfigError: as `find_tools`, or a class cannot be made.
    """
    tools = []
    for path, (name, found) in zip(env.tools, find_tools(env), strict=True):
        made, is_class = found, inspect.isclass(found)
        if is_class:
            try:
                made = found(env)
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(f"env.tools={path}: making one failed: {described(error)}") from error
        run, close = (made.run, made.close) if is_class else (made, lambda: None)
        if is_own(path):
            guarded = Guarded(name, run, close, env.tool_timeout_s)
            tools.append(Tool(name, guarded.run, slow=True, close=guarded.close))
        else:
            tools.append(Tool(name, run, slow=is_class, close=close))
    return tools


class Guarded:
    """A tool of the user's under a deadline. What it raises is told to the model and counted.

    A call that does not end in time is left to itself in its thread, which does not keep the run from ending.
    """

    def __init__(
        self, name: str, function: Callable[[str], Any], end: Callable[[], None], seconds: float
    ) -> None:
        self.name, self.function, self.end, self.seconds = name, function, end, seconds
        self.calls = self.failures = 0
        self._lock = threading.Lock()

    def run(self, request: str) -> str:
        """The result as text, `LONGEST` characters of it at most, or `error: ...`."""
        outcome: list[str | BaseException] = []
        thread = threading.Thread(target=self._call, args=(request, outcome), name=self.name, daemon=True)
        thread.start()
        thread.join(min(self.seconds, threading.TIMEOUT_MAX))
        told = outcome[0] if outcome else TimeoutError(f"took longer than {self.seconds:g} s")
        with self._lock:
            self.calls += 1
            self.failures += isinstance(told, BaseException)
            first = self.failures == 1
        if isinstance(told, str):
            return shortened(told)
        if first:
            log.warning("tool %s failed, which the model is told: %s", self.name, described(told))
        return shortened(f"error: {type(told).__name__}: {told}".encode(errors="replace").decode())

    def _call(self, request: str, outcome: list[str | BaseException]) -> None:
        try:
            result = self.function(request)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            text = "(no result)" if result is None else str(result)
            outcome.append(text.encode(errors="replace").decode())  # half a character has no token
        except BaseException as error:  # the thread's last: nobody else would hear of it
            outcome.append(error)

    def close(self) -> None:
        """Says how many calls failed, and ends the tool."""
        if self.failures:
            log.warning("tool %s: %d of %d calls failed", self.name, self.failures, self.calls)
        self.end()


def shortened(text: str) -> str:
    """The beginning and the end of a long text, `LONGEST` characters of it."""
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]}\n...\n{text[-half:]}"
