"""Masks that keep the tokens within the bounds of `policy.trust_regions`.

A measure of two policies, on a token or on a response, must lie between two bounds.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from config.schema.trust_region import TrustRegion
from torchgrpo.batches.episodes import EpisodeRows
from torchgrpo.training.kl import ESTIMATORS
from torchgrpo.training.loss_inputs import LossInputs, episode_mean, episode_sum

MIN_PROBABILITY = 1e-8
"""Smallest probability in the KL of two Bernoulli distributions."""


def trust_region_mask(regions: Sequence[TrustRegion], inputs: LossInputs) -> Tensor:
    """Returns a mask [N, R] of the tokens in `inputs.mask` that are inside all regions."""
    kept = inputs.mask
    for region in regions:
        low = -math.inf if region.low is None else region.low
        high = math.inf if region.high is None else region.high
        if (
            region.measure == "ratio"
        ):  # of the log-ratio: sums and means are then products and geometric means of ratios
            low, high = (math.log(bound) if bound > 0 else -math.inf for bound in (low, high))
        later, earlier = POLICY_PAIRS[region.between](inputs)
        value = MEASURES[region.measure](later, earlier)
        below, above = LEVELS[region.level](value, inputs.mask, inputs.episodes, low, high)
        kept = kept & ~SIDES[region.side](below, above, inputs.advantage)
    return kept


POLICY_PAIRS: dict[str, Callable[[LossInputs], tuple[Tensor, Tensor]]] = {
    "now_old": lambda inputs: (inputs.log_prob.detach(), inputs.old_log_prob),
    "now_engine": lambda inputs: (inputs.log_prob.detach(), inputs.sample_log_prob),
    "old_engine": lambda inputs: (inputs.old_log_prob, inputs.sample_log_prob),
    "engine_old": lambda inputs: (inputs.sample_log_prob, inputs.old_log_prob),
}


def _binary_kl(later: Tensor, earlier: Tensor) -> Tensor:
    """Computes the binary KL(earlier, later) of a token, with the sign of its change (DPPO).

    The binary distribution is "this token or another". later, earlier: log-probs.
    """
    p, q = later.exp(), earlier.exp()
    others = (1 - q) * torch.log((1 - q + MIN_PROBABILITY) / (1 - p + MIN_PROBABILITY))
    return torch.sign(p - q) * (q * (earlier - later) + others)


def binary_kl_symmetric(later: Tensor, earlier: Tensor) -> Tensor:
    """Computes the larger of the two binary KLs of a token (KPop).

    The binary distribution is "this token or another". later, earlier: log-probs.
    """
    p, q = (log_prob.exp().clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY) for log_prob in (later, earlier))

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
"""Measures of two log-probs; see `config.schema.trust_region.TrustRegion.measure`."""

OutsideMasks = tuple[Tensor, Tensor]
"""Masks, bool [N, R], of values below the lower and above the upper bound."""


def _outside_masks(value: Tensor, low: float, high: float) -> OutsideMasks:
    """Returns the masks of values outside the bounds, per token."""
    return value < low, value > high


def _any_token_outside(
    value: Tensor, mask: Tensor, episodes: EpisodeRows | None, low: float, high: float
) -> OutsideMasks:
    """Returns the masks of completions with any token outside the bounds, expanded to all tokens."""
    below, above = (
        (episode_sum(outside.to(value.dtype), mask, episodes) > 0).expand_as(mask)
        for outside in _outside_masks(value, low, high)
    )
    return below, above


LEVELS: dict[str, Callable[[Tensor, Tensor, EpisodeRows | None, float, float], OutsideMasks]] = {
    "token": lambda value, mask, episodes, low, high: _outside_masks(value, low, high),
    "sum": lambda value, mask, episodes, low, high: _outside_masks(
        episode_sum(value, mask, episodes).expand_as(value), low, high
    ),
    "mean": lambda value, mask, episodes, low, high: _outside_masks(
        episode_mean(value, mask, episodes).expand_as(value), low, high
    ),
    "each": _any_token_outside,
}

SIDES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "both": lambda below, above, advantage: below | above,
    "outward": lambda below, above, advantage: torch.where(advantage > 0, above, below),
    "negative": lambda below, above, advantage: (advantage < 0) & (below | above),
}
