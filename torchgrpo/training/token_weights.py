"""Computes loss weights of tokens from engine mismatch, trust regions (`trust_region.py`) and token selection.

The weights have no gradient. Some of them depend on all tokens of the batch (`policy.has_batchwide_weights`); a
learner that works in microbatches computes them once for the batch, from a forward pass without gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.batches.episodes import EpisodeRows
from torchgrpo.training.loss_inputs import LossInputs, episode_mean, episode_sum, token_mean
from torchgrpo.training.policy_terms import policy_term
from torchgrpo.training.trust_region import trust_region_mask


@dataclass(frozen=True)
class TokenWeights:
    """Weights of tokens in the loss, [N, R] each.

    policy: factor of the policy term. penalty: coefficient of an added |log ratio|, or None. kept_mask: bool,
    tokens that neither a trust region nor the token selection drops.
    """

    policy: Tensor
    penalty: Tensor | None
    kept_mask: Tensor


@torch.no_grad()
def token_weights(policy: PolicyConfig, inputs: LossInputs) -> TokenWeights:
    """Computes the weights of the tokens of a whole batch."""
    kept = trust_region_mask(policy.trust_regions, inputs)
    weight = torch.ones_like(inputs.old_log_prob)
    if policy.mismatch != "none" and policy.objective != "vespo":  # VESPO has the mismatch in its sequence ratio
        weight = _bounded_weight(policy, inputs)
        if policy.mismatch_normalize:
            average = token_mean(weight, inputs.mask)
            if policy.mismatch_level != "token":
                average = token_mean(episode_mean(weight, inputs.mask, inputs.episodes), _one_row_each(inputs))
            weight = weight / torch.where(average > 1e-8, average, 1.0)
        if policy.objective == "geometric":
            logarithm = episode_mean((weight + 1e-10).log(), inputs.mask, inputs.episodes, policy.length_epsilon)
            weight = logarithm.exp().expand_as(weight)
    if policy.trust_regions:
        weight = torch.where(kept, weight, 0.0)  # a dropped weight may be infinite
    chosen = SELECTIONS[policy.select_tokens](policy, inputs)
    factor, penalty = SELECTION_EFFECTS[policy.select_tokens](policy, chosen, weight.dtype)
    if factor is not None:
        weight, kept = weight * factor, kept & (factor > 0)
    return TokenWeights(weight, penalty, kept)


def _one_row_each(inputs: LossInputs) -> Tensor:
    """Returns a mask [N, 1] with one row of each completion in the loss."""
    in_loss = inputs.mask.any(dim=1, keepdim=True)
    if inputs.episodes is None:
        return in_loss
    return (inputs.episodes.sum(in_loss.long()) > 0) & inputs.episodes.is_first[:, None]


def mismatch_capped(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """Returns a mask [N, R] of tokens with a capped or zero mismatch weight."""
    weight = _bounded_weight(policy, inputs)
    return (weight >= _weight_cap(policy)) | (weight == 0)


def _bounded_weight(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """Computes the mismatch weight exp(old - engine) of each token, truncated or masked, [N, R]."""
    difference = inputs.old_log_prob - inputs.sample_log_prob
    weight = MISMATCH_LEVELS[policy.mismatch_level](difference, inputs.mask, inputs.episodes).exp()
    return MISMATCH_BOUNDS[policy.mismatch](weight, _weight_cap(policy), policy.mismatch_floor)


def _weight_cap(policy: PolicyConfig) -> float:
    """Returns the cap of mismatch weights, infinite if unset."""
    return float("inf") if policy.mismatch_cap is None else policy.mismatch_cap


MISMATCH_LEVELS: dict[str, Callable[[Tensor, Tensor, EpisodeRows | None], Tensor]] = {
    "token": lambda difference, mask, episodes: difference,
    "sequence": lambda difference, mask, episodes: episode_sum(difference, mask, episodes).expand_as(difference),
    "sequence_mean": lambda difference, mask, episodes: episode_mean(difference, mask, episodes).expand_as(difference),
}
MISMATCH_BOUNDS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "truncate": lambda weight, cap, floor: weight.clamp(floor, cap),
    "mask": lambda weight, cap, floor: torch.where((weight <= cap) & (weight >= floor), weight, 0.0),
}


def _top_entropy(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """Selects tokens with entropy at or above a quantile ("beyond the 80/20 rule", arXiv 2506.01939)."""
    if inputs.entropy is None:
        raise ValueError("policy.select_tokens=top_entropy needs the entropy over the vocabulary")
    entropy = inputs.entropy.detach()
    values = entropy[inputs.mask].sort().values
    if not len(values):
        return inputs.mask
    index = (1 - policy.selected_share) * (len(values) - 1)  # fractional: interpolate between two values
    below = min(int(index), len(values) - 1)
    above = min(below + 1, len(values) - 1)
    threshold = torch.lerp(values[below], values[above], index - below)
    return inputs.mask & (entropy >= threshold)


def _covariance(inputs: LossInputs) -> Tensor:
    """Computes each token's term of the covariance of log-prob and advantage, [N, R]."""
    log_prob = inputs.log_prob.detach()
    return (inputs.advantage - token_mean(inputs.advantage, inputs.mask)) * (
        log_prob - token_mean(log_prob, inputs.mask)
    )


def _clip_covariance(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """Selects random tokens with a covariance inside the range (Clip-Cov, arXiv 2505.22617, section 4.2).

    Tokens whose clip binds are excluded. The shuffle has a fixed seed, so that equal batches give equal selections.
    """
    low, high = policy.covariance_range
    covariance = _covariance(inputs)
    below, above = policy_term(policy).clip_binds(policy, inputs)
    candidates = inputs.mask & ~below & ~above & (covariance > low) & (covariance < high)
    indices = candidates.flatten().nonzero()[:, 0]
    order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(len(indices)))
    chosen = torch.zeros_like(inputs.mask)
    chosen.view(-1)[indices[order[: _selection_size(policy, inputs.mask)].to(indices.device)]] = True
    return chosen


def _kl_covariance(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """Selects the tokens with the highest covariance (KL-Cov, arXiv 2505.22617, section 4.2)."""
    indices = inputs.mask.flatten().nonzero()[:, 0]
    highest = _covariance(inputs)[inputs.mask].topk(min(_selection_size(policy, inputs.mask), len(indices)))
    chosen = torch.zeros_like(inputs.mask)
    chosen.view(-1)[indices[highest.indices]] = True
    return chosen


def _selection_size(policy: PolicyConfig, mask: Tensor) -> int:
    """Returns the number of tokens to select, at least 1."""
    return max(1, int(policy.selected_share * int(mask.sum())))


SELECTIONS: dict[str, Callable[[PolicyConfig, LossInputs], Tensor]] = {
    "none": lambda policy, inputs: inputs.mask,
    "top_entropy": _top_entropy,
    "clip_covariance": _clip_covariance,
    "kl_covariance": _kl_covariance,
}
"""Token selections by name; each returns a mask [N, R] of selected tokens of the batch."""


SELECTION_EFFECTS: dict[str, Callable[[PolicyConfig, Tensor, torch.dtype], tuple[Tensor | None, Tensor | None]]] = {
    "none": lambda policy, is_selected, dtype: (None, None),
    "top_entropy": lambda policy, is_selected, dtype: (is_selected.to(dtype), None),
    "clip_covariance": lambda policy, is_selected, dtype: ((~is_selected).to(dtype), None),
    "kl_covariance": lambda policy, is_selected, dtype: (None, policy.covariance_penalty * is_selected.to(dtype)),
}
"""Effects of a selection by name: factor of the policy term and penalty coefficient, None without effect."""
