"""Sources of tools: functions, classes with state, and built-in tools.

A source is made once for a run, from one entry of `env.tools`, and opens its tools for each episode.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from os import sched_getaffinity
from types import FunctionType, MethodType
from typing import Any, Protocol

from config.schema.env import TOOLS, EnvConfig
from config.schema.errors import ConfigError
from envs.tool_schemas import function_schema
from envs.tools.execution import DaemonThreads, Outcome, call_in_loop, call_in_thread
from envs.tools.failure_log import FailureLog, source_file
from envs.tools.results import result_text
from envs.user_calls import DaemonThread
from envs.user_code import describe_exception, load_user_object

ToolCall = Callable[[Mapping[str, Any]], Awaitable[Outcome]]
"""Call of a tool with its arguments by name."""
PROTOCOL_METHODS = frozenset({"reset", "step", "close", "reward", "get_reward"})
"""Public methods that are no tools: those that an environment has for the trainer."""


@dataclass(frozen=True)
class OpenTools:
    """Tools of one source in one episode.

    Args:
        calls: by the name of the tool.
        close: ends what belongs to the episode; never raises for what the user's code does.
        functions: the user's functions by the name of the tool, for the place of an error.
    """

    calls: Mapping[str, ToolCall]
    close: Callable[[], Awaitable[None]]
    functions: Mapping[str, Callable[..., Any]]


class ToolStartError(RuntimeError):
    """Failure to make the tools of an episode; the message names the tool."""


class ToolSource(Protocol):
    """One entry of `env.tools`.

    place: config key and value, for messages. schemas: of an MCP server known after `start`.
    """

    place: str
    schemas: tuple[dict[str, Any], ...]

    def start(self) -> None:
        """Makes what all episodes share, and tries what each episode needs.

        Raises:
            ConfigError: this fails.
        """

    async def open(self) -> OpenTools:
        """Opens the tools for one episode.

        Raises:
            ToolStartError: this fails.
        """

    async def close(self) -> None:
        """Ends what all episodes share."""


async def _close_nothing() -> None:
    """Does nothing."""


def function_call(
    name: str,
    function: Callable[..., Any],
    seconds: float | None,
    failures: FailureLog,
    call_in_own_thread: Callable[[Callable[..., Any], Mapping[str, Any], float | None], Awaitable[Outcome]],
) -> ToolCall:
    """Returns the call of a function.

    A function that is async runs in the event loop, any other one by `call_in_own_thread`.
    """
    file = source_file(function)
    place = f"tool {name} ({file})" if file else f"tool {name}"

    async def call(arguments: Mapping[str, Any]) -> Outcome:
        if inspect.iscoroutinefunction(function):
            return await call_in_loop(function, arguments, seconds, failures.blocking_calls, place)
        return await call_in_own_thread(function, arguments, seconds)

    return call


class FunctionSource:
    """A function of the user, the same one in all episodes."""

    def __init__(
        self, place: str, path: str, function: Callable[..., Any], env: EnvConfig, failures: FailureLog
    ) -> None:
        name = path.rpartition(":")[2]
        self.place = place
        self.schemas: tuple[dict[str, Any], ...] = (function_schema(place, name, function),)
        self._threads = DaemonThreads(f"tool {name}")
        call = function_call(name, function, env.tool_timeout_s, failures, self._threads.call)
        self.tools = OpenTools({name: call}, _close_nothing, {name: function})

    def start(self) -> None:
        """Does nothing."""

    async def open(self) -> OpenTools:
        """Returns the function."""
        return self.tools

    async def close(self) -> None:
        """Ends the threads."""
        self._threads.stop()


def method_schemas(place: str, kind: type) -> dict[str, dict[str, Any]]:
    """Returns the schemas of the public methods with a docstring, by their names.

    Raises:
        ConfigError: as `function_schema`.
    """
    return {
        name: function_schema(place, name, _method_of_class(kind, name))
        for name in public_methods(kind)
        if inspect.getdoc(getattr(kind, name))
    }


def public_methods(kind: type) -> list[str]:
    """Returns the names of the public methods of a class.

    They are in the order of their definition, those of base classes first.
    """
    names = dict.fromkeys(name for base in reversed(kind.__mro__[:-1]) for name in vars(base))
    method_types = (FunctionType, staticmethod, classmethod)
    return [
        name
        for name in names
        if not name.startswith("_")
        and name not in PROTOCOL_METHODS
        and isinstance(inspect.getattr_static(kind, name), method_types)
    ]


def _method_of_class(kind: type, name: str) -> Callable[..., Any]:
    """Returns a method whose signature lacks the instance."""
    method: Callable[..., Any] = getattr(kind, name)
    is_plain = isinstance(inspect.getattr_static(kind, name), FunctionType)
    return MethodType(method, kind) if is_plain else method


def open_methods(
    instance: Any, methods: Mapping[str, str], env: EnvConfig, failures: FailureLog, thread: DaemonThread
) -> OpenTools:
    """Opens methods of an object as tools, which run one after another.

    Closing the tools stops the thread. The object stays open.

    Args:
        methods: name of the method by the name of the tool.
        thread: runs the methods that are not async.
    """
    turn = asyncio.Lock()

    def in_turn(call: ToolCall) -> ToolCall:
        async def wait_and_call(arguments: Mapping[str, Any]) -> Outcome:
            async with turn:
                return await call(arguments)

        return wait_and_call

    functions = {name: getattr(instance, method) for name, method in methods.items()}
    calls = {
        name: in_turn(function_call(name, function, env.tool_timeout_s, failures, partial(call_in_thread, thread)))
        for name, function in functions.items()
    }

    async def close() -> None:
        thread.stop()

    return OpenTools(calls, close, functions)


class ClassSource:
    """A class of the user, with one instance for each episode.

    Every public method with a docstring is a tool. A class whose only public method is `run` is one tool with the name
    of the class.

    Raises:
        ConfigError: no method has a docstring, or a method has no schema, or the constructor takes more than the `env`
            section.
    """

    def __init__(self, place: str, path: str, kind: type, env: EnvConfig, failures: FailureLog) -> None:
        self.place, self.kind, self.env, self.failures = place, kind, env, failures
        name = path.rpartition(":")[2]
        if public_methods(kind) == ["run"]:
            self.methods = {name: "run"}
            self.schemas: tuple[dict[str, Any], ...] = (run_schema(place, name, kind),)
        else:
            schemas = method_schemas(place, kind)
            self.methods = {method: method for method in schemas}
            self.schemas = tuple(schemas.values())
        if not self.schemas:
            raise ConfigError(
                f"{place}: no public method of the class has a docstring; write a docstring that describes the tool "
                "to the model in each method that is a tool"
            )
        self.arguments = constructor_arguments(place, kind, env)

    def start(self) -> None:
        """Makes an instance and closes it."""

        async def open_and_close() -> None:
            await (await self.open()).close()

        try:
            run_in_new_loop(open_and_close())
        except ToolStartError as error:
            raise ConfigError(str(error)) from error

    async def open(self) -> OpenTools:
        """Makes an instance, in the thread of its methods."""
        instances: list[Any] = []
        thread = DaemonThread(f"tools of {self.kind.__name__}")
        seconds = self.env.tool_timeout_s
        try:
            outcome = await call_in_thread(thread, lambda: instances.append(self.kind(*self.arguments)), {}, seconds)
        except asyncio.CancelledError:
            thread.stop()
            raise
        if isinstance(outcome, BaseException):
            thread.stop()
            raise ToolStartError(f"{self.place}: creating the tool failed: {describe_exception(outcome)}") from outcome
        tools = open_methods(instances[0], self.methods, self.env, self.failures, thread)
        if not callable(getattr(self.kind, "close", None)):
            return tools
        name, close_instance = f"{self.kind.__name__}.close", instances[0].close
        call_close = function_call(name, close_instance, seconds, self.failures, partial(call_in_thread, thread))

        async def close() -> None:
            try:
                outcome = await call_close({})
                if isinstance(outcome, BaseException):
                    self.failures.warn_of_failure(name, outcome, close_instance)
            finally:
                await tools.close()

        return replace(tools, close=close)

    async def close(self) -> None:
        """Does nothing."""


def constructor_arguments(place: str, kind: type, env: EnvConfig) -> tuple[Any, ...]:
    """Returns the arguments of a constructor that takes nothing or the `env` section."""
    parameters = list(inspect.signature(kind).parameters.values())
    required = [
        each
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if len(required) > 1:
        names = ", ".join(each.name for each in required)
        raise ConfigError(f"{place}: the constructor takes ({names}); let it take nothing, or the env section")
    return (env,) if required else ()


def run_schema(place: str, name: str, kind: Any) -> dict[str, Any]:
    """Returns the schema of a class that is one tool, with the method `run`.

    The first paragraph of the class describes it.
    """
    description = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split()) if kind.__doc__ else None
    return function_schema(place, name, _method_of_class(kind, "run"), description)


class BuiltinSource:
    """A built-in tool, the same one in all episodes.

    A function is fast and runs in the event loop. A class with `run` and `close` runs in a thread for each core.
    """

    def __init__(self, place: str, name: str, env: EnvConfig) -> None:
        self.place, self.name, self.env = place, name, env
        self.tool: Any = TOOLS.load(name)
        self._executor: ThreadPoolExecutor | None = None
        self._function: Callable[..., Any] = self.tool
        self._close_tool: Callable[[], None] = lambda: None
        self._is_class = inspect.isclass(self.tool)
        if self._is_class:
            self.schemas: tuple[dict[str, Any], ...] = (run_schema(place, name, self.tool),)
        else:
            self.schemas = (function_schema(place, name, self.tool),)

    def start(self) -> None:
        """Makes the tool."""
        if self._is_class:
            instance = self.tool(self.env)
            self._executor = ThreadPoolExecutor(len(sched_getaffinity(0)), f"tool {self.name}")
            self._function, self._close_tool = instance.run, instance.close

    async def open(self) -> OpenTools:
        """Returns the tool."""
        return OpenTools({self.name: self._call}, _close_nothing, {self.name: self._function})

    async def _call(self, arguments: Mapping[str, Any]) -> Outcome:
        try:
            if self._executor is None:
                return result_text(self._function(**arguments))
            call = partial(self._function, **arguments)
            return result_text(await asyncio.get_running_loop().run_in_executor(self._executor, call))
        except Exception as error:  # such as a sandbox that fails
            return error

    async def close(self) -> None:
        """Waits for the calls, and closes the tool."""
        if self._executor is not None:
            await asyncio.to_thread(self._executor.shutdown)
        self._close_tool()


def run_in_new_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in a thread with a new event loop, and returns its value."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, coroutine).result()


def make_user_source(place: str, path: str, env: EnvConfig, failures: FailureLog) -> FunctionSource | ClassSource:
    """Makes the source of a tool `module:function` or `module:Class`.

    Raises:
        ConfigError: the tool does not exist, or has no schema.
    """
    found = load_user_object("env.tools", path)
    if inspect.isclass(found):
        return ClassSource(place, path, found, env, failures)
    if callable(found):
        return FunctionSource(place, path, found, env, failures)
    raise ConfigError(f"{place}: {found!r} is neither a function nor a class")
