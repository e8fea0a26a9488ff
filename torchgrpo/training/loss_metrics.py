"""Builds loss-metric accumulators, merges them over microbatches and ranks, and converts them to numbers."""

from collections.abc import Iterable, Mapping
from itertools import islice

import torch
from torch import Tensor

Metrics = dict[str, Tensor]
"""Accumulators by metric name, float64.

One element: a sum already divided by the global total (`loss/...`). Two elements: a sum and its count. Three
elements: sums of w and w^2 and a count (`ess`). `ratio/max` holds a maximum.
"""

MAXIMA = ("ratio/max",)
EMPTY_MAXIMUM = 0.0


def mean_accumulators(values: Mapping[str, Tensor], mask: Tensor) -> Metrics:
    """Builds accumulators [2] of the means of `values` over `mask`, by name."""
    count = mask.sum().double()
    return {
        name: torch.stack([torch.where(mask, each.detach().double(), 0.0).sum(), count])
        for name, each in values.items()
    }


def maximum_accumulator(values: Tensor, mask: Tensor) -> Tensor:
    """Builds the accumulator [1] of the maximum of non-negative `values` over `mask`."""
    masked = torch.where(mask, values.detach().double(), EMPTY_MAXIMUM)
    return masked.amax().reshape(1) if masked.numel() else masked.new_full((1,), EMPTY_MAXIMUM)


def effective_sample_size_accumulator(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Builds the accumulator [3] of the normalised effective sample size over `mask`.

    For token ratios w: (sum w)^2 / (n sum w^2), 1 for equal ratios and 1/n if one ratio has all the weight
    (Kish 1965).
    """
    weight = torch.where(mask, log_ratio.detach().double().clamp(-40.0, 40.0).exp(), 0.0)
    return torch.stack([weight.sum(), weight.square().sum(), mask.sum().double()])


def effective_sample_size(accumulator: Tensor) -> Tensor:
    """Computes the effective sample size of an accumulator, a scalar; 1 without tokens."""
    weight, squared, count = accumulator
    return torch.where(count * squared > 0, weight * weight / (count * squared), 1.0)


@torch.no_grad()
def effective_sample_size_by_age(
    log_prob: Tensor, sample_log_prob: Tensor, age: Tensor, mask: Tensor, max_age: int
) -> Metrics:
    """Builds the accumulators of `ess/age_K`, K = 0 ... max_age.

    Each covers the ratios trainer / engine of the tokens of age K.

    log_prob, sample_log_prob: [N, R]. age: int64 [N, R], policy versions since the token was sampled.
    mask: [N, R].
    """
    log_ratio = log_prob.detach() - sample_log_prob
    return {f"ess/age_{k}": effective_sample_size_accumulator(log_ratio, mask & (age == k)) for k in range(max_age + 1)}


def merge_metrics(metrics_to_merge: Iterable[Metrics]) -> Metrics:
    """Merges the accumulators of several microbatches or ranks."""
    merged: Metrics = {}
    for metrics in metrics_to_merge:
        for name, value in metrics.items():
            if name not in merged:
                merged[name] = value
            elif name in MAXIMA:
                merged[name] = torch.maximum(merged[name], value)
            else:
                merged[name] = merged[name] + value
    return merged


def finalize_metrics(metrics: Metrics) -> dict[str, float]:
    """Converts accumulators to the numbers to log.

    An empty mean is 0; an empty effective sample size is 1.
    """
    if not metrics:
        return {}
    flat = iter(torch.cat(list(metrics.values())).tolist())
    return {name: _metric_value(list(islice(flat, each.numel()))) for name, each in metrics.items()}


def _metric_value(values: list[float]) -> float:
    """Converts the elements of one accumulator to a number."""
    if len(values) == 1:
        return values[0]
    if len(values) == 2:
        return values[0] / values[1] if values[1] else 0.0
    weight, squared, count = values
    return weight * weight / (count * squared) if count and squared else 1.0


def gap_percentiles(gaps: Tensor) -> dict[str, float]:
    """Computes `logprob_diff/p50`, `p99` and `max` of |trainer - engine|.

    gaps: [M], differences of log-probs in the loss; the result is 0 without any.
    """
    values = gaps.float().sort().values
    count = values.numel()
    if not count:
        return {"logprob_diff/p50": 0.0, "logprob_diff/p99": 0.0, "logprob_diff/max": 0.0}
    indices = [int(share * (count - 1)) for share in (0.5, 0.99, 1.0)]
    p50, p99, largest = torch.stack([values[index] for index in indices]).tolist()
    return {"logprob_diff/p50": p50, "logprob_diff/p99": p99, "logprob_diff/max": largest}
