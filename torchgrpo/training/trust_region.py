"""Which tokens the trust regions keep: a measure of two policies, on a token or a response, between two bounds."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from config.schema.trust_region import TrustRegion
from torchgrpo.training.kl import ESTIMATORS
from torchgrpo.training.loss_inputs import LossInputs, row_mean, row_sum

SMALLEST = 1e-8
"""Probability below which a Bernoulli's is not taken."""


def kept_by(regions: Sequence[TrustRegion], inputs: LossInputs) -> Tensor:
    """bool [N, R]: the tokens of `inputs.mask` that all of the regions keep."""
    kept = inputs.mask
    for region in regions:
        low = -math.inf if region.low is None else region.low
        high = math.inf if region.high is None else region.high
        if region.measure == "ratio":  # as its logarithm, so that sums and means are products and roots
            low, high = (math.log(bound) if bound > 0 else -math.inf for bound in (low, high))
        later, earlier = BETWEEN[region.between](inputs)
        value = MEASURES[region.measure](later, earlier)
        below, above = LEVELS[region.level](value, inputs.mask, low, high)
        kept = kept & ~SIDES[region.side](below, above, inputs.advantage)
    return kept


BETWEEN: dict[str, Callable[[LossInputs], tuple[Tensor, Tensor]]] = {
    "now_old": lambda inputs: (inputs.log_prob.detach(), inputs.old),
    "now_engine": lambda inputs: (inputs.log_prob.detach(), inputs.sample),
    "old_engine": lambda inputs: (inputs.old, inputs.sample),
    "engine_old": lambda inputs: (inputs.sample, inputs.old),
}


def _binary_kl(later: Tensor, earlier: Tensor) -> Tensor:
    """KL(earlier, later) of "this token or another", with the sign of the change of its probability (DPPO)."""
    p, q = later.exp(), earlier.exp()
    others = (1 - q) * torch.log((1 - q + SMALLEST) / (1 - p + SMALLEST))
    return torch.sign(p - q) * (q * (earlier - later) + others)


def binary_kl_symmetric(later: Tensor, earlier: Tensor) -> Tensor:
    """The larger of the two KLs of "this token or another" (KPop). later, earlier: log-probs."""
    p, q = (log_prob.exp().clamp(SMALLEST, 1 - SMALLEST) for log_prob in (later, earlier))

    def divergence(first: Tensor, second: Tensor) -> Tensor:
        return first * (first / second).log() + (1 - first) * ((1 - first) / (1 - second)).log()

    return torch.maximum(divergence(p, q), divergence(q, p))


MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ratio": lambda later, earlier: later - earlier,
    "k1": lambda later, earlier: ESTIMATORS["k1"](later - earlier),
    "k2": lambda later, earlier: ESTIMATORS["k2"](later - earlier),
    "k3": lambda later, earlier: ESTIMATORS["k3"](later - earlier),
    "tv": lambda later, earlier: later.exp() - earlier.exp(),
    "kl": _binary_kl,
    "kl_symmetric": binary_kl_symmetric,
}
"""Of log-probs; see `config.schema.trust_region.TrustRegion.measure`."""

Outside = tuple[Tensor, Tensor]
"""bool [N, R]: below the lower and above the upper bound."""


def _token(value: Tensor, mask: Tensor, low: float, high: float) -> Outside:
    return value < low, value > high


def _each(value: Tensor, mask: Tensor, low: float, high: float) -> Outside:
    below, above = _token(value, mask, low, high)
    return tuple((mask & some).any(dim=1, keepdim=True).expand_as(mask) for some in (below, above))  # type: ignore[return-value]


LEVELS: dict[str, Callable[[Tensor, Tensor, float, float], Outside]] = {
    "token": _token,
    "sum": lambda value, mask, low, high: _token(row_sum(value, mask).expand_as(value), mask, low, high),
    "mean": lambda value, mask, low, high: _token(row_mean(value, mask).expand_as(value), mask, low, high),
    "each": _each,
}

SIDES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "both": lambda below, above, advantage: below | above,
    "outward": lambda below, above, advantage: torch.where(advantage > 0, above, below),
    "negative": lambda below, above, advantage: (advantage < 0) & (below | above),
}
