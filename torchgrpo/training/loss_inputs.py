"""Computes the objective's masked input tensors, its ratio and teacher advantage, and masked means."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.batches.episodes import EpisodeRows
from torchgrpo.training.kl import ESTIMATORS


@dataclass(frozen=True)
class LossInputs:
    """Input tensors of the objective, [N, R] each.

    Values outside the loss are 0 (ratio: 1) where they could matter.

    log_prob: with gradient. sample_log_prob, old_log_prob, ref_log_prob: without gradient.
    advantage: sum of the reward's and the teacher's. teacher_advantage: 0 outside `mask`, or None.
    mask: tokens in the loss. sum_mask: tokens that are summed, `mask` unless `include_padding`.
    log_ratio: log_prob - old_log_prob of each token, with gradient. ratio: by `policy.ratio`, with gradient.
    entropy: over the vocabulary, or None. episodes: rows of each completion; None: each row is a completion.
    """

    log_prob: Tensor
    sample_log_prob: Tensor
    old_log_prob: Tensor
    ref_log_prob: Tensor | None
    advantage: Tensor
    teacher_advantage: Tensor | None
    mask: Tensor
    sum_mask: Tensor
    log_ratio: Tensor
    ratio: Tensor
    entropy: Tensor | None
    episodes: EpisodeRows | None = None

    @classmethod
    def from_tensors(
        cls,
        policy: PolicyConfig,
        log_prob: Tensor,
        sample_log_prob: Tensor,
        old_log_prob: Tensor | None,
        ref_log_prob: Tensor | None,
        advantage: Tensor,
        mask: Tensor,
        entropy: Tensor | None = None,
        episodes: EpisodeRows | None = None,
    ) -> "LossInputs":
        """Builds the inputs from arguments of `loss_terms`.

        Half-precision tensors become float32. mask: bool.

        Raises:
            ValueError: `policy.distill_coef` is not 0, and `ref_log_prob` is missing.
        """
        dtype = torch.promote_types(log_prob.dtype, torch.float32)
        sum_mask = torch.ones_like(mask) if policy.include_padding else mask

        def clean(values: Tensor) -> Tensor:
            return torch.where(sum_mask, values.to(dtype), 0.0)

        log_prob = clean(log_prob)
        sample = clean(sample_log_prob.detach())
        old = sample
        if policy.old_log_prob != "engine":
            old = log_prob.detach() if old_log_prob is None else clean(old_log_prob.detach())
        log_ratio = log_prob - old
        policy_log_ratio = LOG_RATIOS[policy.ratio](log_ratio, mask, policy.length_epsilon, episodes)
        if policy.log_ratio_min is not None or policy.log_ratio_max is not None:
            policy_log_ratio = policy_log_ratio.clamp(policy.log_ratio_min, policy.log_ratio_max)
        ref = None if ref_log_prob is None else clean(ref_log_prob.detach())
        reward_advantage = policy.reward_coef * clean(advantage.detach().expand_as(mask))
        teacher_advantage = None
        if policy.distill_coef != 0:
            if ref is None:
                raise ValueError(f"policy.distill_coef={policy.distill_coef} needs ref_log_prob")
            student = old if policy.distill_log_prob == "old" else log_prob.detach()
            teacher_advantage = _teacher_advantage(policy, torch.where(mask, ref - student, 0.0))
        if policy.entropy_form == "sampled":
            entropy = -log_prob.exp() * log_prob
        return cls(
            log_prob=log_prob,
            sample_log_prob=sample,
            old_log_prob=old,
            ref_log_prob=ref,
            advantage=reward_advantage if teacher_advantage is None else reward_advantage + teacher_advantage,
            teacher_advantage=teacher_advantage,
            mask=mask,
            sum_mask=sum_mask,
            log_ratio=log_ratio,
            ratio=policy_log_ratio.exp(),
            entropy=None if entropy is None else clean(entropy),
            episodes=episodes,
        )


ROUNDING_EPSILONS = 64
"""Difference, in machine epsilons, up to which log-probs of teacher and policy count as equal."""


def _teacher_advantage(policy: PolicyConfig, difference: Tensor) -> Tensor:
    """Returns the advantage [N, R] from log-prob differences, teacher less student."""
    # Drop rounding differences between two orders of summation: Adam would turn them into full steps.
    threshold = ROUNDING_EPSILONS * torch.finfo(difference.dtype).eps
    estimate = ESTIMATORS[policy.distill_estimator](torch.where(difference.abs() > threshold, difference, 0.0))
    if policy.distill_clamp is not None:
        estimate = estimate.clamp(-policy.distill_clamp, policy.distill_clamp)
    return -policy.distill_coef * estimate


def episode_sum(values: Tensor, mask: Tensor, episodes: EpisodeRows | None) -> Tensor:
    """Returns for each row the sum over the tokens of its completion, [N, 1]."""
    sums = torch.where(mask, values, 0.0).sum(dim=1, keepdim=True)
    return sums if episodes is None else episodes.sum(sums)


def episode_mean(values: Tensor, mask: Tensor, episodes: EpisodeRows | None, epsilon: float = 0.0) -> Tensor:
    """Returns for each row the mean over the tokens of its completion, [N, 1].

    The mean is 0 without tokens.
    """
    count = mask.sum(dim=1, keepdim=True)
    count = (count if episodes is None else episodes.sum(count)).clamp_min(1).to(values.dtype)
    return episode_sum(values, mask, episodes) / (count + epsilon)


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean over all tokens of the batch, a scalar; 0 without tokens."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp_min(1)


def _sequence_log_ratio(log_ratio: Tensor, mask: Tensor, epsilon: float, episodes: EpisodeRows | None) -> Tensor:
    """Returns each completion's mean log-ratio, expanded to its tokens, [N, R]."""
    return episode_mean(log_ratio, mask, episodes, epsilon).expand_as(log_ratio)


LOG_RATIOS: dict[str, Callable[[Tensor, Tensor, float, EpisodeRows | None], Tensor]] = {
    "token": lambda log_ratio, mask, epsilon, episodes: log_ratio,
    "sequence": _sequence_log_ratio,
    "sequence_token": lambda log_ratio, mask, epsilon, episodes: (
        log_ratio - log_ratio.detach() + _sequence_log_ratio(log_ratio, mask, epsilon, episodes).detach()
    ),
    "none": lambda log_ratio, mask, epsilon, episodes: torch.zeros_like(log_ratio),
}
