"""Which function judges: the task's own, a named reward, a function of the user's, or several. No torch here.

A named reward is a function of a module in `envs/verifiers` under the `reward` decorator; `env.reward=NAME` puts
it in the place of the task's own, and its system prompt in the place of the task's. Of several, each is a part of
the verdict by its name, and the score is their sum, weighted by `env.reward_weights`.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, SupportsFloat, get_args

from config.env import EnvConfig
from config.errors import ConfigError
from envs.own import is_own, load_own
from envs.task import Completion, Example, Outcome, Reward, Task

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
    import envs.verifiers

    for module in iter_modules(envs.verifiers.__path__):
        import_module(f"envs.verifiers.{module.name}")
    return sorted(_REGISTRY)


def reward_names(env: EnvConfig) -> list[str]:
    """What `env.reward` names: nothing where the task judges, one reward, or several."""
    if env.reward is None:
        return []
    return env.reward if isinstance(env.reward, list) else [env.reward]


def find_rewards(env: EnvConfig) -> list[NamedReward]:
    """The rewards of `reward_names`. Raises ConfigError as `find_reward`."""
    return [find_reward(name) for name in reward_names(env)]


@cache
def find_reward(name: str) -> NamedReward:
    """A reward by name.

    Raises:
        ConfigError: an unknown name, a module or function that is not there, a wrong signature.
    """
    if is_own(name):
        return NamedReward(name, _own_function(name))
    known = known_rewards()
    if name not in _REGISTRY:
        raise ConfigError(
            f"env.reward={name!r} is not a known reward; known: {', '.join(known) or 'none'}; "
            "a function of your own is named module:function"
        )
    return _REGISTRY[name]


def asked_form(env: EnvConfig) -> str | None:
    """The system prompt of the reward; of several, that of the first that has one."""
    return next((each.system_prompt for each in find_rewards(env) if each.system_prompt is not None), None)


def _own_function(path: str) -> RewardFunction:
    found = load_own("env.reward", path)
    if _is_of_torchrl(found):
        from envs.torchrl_rewards import ParserReward

        return _adapted(path, ParserReward(path, found), takes_env=False)
    if not callable(found):
        raise ConfigError(f"env.reward={path}: {found!r} is no function")
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError as error:  # some that are written in C have none
        raise ConfigError(
            f"env.reward={path}: {found!r} does not say what it takes; wrap it in a def"
        ) from error
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) not in (2, 3):
        raise ConfigError(
            f"env.reward={path}: takes {len(required)} arguments; a reward takes (completion, example) or "
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


def judges_in_process(task: Task) -> bool:
    """Whether judging is safe enough to need no worker process."""
    named = find_rewards(task.env)
    return all(each.in_process for each in named) if named else task.in_process


def least_score(task: Task) -> float:
    """The score of a completion that could not be judged because of what it says."""
    named = find_rewards(task.env)
    if not named:
        return task.min_score
    least = [task.min_score if each.min_score is None else each.min_score for each in named]
    return sum(weight * score for weight, score in zip(weights_of(task.env), least, strict=True))


def weights_of(env: EnvConfig) -> list[float]:
    """What each of several rewards counts; 1 where nothing is said, and for one reward alone."""
    if isinstance(env.reward_weights, list):
        return env.reward_weights
    return [1.0] * len(reward_names(env))


def make_judge(task: Task) -> Judge:
    """The task's judge with `env.reward` and `env.reward_weights` applied."""
    named, env = find_rewards(task.env), task.env
    if isinstance(env.reward, list):
        chosen = _combined(named, env)
    elif named:
        function = named[0].function
        chosen = lambda completion, example: function(completion, example, env)  # noqa: E731
    else:
        chosen = task.reward
    weights = env.reward_weights
    if not isinstance(weights, dict) or not weights:
        return chosen
    return lambda completion, example: weighted(chosen(completion, example), weights)


