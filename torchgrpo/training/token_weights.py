"""What every token counts in the loss: mismatch between trainer and engine, trust regions, chosen tokens.

None of it has a gradient. Some of it depends on all tokens of the batch (`policy.weighs_whole_batches`); a learner that
works in microbatches computes these weights once for the batch, from a pass without gradient, and hands them on.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.loss_inputs import LossInputs, mean, row_mean, row_sum
from torchgrpo.training.policy_terms import policy_term
from torchgrpo.training.trust_region import kept_by


@dataclass(frozen=True)
class TokenWeights:
    """[N, R] each. policy: factor of the policy term. penalty: of |log ratio|, which is added, or None. kept: bool, the
    tokens that neither a trust region nor the selection leaves out."""

    policy: Tensor
    penalty: Tensor | None
    kept: Tensor


@torch.no_grad()
def token_weights(policy: PolicyConfig, inputs: LossInputs) -> TokenWeights:
    """Of the tokens of a whole batch."""
    kept = kept_by(policy.trust_regions, inputs)
    weight = torch.ones_like(inputs.old)
    if policy.mismatch != "none" and policy.objective != "vespo":  # there it is in the sequence's ratio
        weight = _bounded(policy, inputs)
        if policy.mismatch_normalize:
            average = mean(weight, inputs.mask)
            if policy.mismatch_level != "token":  # over rows that have some
                average = mean(row_mean(weight, inputs.mask), inputs.mask.any(dim=1, keepdim=True))
            weight = weight / torch.where(average > 1e-8, average, 1.0)
        if policy.objective == "geometric":
            logarithm = row_mean((weight + 1e-10).log(), inputs.mask, policy.length_epsilon)
            weight = logarithm.exp().expand_as(weight)
    if policy.trust_regions:
        weight = torch.where(kept, weight, 0.0)  # a weight that is left out may be infinite
    chosen = SELECTIONS[policy.select_tokens](policy, inputs)
    factor, penalty = EFFECTS[policy.select_tokens](policy, chosen, weight.dtype)
    if factor is not None:
        weight, kept = weight * factor, kept & (factor > 0)
    return TokenWeights(weight, penalty, kept)


def mismatch_capped(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """bool [N, R]: the tokens whose weight is at the cap or masked out."""
    weight = _bounded(policy, inputs)
    return (weight >= _cap(policy)) | (weight == 0)


def _bounded(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """exp(old - engine) per token, [N, R], truncated or masked."""
    weight = MISMATCH_LEVELS[policy.mismatch_level](inputs.old - inputs.sample, inputs.mask).exp()
    return MISMATCH_BOUNDS[policy.mismatch](weight, _cap(policy), policy.mismatch_floor)


def _cap(policy: PolicyConfig) -> float:
    return float("inf") if policy.mismatch_cap is None else policy.mismatch_cap


MISMATCH_LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda difference, mask: difference,
    "sequence": lambda difference, mask: row_sum(difference, mask).expand_as(difference),
    "sequence_mean": lambda difference, mask: row_mean(difference, mask).expand_as(difference),
}
MISMATCH_BOUNDS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "truncate": lambda weight, cap, floor: weight.clamp(floor, cap),
    "mask": lambda weight, cap, floor: torch.where((weight <= cap) & (weight >= floor), weight, 0.0),
}


def _top_entropy(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """Those at or above the quantile of the entropies ("beyond the 80/20 rule", arXiv 2506.01939)."""
    if inputs.entropy is None:
        raise ValueError("policy.select_tokens=top_entropy needs the entropy over the vocabulary")
    entropy = inputs.entropy.detach()
    values = entropy[inputs.mask].sort().values
    if not len(values):
        return inputs.mask
    place = (1 - policy.selected_share) * (len(values) - 1)  # between two values: the line that joins them
    below = min(int(place), len(values) - 1)
    above = min(below + 1, len(values) - 1)
    threshold = torch.lerp(values[below], values[above], place - below)
    return inputs.mask & (entropy >= threshold)


def _covariance(inputs: LossInputs) -> Tensor:
    """Of log-prob and advantage: each token's part of it, [N, R]."""
    log_prob = inputs.log_prob.detach()
    return (inputs.advantage - mean(inputs.advantage, inputs.mask)) * (log_prob - mean(log_prob, inputs.mask))


def _clip_covariance(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """Some of the tokens inside the range that the clip leaves alone (Clip-Cov, arXiv 2505.22617, section 4.2).

    They are chosen by a fixed shuffle, so that the same batch gives the same tokens.
    """
    low, high = policy.covariance_range
    covariance = _covariance(inputs)
    below, above = policy_term(policy).binds(policy, inputs)
    candidates = inputs.mask & ~below & ~above & (covariance > low) & (covariance < high)
    places = candidates.flatten().nonzero()[:, 0]
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(len(places)))
    chosen = torch.zeros_like(inputs.mask)
    chosen.view(-1)[places[order[: _count(policy, inputs.mask)].to(places.device)]] = True
    return chosen


def _kl_covariance(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """The tokens with the highest covariance (KL-Cov, arXiv 2505.22617, section 4.2)."""
    places = inputs.mask.flatten().nonzero()[:, 0]
    highest = _covariance(inputs)[inputs.mask].topk(min(_count(policy, inputs.mask), len(places)))
    chosen = torch.zeros_like(inputs.mask)
    chosen.view(-1)[places[highest.indices]] = True
    return chosen


def _count(policy: PolicyConfig, mask: Tensor) -> int:
    return max(1, int(policy.selected_share * int(mask.sum())))


SELECTIONS: dict[str, Callable[[PolicyConfig, LossInputs], Tensor]] = {
    "none": lambda policy, inputs: inputs.mask,
    "top_entropy": _top_entropy,
    "clip_covariance": _clip_covariance,
    "kl_covariance": _kl_covariance,
}
"""bool [N, R]: the tokens that are chosen among all of the batch."""


EFFECTS: dict[str, Callable[[PolicyConfig, Tensor, torch.dtype], tuple[Tensor | None, Tensor | None]]] = {
    "none": lambda policy, chosen, dtype: (None, None),
    "top_entropy": lambda policy, chosen, dtype: (chosen.to(dtype), None),
    "clip_covariance": lambda policy, chosen, dtype: ((~chosen).to(dtype), None),
    "kl_covariance": lambda policy, chosen, dtype: (None, policy.covariance_penalty * chosen.to(dtype)),
}
"""What becomes of the tokens that are chosen: a factor of the policy term, and the weight of the penalty, or None."""
