"""Metrics of the objective as accumulators that add up over microbatches and ranks."""

from collections.abc import Iterable, Mapping
from itertools import islice

import torch
from torch import Tensor

Metrics = dict[str, Tensor]
"""Accumulators, float64. One element: a sum already divided by the global total (`loss/...`). Two elements: a
sum and its count. Three: sums of w and w^2 and a count (`ess`). `ratio/max` holds a maximum."""

MAXIMA = ("ratio/max",)
EMPTY_MAXIMUM = 0.0


def means_of(values: Mapping[str, Tensor], mask: Tensor) -> Metrics:
    """[2] accumulators, by name, of the means of `values` over `mask`."""
    count = mask.sum().double()
    return {
        name: torch.stack([torch.where(mask, each.detach().double(), 0.0).sum(), count])
        for name, each in values.items()
    }


def maximum_of(values: Tensor, mask: Tensor) -> Tensor:
    """[1] accumulator of the largest of non-negative `values` over `mask`."""
    kept = torch.where(mask, values.detach().double(), EMPTY_MAXIMUM)
    return kept.amax().reshape(1) if kept.numel() else kept.new_full((1,), EMPTY_MAXIMUM)


def effective_sample_size_of(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """[3] accumulator of the normalised effective sample size of the token ratios w over `mask`:
    (sum w)^2 / (n sum w^2), 1 for equal ratios and 1/n where one holds all the weight (Kish 1965)."""
    weight = torch.where(mask, log_ratio.detach().double().clamp(-40.0, 40.0).exp(), 0.0)
    return torch.stack([weight.sum(), weight.square().sum(), mask.sum().double()])


def effective_sample_size(accumulator: Tensor) -> Tensor:
    """The number that an accumulator of `effective_sample_size_of` stands for, a scalar; 1 without a token."""
    weight, squared, count = accumulator
    return torch.where(count * squared > 0, weight * weight / (count * squared), 1.0)


@torch.no_grad()
def effective_sample_size_by_age(
    log_prob: Tensor, sample_log_prob: Tensor, age: Tensor, mask: Tensor, max_age: int
) -> Metrics:
    """Accumulators of `ess/age_K`, K = 0 ... max_age, of the ratios trainer / engine over the tokens of that age.

    log_prob, sample_log_prob: [N, R]. age: int64 [N, R], versions since the token was drawn. mask: [N, R].
    """
    log_ratio = log_prob.detach() - sample_log_prob
    return {
        f"ess/age_{k}": effective_sample_size_of(log_ratio, mask & (age == k)) for k in range(max_age + 1)
    }


def merge_metrics(parts: Iterable[Metrics]) -> Metrics:
    """Accumulators of several microbatches, or of several ranks, as one."""
    merged: Metrics = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            elif name in MAXIMA:
                merged[name] = torch.maximum(merged[name], value)
            else:
                merged[name] = merged[name] + value
    return merged


def finalize_metrics(metrics: Metrics) -> dict[str, float]:
    """The numbers to log. A mean over nothing is 0; the effective sample size of nothing is 1."""
    if not metrics:
        return {}
    flat = iter(torch.cat(list(metrics.values())).tolist())
    return {name: _finish(list(islice(flat, each.numel()))) for name, each in metrics.items()}


def _finish(values: list[float]) -> float:
    if len(values) == 1:
        return values[0]
    if len(values) == 2:
        return values[0] / values[1] if values[1] else 0.0
    weight, squared, count = values
    return weight * weight / (count * squared) if count and squared else 1.0


def gap_percentiles(gaps: Tensor) -> dict[str, float]:
    """`mismatch/p50`, `p99` and `max` of |trainer - engine| log-probs [M] in the loss; zeros without any."""
    values = gaps.float().sort().values
    count = values.numel()
    if not count:
        return {"mismatch/p50": 0.0, "mismatch/p99": 0.0, "mismatch/max": 0.0}
    places = [int(share * (count - 1)) for share in (0.5, 0.99, 1.0)]
    p50, p99, largest = torch.stack([values[place] for place in places]).tolist()
    return {"mismatch/p50": p50, "mismatch/p99": p99, "mismatch/max": largest}
