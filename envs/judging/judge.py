"""Judge of a task: its own reward, or the rewards that `env.reward` names. No torch here.

Of several, each is a part of the verdict by its name, and the score is their sum, weighted by `env.reward_weights`.
"""

from dataclasses import replace

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.example import Completion, Example, Outcome, Reward
from envs.judging.outcome import Judge, checked, number
from envs.judging.second_opinion import with_second_opinion
from envs.reward_forms import NotApplicable
from envs.rewards import NamedReward, find_rewards, find_second_opinion, judges
from envs.task import Task


def make_judge(task: Task) -> Judge:
    """The task's judge with `env.reward`, `env.reward_second_opinion` and `env.reward_weights` applied."""
    named, env = find_rewards(task.env), task.env
    if isinstance(env.reward, list):
        chosen = _combined(named, env)
    elif named:
        function = named[0].function
        chosen = lambda completion, example: function(completion, example, env)  # noqa: E731
    else:
        chosen = task.reward
    second, weights = find_second_opinion(env), env.reward_weights
    if second is not None:
        chosen = with_second_opinion(chosen, second, env)
    if not isinstance(weights, dict) or not weights:
        return chosen
    return lambda completion, example: weighted(chosen(completion, example), weights)


def judges_in_process(task: Task) -> bool:
    """Whether judging is safe enough to need no worker process."""
    if task.members:
        return all(judges_in_process(member) for member in task.members.values())
    named, second = find_rewards(task.env), find_second_opinion(task.env)
    first = all(each.in_process for each in named) if named else task.in_process
    return first and (second is None or second.in_process)


def warm_up(task: Task) -> None:
    """Imports what the judges of a task would import with their first completion, once for all worker processes."""
    for each in (task, *task.members.values()):
        each.warm_up()
        for named in judges(each.env):
            if named.warm_up is not None:
                named.warm_up()


def least_score(task: Task) -> float:
    """The score of a completion that could not be judged because of what it says."""
    named = find_rewards(task.env)
    if not named:
        return task.min_score
    least = [task.min_score if each.min_score is None else each.min_score for each in named]
    return sum(weight * score for weight, score in zip(_weights(task.env, named), least, strict=True))


def _weights(env: EnvConfig, named: list[NamedReward]) -> list[float]:
    """Weights of the rewards; 1 where none is given."""
    return env.reward_weights if isinstance(env.reward_weights, list) else [1.0] * len(named)


def part_names(paths: list[str]) -> list[str]:
    """Names of the rewards in the verdict: of their functions, with the module where two are the same."""
    short = [path.rpartition(":")[2] for path in paths]
    return [path if short.count(name) > 1 else name for path, name in zip(paths, short, strict=True)]


def part_weights(env: EnvConfig) -> dict[str, float]:
    """Weights of the verdict's parts, as the config has them; empty where it has none."""
    if isinstance(env.reward_weights, dict) and env.reward_weights:
        return env.reward_weights
    if not isinstance(env.reward, list):
        return {}
    weights = env.reward_weights or [1.0] * len(env.reward)
    return dict(zip(part_names(env.reward), weights, strict=True))


def _combined(named: list[NamedReward], env: EnvConfig) -> Judge:
    """One verdict of several: their scores as parts, the weighted sum, and the worst of their outcomes.

    `accuracy` is that of the reward of this name, else of the first: its own part of that name, or whether its score
    is at least 1. A reward that does not apply to the row has no part and counts nothing.
    """
    names, weights = part_names([each.name for each in named]), _weights(env, named)

    def judge(completion: Completion, example: Example) -> Reward:
        scores, accuracies, score = dict[str, float](), dict[str, float](), 0.0
        outcomes, inapplicable = list[str](), list[NotApplicable]()
        for name, weight, each in zip(names, weights, named, strict=True):
            try:
                verdict = each.function(completion, example, env)
            except NotApplicable as error:
                inapplicable.append(error)
                continue
            scores[name], parts = checked(verdict, f"reward {name}")
            accuracies[name] = parts.get("accuracy", float(scores[name] >= 1.0))
            outcomes.append(verdict.outcome)
            score += weight * scores[name]
        if not scores:
            raise inapplicable[0]
        accuracy = accuracies.get("accuracy", next(iter(accuracies.values())))
        outcome: Outcome = "invalid" if "invalid" in outcomes else "scored"
        return Reward(score, scores | {"accuracy": accuracy}, outcome)

    return judge


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
