"""Builds a task's scorer from its reward, named rewards, fallback reward and component weights.

Several rewards become components of the verdict under their names, and the score is their sum, weighted by
`env.reward_weights`. A scorer leaves out the rewards of `MODEL_REWARDS`: the run's loop computes their scores, and
`add_model_scores` adds them to the verdict. This module does not import torch.
"""

from dataclasses import replace

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.example import Completion, Example, Outcome, Reward
from envs.group import Verdict
from envs.reward_signatures import RewardNotApplicable
from envs.reward_workers.fallback_reward import with_fallback_reward
from envs.reward_workers.scoring import Scorer, check_reward, finite_float
from envs.rewards import (
    NamedReward,
    find_all_rewards,
    find_fallback_reward,
    find_rewards,
    model_reward_names,
    reward_names,
)
from envs.task import Task


def make_scorer(task: Task) -> Scorer:
    """Builds the task's scorer from `env.reward`, `env.fallback_reward` and `env.reward_weights`."""
    rewards, env = find_rewards(task.env), task.env
    if isinstance(env.reward, list):
        scorer = _combine_rewards(rewards, env)
    elif model_reward_names(env):
        return lambda completion, example: Reward(0.0)
    elif rewards:
        function = rewards[0].function
        scorer = lambda completion, example: function(completion, example, env)  # noqa: E731
    else:
        scorer = task.reward
    fallback, weights = find_fallback_reward(env), env.reward_weights
    if fallback is not None:
        scorer = with_fallback_reward(scorer, fallback, env)
    if not isinstance(weights, dict) or not weights:
        return scorer
    return lambda completion, example: apply_component_weights(scorer(completion, example), weights)


def can_score_in_process(task: Task) -> bool:
    """Whether the task's rewards are safe enough to need no worker process."""
    if task.members:
        return all(can_score_in_process(member) for member in task.members.values())
    rewards, fallback = find_rewards(task.env), find_fallback_reward(task.env)
    is_safe = all(each.in_process for each in rewards) if reward_names(task.env) else task.in_process
    return is_safe and (fallback is None or fallback.in_process)


def warm_up(task: Task) -> None:
    """Loads the lazy imports of a task's rewards, before worker processes are forked."""
    for each in (task, *task.members.values()):
        each.warm_up()
        for named in find_all_rewards(each.env):
            if named.warm_up is not None:
                named.warm_up()


def minimum_score(task: Task) -> float:
    """Returns the score of an invalid completion, the minimum that the task's rewards declare.

    The minimum of a model reward is 0.
    """
    rewards = find_rewards(task.env)
    if not reward_names(task.env):
        return task.min_score
    minimums = [task.min_score if each.min_score is None else each.min_score for each in rewards]
    return sum(weight * score for weight, score in zip(_weights(task.env, rewards), minimums, strict=True))


def _weights(env: EnvConfig, rewards: list[NamedReward]) -> list[float]:
    """Returns the weights of the rewards, by default 1."""
    if not isinstance(env.reward_weights, list):
        return [1.0] * len(rewards)
    weights = dict(zip(reward_names(env), env.reward_weights, strict=True))
    return [weights[each.name] for each in rewards]


def component_names(paths: list[str]) -> list[str]:
    """Returns the component names of rewards: function names, or full paths of equal names."""
    short = [path.rpartition(":")[2] for path in paths]
    return [path if short.count(name) > 1 else name for path, name in zip(paths, short, strict=True)]


def component_weights(env: EnvConfig) -> dict[str, float]:
    """Returns the configured weights of reward components, by name; empty without weights."""
    if isinstance(env.reward_weights, dict) and env.reward_weights:
        return env.reward_weights
    if not isinstance(env.reward, list):
        return {}
    weights = env.reward_weights or [1.0] * len(env.reward)
    return dict(zip(component_names(env.reward), weights, strict=True))


def _combine_rewards(rewards: list[NamedReward], env: EnvConfig) -> Scorer:
    """Builds a scorer that combines several rewards into one verdict.

    The verdict has the scores as components, their weighted sum and the worst outcome. Its `accuracy` comes from
    the reward called `accuracy`, otherwise from the first reward: that reward's own component `accuracy`, or
    whether its score is at least 1. A reward that does not apply to the row has no component and does not count.
    """
    component_of = dict(zip(reward_names(env), component_names(reward_names(env)), strict=True))
    names, weights = [component_of[each.name] for each in rewards], _weights(env, rewards)
    has_model_rewards = bool(model_reward_names(env))

    def score_all(completion: Completion, example: Example) -> Reward:
        scores, accuracies, score = dict[str, float](), dict[str, float](), 0.0
        outcomes, inapplicable = list[str](), list[RewardNotApplicable]()
        for name, weight, each in zip(names, weights, rewards, strict=True):
            try:
                verdict = each.function(completion, example, env)
            except RewardNotApplicable as error:
                inapplicable.append(error)
                continue
            scores[name], components = check_reward(verdict, f"reward {name}")
            accuracies[name] = components.get("accuracy", float(scores[name] >= 1.0))
            outcomes.append(verdict.outcome)
            score += weight * scores[name]
        if not scores and has_model_rewards:
            return Reward(0.0)
        if not scores:
            raise inapplicable[0]
        accuracy = accuracies.get("accuracy", next(iter(accuracies.values())))
        outcome: Outcome = "invalid" if "invalid" in outcomes else "scored"
        return Reward(score, scores | {"accuracy": accuracy}, outcome)

    return score_all


def add_model_scores(verdict: Verdict, scores: dict[str, float], seconds: float, env: EnvConfig) -> Verdict:
    """Adds the scores of model rewards to the verdict of the other rewards.

    In a list of rewards the `accuracy` is that of the other rewards, or without any whether the first model reward
    scores at least 1.

    scores: by name, in the order of `env.reward`. seconds: duration of the model rewards.
    """
    weights, components = component_weights(env), verdict.components | scores
    if isinstance(env.reward, list) and "accuracy" not in components:
        components["accuracy"] = float(next(iter(scores.values())) >= 1)
    score = verdict.score + sum(weights.get(name, 1.0) * value for name, value in scores.items())
    return Verdict(score, components, verdict.outcome, verdict.seconds + seconds)


def apply_component_weights(verdict: Reward, weights: dict[str, float]) -> Reward:
    """Replaces a verdict's score by the weighted sum of its components.

    Components without a weight do not count.
    """
    missing = sorted(set(weights) - set(verdict.components))
    if missing:
        raise ConfigError(
            f"env.reward_weights.{missing[0]}: the reward has no such component; choose one of "
            f"{', '.join(sorted(verdict.components)) or 'none'}"
        )
    score = sum(
        weight * finite_float(verdict.components[name], f"the component {name}") for name, weight in weights.items()
    )
    return replace(verdict, score=score)
