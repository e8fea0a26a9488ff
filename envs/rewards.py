"""Registry of rewards by name, with lookup of built-in and user rewards for `env.reward`.

Built-in rewards are functions of modules in `envs/verifiers` under the `reward` decorator. `env.reward=NAME` replaces
the task's reward and system prompt by those of the named reward. `envs.reward_workers.task_scorer` combines named
rewards. The rewards of `MODEL_REWARDS` have no function here: the run's loop scores them. This module does not import
torch.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from config.schema.model_rewards import MODEL_REWARDS
from envs.example import Example
from envs.reward_signatures import (
    ACCEPTED_FORMS,
    RewardFunction,
    RewardSignature,
    declared_min_score,
    make_reward_function,
    read_signature,
)
from envs.user_code import is_user_code, load_user_object


@dataclass(frozen=True)
class NamedReward:
    """Reward function with its name and settings, for any task.

    system_prompt: prompt for the answer format that the reward reads; None keeps the task's prompt.
    min_score: lowest score of the reward, also the score of completions on which the reward crashes; None takes the
        task's. If the run has lower scores, the lowest score of the run counts.
    in_process: True only if the reward cannot hang, crash or take long.
    warm_up: imports modules once before the worker processes are forked.
    signature: parameters of a user function; None for built-in rewards.
    """

    name: str
    function: RewardFunction
    system_prompt: str | None = None
    min_score: float | None = None
    in_process: bool = False
    warm_up: Callable[[], None] | None = None
    signature: RewardSignature | None = None


_REGISTRY: dict[str, NamedReward] = {}
_RENAMED_REWARDS = {"compat_math_verify": "math_verify"}


def reward(
    name: str,
    *,
    system_prompt: str | None = None,
    min_score: float | None = None,
    in_process: bool = False,
    warm_up: Callable[[], None] | None = None,
) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator that registers a function (completion, example, env) -> Reward as `env.reward=name`."""

    def decorate(function: RewardFunction) -> RewardFunction:
        _REGISTRY[name] = NamedReward(name, function, system_prompt, min_score, in_process, warm_up)
        return function

    return decorate


def known_rewards() -> list[str]:
    """Returns the names of all registered rewards."""
    import envs.verifiers

    for module in iter_modules(envs.verifiers.__path__):
        import_module(f"envs.verifiers.{module.name}")
    return sorted(_REGISTRY)


def reward_names(env: EnvConfig) -> list[str]:
    """Returns the names in `env.reward`; empty if the task's own reward applies."""
    if env.reward is None:
        return []
    return env.reward if isinstance(env.reward, list) else [env.reward]


def all_reward_names(env: EnvConfig) -> list[str]:
    """Returns the names in `env.reward` and `env.fallback_reward`."""
    fallback = env.fallback_reward
    return reward_names(env) if fallback is None else [*reward_names(env), fallback]


def model_reward_names(env: EnvConfig) -> list[str]:
    """Returns the names in `env.reward` that the run's loop scores, in their order."""
    return [name for name in reward_names(env) if name in MODEL_REWARDS]


def find_rewards(env: EnvConfig) -> list[NamedReward]:
    """Returns the rewards of `reward_names` without model rewards. Raises ConfigError as `find_reward`."""
    return [find_reward(name) for name in reward_names(env) if name not in MODEL_REWARDS]


def find_fallback_reward(env: EnvConfig) -> NamedReward | None:
    """Returns the reward of `env.fallback_reward`, or None. Raises ConfigError as `find_reward`."""
    name = env.fallback_reward
    return None if name is None else find_reward(name, "env.fallback_reward")


@cache
def find_reward(name: str, key: str = "env.reward") -> NamedReward:
    """Finds a reward by its name.

    key: config key with the name, for messages.

    Raises:
        ConfigError: the name, module or function is unknown, or the signature is wrong.
    """
    if is_user_code(name):
        return _find_user_reward(name, key)
    known = known_rewards()
    if name in _RENAMED_REWARDS:
        raise ConfigError(
            f"{key}={name!r}: the reward is now called {_RENAMED_REWARDS[name]}; set {key}={_RENAMED_REWARDS[name]}"
        )
    if name not in _REGISTRY:
        raise ConfigError(
            f"{key}={name!r}: no such reward; choose one of {', '.join((*known, *MODEL_REWARDS))}, or name a function "
            "of your own as module:function"
        )
    return _REGISTRY[name]


def check_columns(env: EnvConfig, examples: Sequence[Example]) -> None:
    """Raises ConfigError if a user reward takes a column that no example has."""
    for named in find_all_rewards(env):
        if named.signature is not None:
            named.signature.check(examples, env.dataset)


def reads_progress(env: EnvConfig) -> bool:
    """Whether a reward reads fields that only `CompletionInRun` has."""
    return any(each.signature is not None and each.signature.reads_progress for each in find_all_rewards(env))


def find_all_rewards(env: EnvConfig) -> list[NamedReward]:
    """Returns the rewards of `all_reward_names`. Raises ConfigError as `find_reward`."""
    fallback = find_fallback_reward(env)
    return find_rewards(env) if fallback is None else [*find_rewards(env), fallback]


def reward_system_prompt(env: EnvConfig) -> str | None:
    """Returns the system prompt of the first reward that has one, or None."""
    return next((each.system_prompt for each in find_rewards(env) if each.system_prompt is not None), None)


def _find_user_reward(path: str, key: str) -> NamedReward:
    """Loads a user's reward function, callable object or TorchRL parser."""
    found, place = load_user_object(key, path), f"{key}={path}"
    ancestry = (found if inspect.isclass(found) else type(found)).__mro__
    if any(cls.__module__.startswith("torchrl.") for cls in ancestry):
        from envs.torchrl_rewards import ParserReward

        found = ParserReward(path, found)
    if inspect.isclass(found):
        raise ConfigError(
            f"{place}: {found!r} is a class; create an instance in its module (judge = {found.__name__}()) "
            f"and name the instance; {ACCEPTED_FORMS}"
        )
    if not callable(found):
        raise ConfigError(f"{place}: {found!r} is not a function; {ACCEPTED_FORMS}")
    warm_up = getattr(found, "warm_up", None)
    if warm_up is not None and not callable(warm_up):
        raise ConfigError(
            f"{place}: warm_up is {warm_up!r}; set warm_up to a function that loads the resources of the reward"
        )
    signature, min_score = read_signature(place, found), declared_min_score(place, found)
    function = make_reward_function(signature, found)
    return NamedReward(path, function, min_score=min_score, warm_up=warm_up, signature=signature)
