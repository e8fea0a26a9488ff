"""Named rewards: functions that `env.reward` finds by name, of this project or of the user's. No torch here.

A named reward is a function of a module in `envs/verifiers` under the `reward` decorator; `env.reward=NAME` puts
it in the place of the task's own, and its system prompt in the place of the task's. `envs.judging.judge` makes the
judge of a task from them.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.example import Example
from envs.reward_forms import (
    FORMS,
    RewardFunction,
    Signature,
    declared_minimum,
    reward_function,
    signature_of,
)
from envs.user_code import is_own, load_own


@dataclass(frozen=True)
class NamedReward:
    """A reward that any task can take.

    system_prompt: asks for the form that the reward reads; None leaves the task's own.
    min_score: the least that it gives, for completions it could not get through; None: the task's. Where lower scores
        are seen, these count.
    in_process: true only where judging cannot hang, crash or take long.
    warm_up: imports what the first verification would, once, before worker processes are forked.
    signature: of a function of the user's, what it asks for.
    """

    name: str
    function: RewardFunction
    system_prompt: str | None = None
    min_score: float | None = None
    in_process: bool = False
    warm_up: Callable[[], None] | None = None
    signature: Signature | None = None


_REGISTRY: dict[str, NamedReward] = {}
_RENAMED = {"compat_math_verify": "math_verify"}


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
    """Names in `env.reward`; none where the task judges."""
    if env.reward is None:
        return []
    return env.reward if isinstance(env.reward, list) else [env.reward]


def judge_names(env: EnvConfig) -> list[str]:
    """Names of the rewards that may judge a completion, the second opinion included."""
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
        return _own_reward(name, key)
    known = known_rewards()
    if name in _RENAMED:
        raise ConfigError(f"{key}={name!r} is called {_RENAMED[name]} now: set {key}={_RENAMED[name]}")
    if name not in _REGISTRY:
        raise ConfigError(
            f"{key}={name!r} is not a known reward; known: {', '.join(known) or 'none'}; "
            "a function of your own is named module:function"
        )
    return _REGISTRY[name]


def check_columns(env: EnvConfig, examples: Sequence[Example]) -> None:
    """Raises ConfigError where a user's reward asks for a column that no example has."""
    for named in judges(env):
        if named.signature is not None:
            named.signature.check(examples, env.dataset)


def reads_progress(env: EnvConfig) -> bool:
    """Whether a reward asks for what only `CompletionInRun` has."""
    return any(each.signature is not None and each.signature.reads_progress for each in judges(env))


def judges(env: EnvConfig) -> list[NamedReward]:
    """The rewards of `judge_names`. Raises ConfigError as `find_reward`."""
    second = find_second_opinion(env)
    return find_rewards(env) if second is None else [*find_rewards(env), second]


def asked_form(env: EnvConfig) -> str | None:
    """The system prompt of the reward; of several, that of the first that has one."""
    return next((each.system_prompt for each in find_rewards(env) if each.system_prompt is not None), None)


def _own_reward(path: str, key: str) -> NamedReward:
    found, place = load_own(key, path), f"{key}={path}"
    ancestry = (found if inspect.isclass(found) else type(found)).__mro__
    if any(cls.__module__.startswith("torchrl.") for cls in ancestry):
        from envs.torchrl_rewards import ParserReward

        found = ParserReward(path, found)
    if inspect.isclass(found):
        raise ConfigError(
            f"{place}: {found!r} is a class; make one in its module (judge = {found.__name__}()) and name that; {FORMS}"
        )
    if not callable(found):
        raise ConfigError(f"{place}: {found!r} is no function; {FORMS}")
    warm_up = getattr(found, "warm_up", None)
    if warm_up is not None and not callable(warm_up):
        raise ConfigError(f"{place}: its warm_up is {warm_up!r}; set a function that loads what it needs")
    signature, least = signature_of(place, found), declared_minimum(place, found)
    function = reward_function(signature, found)
    return NamedReward(path, function, min_score=least, warm_up=warm_up, signature=signature)
