"""Rollout metrics of one optimizer step: rewards, lengths, advantages, episodes, token ages.

Means are over real tokens and completions, without padding; a completion with several sequences counts once. Rewards,
error shares, utilization, ends and tool calls include all generated completions, also unselected candidates and
replaced groups, so they describe the policy and not the selection.
"""

import math
from array import array
from collections.abc import Sequence
from itertools import chain, compress
from typing import Any

from envs.group import Group, SampledCompletion, Verdict
from torchgrpo.batches.batch import Batch
from torchgrpo.batches.rollout import Rollout
from torchgrpo.monitoring.episode_metrics import episode_metrics, turn_metrics
from torchgrpo.monitoring.rows_by_completion import completions_in_loss, first_rows, mean_advantages

_TIMING_PREFIXES = (
    *("time/", "throughput/", "memory/", "reward_latency/", "idle/", "weight_check/", "agent/seconds/"),
    *("judge/", "reward_model/", "endpoint/"),  # what is kept or batched depends on the time too
)


def without_timings(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of metrics without the metrics that depend on the machine's speed."""
    return {
        key: value
        for key, value in row.items()
        if not key.startswith(_TIMING_PREFIXES) and not key.endswith("/seconds")  # seconds of an evaluation
    }


def rollout_metrics(rollout: Rollout, policy_version: int, members: Sequence[str] = ()) -> dict[str, float]:
    """Returns rewards, lengths, advantages and ages of one optimizer step's rollout.

    rollout: has advantages. members: names of the data sets of a mixture.
    """
    groups, batch = rollout.groups, rollout.batch
    generated_groups = [one for group in groups for one in group.replacement_chain()]
    metrics = reward_metrics(generated_groups)
    completions = [one for group in groups for one in group.completions]
    lengths = [len(one.token_ids) for one in completions]
    metrics |= {
        "length/response_mean": _mean(lengths),
        "length/response_max": float(max(lengths)),
        "length/truncated": [one.finish_reason for one in completions].count("length") / len(lengths),
    }
    metrics |= turn_metrics(completions)
    metrics |= episode_metrics([one for group in generated_groups for one in group.candidates])
    assert batch.mask is not None
    trained_advantages = list(compress(_advantages(completions, batch), completions_in_loss(completions, batch.mask)))
    metrics |= {
        "advantage/mean": _mean(trained_advantages),
        "advantage/std": _deviation(trained_advantages),
        "sample_utilization": len(trained_advantages) / sum(len(group.candidates) for group in generated_groups),
        "rollout/temperature": _mean([group.sampling.temperature for group in groups]),
        "policy_version": float(policy_version),
    }
    if batch.length_reward is not None:
        verdicts = [verdict for group in groups for verdict in group.verdicts]
        penalties = zip(batch.length_reward[first_rows(completions), 0].tolist(), verdicts, strict=True)
        metrics["reward/overlong_penalty"] = _mean([value for value, verdict in penalties if verdict.has_score])
    metrics |= member_metrics(generated_groups, members)
    # Number of policy versions between sampling and training, for each token in the loss.
    ages = (policy_version - batch.policy_version.masked_select(batch.mask)).bincount().tolist()
    metrics["age/mean"] = sum(age * count for age, count in enumerate(ages)) / max(sum(ages), 1)
    metrics["age/max"] = float(max(len(ages) - 1, 0))
    return metrics | {f"age/histogram/{age}": float(count) for age, count in enumerate(ages)}


def _advantages(completions: Sequence[SampledCompletion], batch: Batch) -> list[float]:
    """Returns the advantage of each completion.

    This is the first token's, as a discount spreads it; with turns, which have advantages of their own, the mean over
    the tokens in the loss.
    """
    assert batch.advantage is not None and batch.mask is not None
    if batch.advantage.shape[-1] > 1 and any(one.turns for one in completions):
        return mean_advantages(completions, batch.advantage, batch.mask)
    return list(batch.advantage[first_rows(completions), 0].tolist())


def _verdicts(completions: Sequence[SampledCompletion]) -> list[Verdict]:
    return [verdict for one in completions if (verdict := one.verdict) is not None]


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns metrics of the rewards of all completions in these groups.

    Completions without a score, because of an error, count only in `reward/errors`.
    """
    verdicts_of_groups = [_verdicts(group.candidates) for group in groups]
    verdicts = list(chain.from_iterable(verdicts_of_groups))
    outcomes = [verdict.outcome for verdict in verdicts]
    rewards_of_groups = [[verdict.score for verdict in group if verdict.has_score] for group in verdicts_of_groups]
    rewards = list(chain.from_iterable(rewards_of_groups))
    with_score = [verdict for verdict in verdicts if verdict.has_score]
    # Compared as float32, the learner's dtype. A group of equal rewards has no gradient.
    equal = [len(set(array("f", scores))) <= 1 for scores in rewards_of_groups]
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": _deviation(rewards),
        "reward/zero_variance_groups": _mean(equal),
        "reward/errors": outcomes.count("error") / max(1, len(outcomes)),
        "reward/invalid": outcomes.count("invalid") / max(1, len(outcomes)),
        "groups/generated": float(len(groups)),
        "groups/success": _mean([verdict.success for verdict in with_score]),
    }
    scored = [verdict.score for verdict in verdicts if verdict.outcome == "scored"]
    invalid = [verdict.score for verdict in verdicts if verdict.outcome == "invalid"]
    if scored and invalid:
        metrics["reward/invalid_gap"] = _mean(scored) - _mean(invalid)
    names = sorted(set[str]().union(*[verdict.components for verdict in verdicts]))
    components = [verdict.components for verdict in with_score]
    return metrics | {f"reward/{name}": _mean([each.get(name, 0.0) for each in components]) for name in names}


def member_metrics(groups: Sequence[Group], members: Sequence[str]) -> dict[str, float]:
    """Returns number, mean reward and mean length of completions by data set.

    A data set without completions has no means.
    """
    metrics: dict[str, float] = {}
    for name in members:
        completions = [one for group in groups if group.example.source == name for one in group.candidates]
        rewards = [verdict.score for verdict in _verdicts(completions) if verdict.has_score]
        metrics[f"completions/{name}"] = float(len(completions))
        if completions:
            metrics[f"length/response_mean/{name}"] = _mean([len(one.token_ids) for one in completions])
        if rewards:
            metrics[f"reward/mean/{name}"] = _mean(rewards)
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _deviation(values: Sequence[float]) -> float:
    mean = _mean(values)
    squares = [(value - mean) * (value - mean) for value in values]
    return math.sqrt(sum(squares) / (len(values) - 1)) if len(values) > 1 else 0.0