def part_names(paths: list[str]) -> list[str]:
    """What several rewards are called in the verdict: functions by their name, or with their module where two have
    the same."""
    short = [path.rpartition(":")[2] for path in paths]
    return [path if short.count(name) > 1 else name for path, name in zip(paths, short, strict=True)]


def _combined(named: list[NamedReward], env: EnvConfig) -> Judge:
    """One verdict of several: their scores as parts, the weighted sum, and the worst of their outcomes.

    `accuracy` is that of the reward of this name, else of the first: its own part of that name, or whether its score
    is at least 1.
    """
    names, weights = part_names([each.name for each in named]), weights_of(env)
    judges_accuracy = names.index("accuracy") if "accuracy" in names else 0

    def judge(completion: Completion, example: Example) -> Reward:
        scores: dict[str, float] = {}
        outcomes: list[str] = []
        accuracy = 0.0
        for place, (name, each) in enumerate(zip(names, named, strict=True)):
            verdict = each.function(completion, example, env)
            scores[name], parts = checked(verdict, f"reward {name}")
            outcomes.append(verdict.outcome)
            if place == judges_accuracy:
                accuracy = parts.get("accuracy", float(scores[name] >= 1.0))
        score = sum(weight * each for weight, each in zip(weights, scores.values(), strict=True))
        return Reward(
            score, scores | {"accuracy": accuracy}, "invalid" if "invalid" in outcomes else "scored"
        )

    return judge


TAKEN = frozenset(
    (
        *("mean", "std", "zero_variance_groups", "errors", "invalid", "length"),
        *("errors_total", "invalid_total", "workers_replaced", "control_tokens"),
    )
)
"""What `reward/...` means in the log, so that no part may be called so."""
LARGEST = 3.4028234663852886e38
"""The largest float32: rewards become tensors of those."""


def number(value: Any, what: str) -> float:
    """A number of Python, numpy or torch (of no or one dimension) as a float.

    Raises:
        TypeError: it is none.
        ValueError: it is not finite in float32.
    """
    if not isinstance(value, SupportsFloat) or isinstance(value, str):
        raise TypeError(f"{what} is {value!r}; a number is needed")
    result = float(value)
    if not abs(result) <= LARGEST:
        raise ValueError(f"{what} is {result}; a number that is finite in float32 is needed")
    return result


def checked(reward: Reward, name: str = "reward") -> tuple[float, dict[str, float]]:
    """Score and parts in plain floats. name: what a message calls the reward.

    Raises:
        TypeError, ValueError: what is no number, or none that is finite in float32; an outcome or a part whose name
            means something else.
    """
    if reward.outcome == "error":
        raise ValueError(f"the {name} itself gave the outcome 'error'")
    if reward.outcome not in get_args(Outcome):
        raise ValueError(f"the {name}'s outcome is {reward.outcome!r}; known: {', '.join(get_args(Outcome))}")
    if not isinstance(reward.parts, dict):
        raise TypeError(f"the {name}'s parts are {reward.parts!r}; {{NAME: number}} is needed")
    for part in reward.parts:
        if not isinstance(part, str) or not part:
            raise TypeError(f"the {name} has a part called {part!r}; a text is needed")
        if part in TAKEN:
            raise ValueError(
                f"the {name} has a part called {part!r}, but reward/{part} is a metric; rename the part"
            )
    parts = {part: number(value, f"the part {part}") for part, value in reward.parts.items()}
    return number(reward.score, f"the {name}'s score"), parts


def weighted(verdict: Reward, weights: dict[str, float]) -> Reward:
    """The verdict with the weighted sum of its parts as score; parts without a weight count nothing."""
    missing = sorted(set(weights) - set(verdict.parts))
    if missing:
        raise ConfigError(
            f"env.reward_weights.{missing[0]}: the reward has no such part; it gives "
            f"{', '.join(sorted(verdict.parts)) or 'none'}"
        )
    score = sum(weight * number(verdict.parts[name], f"the part {name}") for name, weight in weights.items())
    return replace(verdict, score=score)
