"""Adapts classes and functions of users to the `Environment` protocol.

class with reset and step           every turn without a tool call goes to step
class with reset, without step      a turn without a tool call ends the episode (TRL's `environment_factory`)
function (turns, example)           called after every turn with all turns so far
"""

import copy
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from envs.environments.calls import CallRunner, EnvironmentTimeout, is_async
from envs.environments.interface import Environment, EpisodeError, Observation, Step
from envs.environments.replies import read_observation, read_step
from envs.example import Example, Message
from envs.tools.results import result_text

Result = TypeVar("Result")
log = logging.getLogger(__name__)
_reported_places: set[str] = set()


@dataclass
class ClassEnvironment:
    """Environment of an instance with `reset`, `step` and where present `close`.

    The reset makes the instance, in the thread of its methods. Errors of `close` are only logged.

    Args:
        name: `module:Class`, for messages.
        make_instance: calls the class with its options.
        instance: None before the reset.
        can_continue: False after a call that may still run.
    """

    name: str
    kind: type[Any]
    make_instance: Callable[[], Any]
    runner: CallRunner
    instance: Any = None
    can_continue: bool = True

    async def reset(self, example: Example) -> Observation:
        place = f"{self.name}.reset"

        async def begin() -> Any:
            self.instance = self.make_instance()
            arguments, columns = self.reset_arguments(example)
            return await self.instance.reset(*arguments, **columns)

        def begin_sync() -> Any:
            self.instance = self.make_instance()
            arguments, columns = self.reset_arguments(example)
            return self.instance.reset(*arguments, **columns)

        function = begin if is_async(self.kind.reset) else begin_sync
        return await self.call(place, function, read=lambda value: read_observation(value, place))

    def reset_arguments(self, example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the positional and keyword arguments of `reset`: the example."""
        return ((example,) if inspect.signature(self.instance.reset).parameters else ()), {}

    async def step(self, turn: Message) -> Step:
        place = f"{self.name}.step"
        return await self.call(
            place, self.instance.step, copy_turn(turn), read=lambda value: read_step(value, turn, place)
        )

    async def call_method(self, name: str, arguments: dict[str, Any]) -> str:
        """Calls a method that is a tool; returns its result as text."""
        method = getattr(self.instance, name)
        if is_async(method):

            async def function() -> Any:
                return await method(**arguments)

            return await self.call(f"{self.name}.{name}", function, read=result_text)
        return await self.call(f"{self.name}.{name}", lambda: method(**arguments), read=result_text)

    async def call(
        self, place: str, function: Callable[..., Any], *arguments: Any, read: Callable[[Any], Result]
    ) -> Result:
        """Calls a function of the instance as `CallRunner.call`."""
        try:
            return await self.runner.call(place, function, *arguments, read=read)
        except EnvironmentTimeout:
            self.can_continue = False
            raise

    async def close(self) -> None:
        try:
            if self.instance is not None and self.can_continue and "close" in dir(self.kind):
                await self.call(f"{self.name}.close", self.instance.close, read=lambda value: None)
        except EpisodeError as error:
            if self.name not in _reported_places:
                _reported_places.add(self.name)
                log.warning("%s", error)
        finally:
            self.runner.close()


class MethodsEnvironment(ClassEnvironment):
    """Environment of an instance without `step`, whose methods are tools."""

    def reset_arguments(self, example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the columns of the example that `reset` takes, by name.

        Raises:
            TypeError: the row lacks a column without a default.
        """
        columns = {"prompt": list(example.messages), "answer": example.answer, **example.row_data, "example": example}
        parameters = inspect.signature(self.instance.reset).parameters.values()
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            named = {each.name for each in parameters}
            return (), {name: value for name, value in columns.items() if name != "example" or name in named}
        missing = [each.name for each in parameters if each.name not in columns and each.default is each.empty]
        if missing:
            raise TypeError(f"reset takes {missing[0]}, but the row has only {', '.join(columns)}")
        return (), {each.name: columns[each.name] for each in parameters if each.name in columns}

    async def step(self, turn: Message) -> Step:
        return Step()


@dataclass
class ScoredEnvironment:
    """Environment whose instance holds the reward so far; a turn's reward is the increase.

    read_score: method or attribute of the instance, as TRL's classes have it: `get_reward()` or `reward`.
    """

    inner: Environment
    methods: MethodsEnvironment
    score: float = 0.0

    async def reset(self, example: Example) -> Observation:
        return await self.inner.reset(example)

    async def step(self, turn: Message) -> Step:
        step = await self.inner.step(turn)
        place = f"{self.methods.name}.get_reward"
        scored = await self.methods.call(
            place, self._read_score, read=lambda value: None if value is None else read_step((None, value), turn, place)
        )
        if scored is None:
            return step
        previous, self.score = self.score, scored.reward or 0.0
        return replace(step, reward=self.score - previous)

    def _read_score(self) -> Any:
        instance = self.methods.instance
        score = getattr(instance, "get_reward" if "get_reward" in dir(instance) else "reward", None)
        return score() if callable(score) else score

    async def close(self) -> None:
        await self.inner.close()


@dataclass
class FunctionEnvironment:
    """Environment of a function that gets all turns so far and the example."""

    name: str
    function: Callable[..., Any]
    runner: CallRunner
    turns: list[Message] = field(default_factory=list)
    example: Example | None = None

    async def reset(self, example: Example) -> Observation:
        self.example = example
        return Observation()

    async def step(self, turn: Message) -> Step:
        self.turns.append(turn)
        turns = [copy_turn(each) for each in self.turns]
        return await self.runner.call(
            self.name, self.function, turns, self.example, read=lambda value: read_step(value, turn, self.name)
        )

    async def close(self) -> None:
        self.runner.close()


def copy_turn(turn: Message) -> Message:
    """Returns a copy that a function of a user may change."""
    return copy.deepcopy(turn) if turn.keys() & {"tool_calls", "malformed"} else dict(turn)
