"""What groups and the batch that was made of them say about themselves. Means are over real tokens and completions.

Rewards, errors and utilization are of everything that was generated for a batch, candidates not chosen and replaced
groups included: else they would be those of the choice, not the policy's.
"""

import math
from array import array
from collections.abc import Sequence
from itertools import chain, compress
from typing import Any

from envs.group import Group, SampledCompletion, Verdict
from torchgrpo.batches.rollout import Rollout

_CLOCKS = ("time/", "throughput/", "reward_latency/", "idle/", "weight_check/")


def without_clocks(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics less what depends on how fast the machine was."""
    return {
        key: value
        for key, value in row.items()
        if not key.startswith(_CLOCKS) and not key.endswith("/seconds")  # of an evaluation
    }


def rollout_metrics(rollout: Rollout, policy_version: int, members: Sequence[str] = ()) -> dict[str, float]:
    """Rewards, lengths, advantages and ages of one optimizer step's rollout, which is credited.

    members: the data sets of a mixture.
    """
    groups, batch = rollout.groups, rollout.batch
    generated = [one for group in groups for one in group.chain()]
    metrics = reward_metrics(generated)
    completions = [one for group in groups for one in group.completions]
    lengths = [len(one.token_ids) for one in completions]
    metrics |= {
        "length/response_mean": _mean(lengths),
        "length/response_max": float(max(lengths)),
        "length/truncated": [one.finish_reason for one in completions].count("length") / len(lengths),
    }
    if not all(all(one.sampled) for one in completions):  # the environment wrote some of the tokens
        # A turn, and one more wherever a token of the environment's is followed by one of the model's.
        metrics["turns/mean"] = _mean([1 + bytes(one.sampled).count(b"\0\1") for one in completions])
        metrics["turns/drawn_tokens"] = _mean([one.num_drawn for one in completions])
    assert batch.advantage is not None and batch.mask is not None
    trained = list(compress(batch.advantage[:, 0].tolist(), batch.mask.any(-1).tolist()))
    metrics |= {
        "advantage/mean": _mean(trained),
        "advantage/std": _deviation(trained),
        "sample_utilization": len(trained) / sum(len(group.candidates) for group in generated),
        "rollout/temperature": _mean([group.sampling.temperature for group in groups]),
        "policy_version": float(policy_version),
    }
    if batch.length_reward is not None:
        verdicts = [verdict for group in groups for verdict in group.verdicts]
        added = zip(batch.length_reward[:, 0].tolist(), verdicts, strict=True)
        metrics["reward/length"] = _mean([value for value, verdict in added if verdict.judged])
    metrics |= member_metrics(generated, members)
    # Versions between the one that drew a token in the loss and the one that it trains.
    ages = (policy_version - batch.policy_version.masked_select(batch.mask)).bincount().tolist()
    metrics["age/mean"] = sum(age * count for age, count in enumerate(ages)) / max(sum(ages), 1)
    metrics["age/max"] = float(max(len(ages) - 1, 0))
    return metrics | {f"age/histogram/{age}": float(count) for age, count in enumerate(ages)}


def _verdicts(completions: Sequence[SampledCompletion]) -> list[Verdict]:
    return [verdict for one in completions if (verdict := one.verdict) is not None]


def reward_metrics(generated: Sequence[Group]) -> dict[str, float]:
    """Of all completions of these groups. Those that could not be judged are counted, and left out of the rest."""
    of_groups = [_verdicts(group.candidates) for group in generated]
    verdicts = list(chain.from_iterable(of_groups))
    outcomes = [verdict.outcome for verdict in verdicts]
    rewards_of_groups = [[verdict.score for verdict in group if verdict.judged] for group in of_groups]
    rewards = list(chain.from_iterable(rewards_of_groups))
    judged = [verdict for verdict in verdicts if verdict.judged]
    # Equal as float32, which the learner reads: such a group teaches nothing.
    equal = [len(set(array("f", scores))) <= 1 for scores in rewards_of_groups]
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": _deviation(rewards),
        "reward/zero_variance_groups": _mean(equal),
        "reward/errors": outcomes.count("error") / max(1, len(outcomes)),
        "reward/invalid": outcomes.count("invalid") / max(1, len(outcomes)),
        "groups/generated": float(len(generated)),
        "groups/success": _mean([verdict.success for verdict in judged]),
    }
    scored = [verdict.score for verdict in verdicts if verdict.outcome == "scored"]
    invalid = [verdict.score for verdict in verdicts if verdict.outcome == "invalid"]
    if scored and invalid:
        metrics["reward/invalid_gap"] = _mean(scored) - _mean(invalid)
    names = sorted(set[str]().union(*[verdict.parts for verdict in verdicts]))
    parts = [verdict.parts for verdict in judged]
    return metrics | {f"reward/{name}": _mean([each.get(name, 0.0) for each in parts]) for name in names}


def member_metrics(generated: Sequence[Group], members: Sequence[str]) -> dict[str, float]:
    """Completions, mean reward and mean length of the data sets of a mixture; no means where there are none."""
    metrics: dict[str, float] = {}
    for name in members:
        mine = [one for group in generated if group.example.source == name for one in group.candidates]
        rewards = [verdict.score for verdict in _verdicts(mine) if verdict.judged]
        metrics[f"completions/{name}"] = float(len(mine))
        if mine:
            metrics[f"length/response_mean/{name}"] = _mean([len(one.token_ids) for one in mine])
        if rewards:
            metrics[f"reward/mean/{name}"] = _mean(rewards)
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _deviation(values: Sequence[float]) -> float:
    mean = _mean(values)
    squares = [(value - mean) * (value - mean) for value in values]
    return math.sqrt(sum(squares) / (len(values) - 1)) if len(values) > 1 else 0.0
