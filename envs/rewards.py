"""Named rewards: functions that `env.reward` finds by name, of this project or of the user's. No torch here.

A named reward is a function of a module in `envs/verifiers` under the `reward` decorator; `env.reward=NAME` puts
it in the place of the task's own, and its system prompt in the place of the task's. `envs.judging.judge` makes the
judge of a task from them.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, SupportsFloat

from config.env import EnvConfig
from config.errors import ConfigError
from envs.example import Completion, Example, Reward
from envs.user_code import is_own, load_own

RewardFunction = Callable[[Completion, Example, EnvConfig], Reward]


@dataclass(frozen=True)
class NamedReward:
    """A reward that any task can take.

    system_prompt: asks for the form that the reward reads; None leaves the task's own.
    min_score: the least that it gives, for completions it could not get through; None: the task's.
    in_process: true only where judging cannot hang, crash or take long.
    warm_up: imports what the first verification would, once, before worker processes are forked.
    """

    name: str
    function: RewardFunction
    system_prompt: str | None = None
    min_score: float | None = None
    in_process: bool = False
    warm_up: Callable[[], None] | None = None


_REGISTRY: dict[str, NamedReward] = {}


def reward(
    name: str,
    *,
    system_prompt: str | None = None,
    min_score: float | None = None,
    in_process: bool = False,
    warm_up: Callable[[], None] | None = None,
) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator: makes a function (completion, example, env) -> Reward available as `env.reward=name`."""

    def decorate(function: RewardFunction) -> RewardFunction:
        _REGISTRY[name] = NamedReward(name, function, system_prompt, min_score, in_process, warm_up)
        return function

    return decorate


def known_rewards() -> list[str]:
    import envs.verifiers

    for module in iter_modules(envs.verifiers.__path__):
        import_module(f"envs.verifiers.{module.name}")
    return sorted(_REGISTRY)


def reward_names(env: EnvConfig) -> list[str]:
    """What `env.reward` names: nothing where the task judges, one reward, or several."""
    if env.reward is None:
        return []
    return env.reward if isinstance(env.reward, list) else [env.reward]


def judge_names(env: EnvConfig) -> list[str]:
    """All rewards that may judge a completion: those of `reward_names`, and `env.reward_second_opinion`."""
    second = env.reward_second_opinion
    return reward_names(env) if second is None else [*reward_names(env), second]


def find_rewards(env: EnvConfig) -> list[NamedReward]:
    """The rewards of `reward_names`. Raises ConfigError as `find_reward`."""
    return [find_reward(name) for name in reward_names(env)]


def find_second_opinion(env: EnvConfig) -> NamedReward | None:
    """The reward of `env.reward_second_opinion`, where there is one. Raises ConfigError as `find_reward`."""
    name = env.reward_second_opinion
    return None if name is None else find_reward(name, "env.reward_second_opinion")


@cache
def find_reward(name: str, key: str = "env.reward") -> NamedReward:
    """A reward by name. key: the configuration key that holds the name, for messages.

    Raises:
        ConfigError: an unknown name, a module or function that is not there, a wrong signature.
    """
    if is_own(name):
        return NamedReward(name, _own_function(name, key))
    known = known_rewards()
    if name not in _REGISTRY:
        raise ConfigError(
            f"{key}={name!r} is not a known reward; known: {', '.join(known) or 'none'}; "
            "a function of your own is named module:function"
        )
    return _REGISTRY[name]


def asked_form(env: EnvConfig) -> str | None:
    """The system prompt of the reward; of several, that of the first that has one."""
    return next((each.system_prompt for each in find_rewards(env) if each.system_prompt is not None), None)


def _own_function(path: str, key: str) -> RewardFunction:
    found = load_own(key, path)
    if _is_of_torchrl(found):
        from envs.torchrl_rewards import ParserReward

        return _adapted(path, ParserReward(path, found), takes_env=False)
    if not callable(found):
        raise ConfigError(f"{key}={path}: {found!r} is no function")
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError as error:  # some that are written in C have none
        raise ConfigError(f"{key}={path}: {found!r} does not say what it takes; wrap it in a def") from error
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) not in (2, 3):
        raise ConfigError(
            f"{key}={path}: takes {len(required)} arguments; a reward takes (completion, example) or "
            "(completion, example, env)"
        )
    return _adapted(path, found, len(required) == 3)


def _is_of_torchrl(found: Any) -> bool:
    """Whether it is, or derives from, a class of TorchRL."""
    ancestry = (found if inspect.isclass(found) else type(found)).__mro__
    return any(cls.__module__.startswith("torchrl.") for cls in ancestry)


def _adapted(path: str, function: Callable[..., Any], takes_env: bool) -> RewardFunction:
    def call(completion: Completion, example: Example, env: EnvConfig) -> Reward:
        result = function(completion, example, env) if takes_env else function(completion, example)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        if isinstance(result, Reward):
            return result
        if isinstance(result, SupportsFloat) and not isinstance(result, str):
            return Reward(float(result))
        raise TypeError(f"env.reward={path} returned {result!r}; a number or a Reward is needed")

    return call


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result
