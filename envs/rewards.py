"""Which function judges: the task's own, a named reward, or a function of the user's. No torch here.

A named reward is a function of a module in `envs/verifiers` under the `reward` decorator; `env.reward=NAME` puts
it in the place of the task's own, and its system prompt in the place of the task's.
"""

import asyncio
import inspect
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from config.env import EnvConfig
from config.errors import ConfigError
from envs.task import Completion, Example, Reward, Task

RewardFunction = Callable[[Completion, Example, EnvConfig], Reward]
Judge = Callable[[Completion, Example], Reward]


@dataclass(frozen=True)
class NamedReward:
    """A reward that any task can take.

    system_prompt: asks for the form that the reward reads; None leaves the task's own.
    min_score: the least that it gives, for completions it could not get through; None: the task's.
    in_process: true only where judging cannot hang, crash or take long.
    """

    name: str
    function: RewardFunction
    system_prompt: str | None = None
    min_score: float | None = None
    in_process: bool = False


_REGISTRY: dict[str, NamedReward] = {}


def reward(
    name: str,
    *,
    system_prompt: str | None = None,
    min_score: float | None = None,
    in_process: bool = False,
) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator: makes a function (completion, example, env) -> Reward available as `env.reward=name`."""

    def decorate(function: RewardFunction) -> RewardFunction:
        _REGISTRY[name] = NamedReward(name, function, system_prompt, min_score, in_process)
        return function

    return decorate


def known_rewards() -> list[str]:
    import envs.rules
    import envs.verifiers

    for module in iter_modules(envs.verifiers.__path__):
        import_module(f"envs.verifiers.{module.name}")
    return sorted(_REGISTRY)


@cache
def find_reward(name: str | None) -> NamedReward | None:
    """What `env.reward` names; None when it is unset: the task judges.

    Raises:
        ConfigError: an unknown name, a module or function that is not there, a wrong signature.
    """
    if name is None:
        return None
    if ":" in name:
        return NamedReward(name, _own_function(name))
    known = known_rewards()
    if name not in _REGISTRY:
        raise ConfigError(
            f"env.reward={name!r} is not a known reward; known: {', '.join(known) or 'none'}; "
            "a function of your own is named module:function"
        )
    return _REGISTRY[name]


def _own_function(path: str) -> RewardFunction:
    module_name, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = vars(import_module(module_name)).get(attribute)
    except ImportError as error:
        raise ConfigError(f"env.reward={path}: importing {module_name!r} failed: {error}") from error
    if not callable(found):
        raise ConfigError(f"env.reward={path}: {module_name} has no function {attribute!r}")
    required = [
        parameter
        for parameter in inspect.signature(found).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) not in (2, 3):
        raise ConfigError(
            f"env.reward={path}: takes {len(required)} arguments; a reward takes (completion, example) or "
            "(completion, example, env)"
        )
    return _adapted(path, found, len(required) == 3)


def _adapted(path: str, function: Callable[..., Any], takes_env: bool) -> RewardFunction:
    def call(completion: Completion, example: Example, env: EnvConfig) -> Reward:
        result = function(completion, example, env) if takes_env else function(completion, example)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        if isinstance(result, Reward):
            return result
        if isinstance(result, bool | int | float):
            return Reward(float(result))
        raise TypeError(f"env.reward={path} returned {result!r}; a number or a Reward is needed")

    return call


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def judges_in_process(task: Task) -> bool:
    """Whether judging is safe enough to need no worker process."""
    named = find_reward(task.env.reward)
    return task.in_process if named is None else named.in_process


def least_score(task: Task) -> float:
    """The score of a completion that could not be judged because of what it says."""
    named = find_reward(task.env.reward)
    return task.min_score if named is None or named.min_score is None else named.min_score


def make_judge(task: Task) -> Judge:
    """The task's judge with `env.reward` and `env.reward_weights` applied."""
    named, env = find_reward(task.env.reward), task.env

    def chosen(completion: Completion, example: Example) -> Reward:
        return task.reward(completion, example) if named is None else named.function(completion, example, env)

    if not env.reward_weights:
        return task.reward if named is None else chosen
    return lambda completion, example: weighted(chosen(completion, example), env.reward_weights)


def weighted(verdict: Reward, weights: dict[str, float]) -> Reward:
    """The verdict with the weighted sum of its parts as score; parts without a weight count nothing."""
    missing = sorted(set(weights) - set(verdict.parts))
    if missing:
        raise ConfigError(
            f"env.reward_weights.{missing[0]}: the reward has no such part; it gives "
            f"{', '.join(sorted(verdict.parts)) or 'none'}"
        )
    return replace(verdict, score=sum(weight * verdict.parts[name] for name, weight in weights.items()))
