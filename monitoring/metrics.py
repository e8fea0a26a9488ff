"""What a batch of rollouts says about itself. Every mean is over real tokens or completions, never padding."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from envs.group import FINISH_REASONS, OUTCOMES

_CLOCKS = ("time/", "throughput/", "reward_latency/", "idle/", "canary/seconds")


def without_clocks(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics less what depends on how fast the machine was."""
    return {key: value for key, value in row.items() if not key.startswith(_CLOCKS)}


def rollout_metrics(
    batch: TensorDictBase, repeats: int, policy_version: int, members: Sequence[str] = ()
) -> dict[str, float]:
    """Rewards, lengths, advantages and ages of one optimizer step's batch.

    batch: prepared groups [P * repeats], group-major. Completions whose reward is an error are left out of the
    reward statistics and counted. members: the data sets of a mixture.
    """
    status = batch["next", "reward_status"][:, 0]
    valid = status != OUTCOMES.index("error")
    reward = batch["next", "reward"][:, 0].double()
    judged = reward[valid]
    lengths = batch["tokens", "response_mask"].sum(-1)
    trained = batch["mask"].any(-1)
    advantage = batch["advantage"][:, 0].double()[trained]
    metrics = {
        "reward/mean": _mean(judged),
        "reward/std": _std(judged),
        "reward/zero_variance_groups": _zero_variance(reward, valid, repeats),
        "reward/errors": _mean((~valid).double()),
        "reward/invalid": _mean((status == OUTCOMES.index("invalid")).double()),
        "advantage/mean": _mean(advantage),
        "advantage/std": _std(advantage),
        "length/response_mean": _mean(lengths.double()),
        "length/response_max": float(lengths.max()),
        "length/truncated": _mean((batch["finish_reason"][:, 0] == FINISH_REASONS.index("length")).double()),
        "sample_utilization": _mean(trained.double()),
        "policy_version": float(policy_version),
    }
    temperature = batch.get("temperature", None)
    if temperature is not None:
        metrics["rollout/temperature"] = _mean(temperature.double())
    length_reward = batch.get("length_reward", None)
    if length_reward is not None:
        metrics["reward/length"] = _mean(length_reward[:, 0][valid])
    for name, part in batch["next", "reward_parts"].items():
        metrics[f"reward/{name}"] = _mean(part[:, 0].double()[valid])
    metrics |= turn_metrics(batch)
    metrics |= generated_metrics(batch, repeats) | member_metrics(batch, repeats, members)
    return metrics | age_metrics(batch, policy_version)


def turn_metrics(batch: TensorDictBase) -> dict[str, float]:
    """Turns of a response and tokens that the model drew in it, where the environment wrote some of its tokens."""
    drawn = batch["tokens", "loss_mask"]
    written = batch["tokens", "response_mask"] & ~drawn
    if not written.any():
        return {}
    turns = 1 + (drawn[:, 1:] & written[:, :-1]).sum(-1)
    return {"turns/mean": _mean(turns.double()), "turns/drawn_tokens": _mean(drawn.sum(-1).double())}


def generated_metrics(batch: TensorDictBase, repeats: int) -> dict[str, float]:
    """Metrics over everything that was generated for a batch, where that is more than the batch: replaced
    groups and candidates not chosen. Without them the rewards would be those of the choice, not the policy's.
    """
    generated = batch.get("generated", None)
    if generated is None:
        return {}
    sums = generated[::repeats].sum(dim=0)
    completions, judged = float(sums["completions"]), float(sums["judged"].clamp_min(1))
    metrics = {"groups/generated": float(sums["groups"])}
    if completions == batch.batch_size[0]:
        return metrics
    mean = float(sums["reward"]) / judged
    spread = max(float(sums["reward_squared"]) - judged * mean * mean, 0.0)
    metrics |= {
        "reward/mean": mean,
        "reward/std": (spread / max(judged - 1, 1)) ** 0.5,
        "reward/zero_variance_groups": float(sums["zero_variance"] / sums["groups"]),
        "reward/errors": 1 - float(sums["judged"]) / completions,
        "reward/invalid": float(sums["invalid"]) / completions,
        "sample_utilization": float(batch["mask"].any(-1).sum()) / completions,
    }
    parts = sums.get("reward_parts", {})
    return metrics | {f"reward/{name}": float(part) / judged for name, part in parts.items()}


def member_metrics(batch: TensorDictBase, repeats: int, members: Sequence[str]) -> dict[str, float]:
    """Of every data set of a mixture: completions, mean reward and mean length of what was generated for the batch.

    One of which nothing was generated has a count of 0 and no means.
    """
    if not members:
        return {}
    sums = batch["generated", "members"][::repeats].sum(dim=0)
    metrics: dict[str, float] = {}
    for column, name in enumerate(members):
        completions, judged = float(sums["completions"][column]), float(sums["judged"][column])
        metrics[f"completions/{name}"] = completions
        if completions:
            metrics[f"length/response_mean/{name}"] = float(sums["length"][column]) / completions
        if judged:
            metrics[f"reward/mean/{name}"] = float(sums["reward"][column]) / judged
    return metrics


def age_metrics(batch: TensorDictBase, policy_version: int) -> dict[str, float]:
    """Age of every token in the loss: versions between the one that drew it and the one it trains.

    `age/histogram/K` counts the tokens of age K, up to the oldest there is.
    """
    ages = policy_version - batch["policy_version"][batch["mask"]]
    counts = {f"age/histogram/{age}": float(n) for age, n in enumerate(ages.bincount().tolist())}
    oldest = float(ages.max()) if ages.numel() else 0.0
    return {"age/mean": _mean(ages.double()), "age/max": oldest} | counts


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0


def _std(values: torch.Tensor) -> float:
    return float(values.std()) if values.numel() > 1 else 0.0


def _zero_variance(reward: torch.Tensor, valid: torch.Tensor, repeats: int) -> float:
    """Share of groups whose judged rewards are all equal: they teach nothing."""
    grouped, judged = reward.view(-1, repeats), valid.view(-1, repeats)
    highest = grouped.masked_fill(~judged, -torch.inf).amax(1)
    lowest = grouped.masked_fill(~judged, torch.inf).amin(1)
    return _mean((highest <= lowest).double())
