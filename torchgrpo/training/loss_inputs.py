"""The tensors that the objective is computed from, cleaned of what padding holds."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.kl import ESTIMATORS


@dataclass(frozen=True)
class LossInputs:
    """The batch as the objective reads it, [N, R] each, the advantage too.

    Zeros (ratio: ones) stand outside the loss where it matters.

    log_prob: with gradient. old, sample, ref: other log-probs of the same tokens, without. advantage: of the reward and
    of the teacher together. distilled: the teacher's part of it, 0 outside `mask`, or None. mask: in the loss.
    inside: what is summed, `mask` unless `read_padding`. log_ratio: of each token, log_prob - old, with gradient.
    ratio: by `policy.ratio`, with gradient. entropy: over the vocabulary, or None.
    """

    log_prob: Tensor
    sample: Tensor
    old: Tensor
    ref: Tensor | None
    advantage: Tensor
    distilled: Tensor | None
    mask: Tensor
    inside: Tensor
    log_ratio: Tensor
    ratio: Tensor
    entropy: Tensor | None

    @classmethod
    def of(
        cls,
        policy: PolicyConfig,
        log_prob: Tensor,
        sample_log_prob: Tensor,
        old_log_prob: Tensor | None,
        ref_log_prob: Tensor | None,
        advantage: Tensor,
        mask: Tensor,
        entropy: Tensor | None = None,
    ) -> "LossInputs":
        """Make it from the arguments of `loss_terms`.

        Half precision becomes float32. mask: bool. Raises ValueError: there is no `ref_log_prob`, and
        `policy.distill_coef` is not 0.
        """
        dtype = torch.promote_types(log_prob.dtype, torch.float32)
        inside = torch.ones_like(mask) if policy.read_padding else mask

        def clean(values: Tensor) -> Tensor:
            return torch.where(inside, values.to(dtype), 0.0)

        log_prob = clean(log_prob)
        sample = clean(sample_log_prob.detach())
        old = sample
        if policy.old_log_prob != "engine":
            old = log_prob.detach() if old_log_prob is None else clean(old_log_prob.detach())
        log_ratio = log_prob - old
        chosen = LOG_RATIOS[policy.ratio](log_ratio, mask, policy.length_epsilon)
        if policy.log_ratio_min is not None or policy.log_ratio_max is not None:
            chosen = chosen.clamp(policy.log_ratio_min, policy.log_ratio_max)
        ref = None if ref_log_prob is None else clean(ref_log_prob.detach())
        rewarded = policy.reward_coef * clean(advantage.detach().expand_as(mask))
        distilled = None
        if policy.distill_coef != 0:
            if ref is None:
                raise ValueError(f"policy.distill_coef={policy.distill_coef} needs ref_log_prob")
            student = old if policy.distill_log_prob == "old" else log_prob.detach()
            difference = torch.where(mask, ref - student, 0.0)
            # Adam would make whole steps of what two orders of summation differ by.
            difference = torch.where(difference.abs() > ROUNDING * torch.finfo(dtype).eps, difference, 0.0)
            estimate = ESTIMATORS[policy.distill_estimator](difference)
            if policy.distill_clamp is not None:
                estimate = estimate.clamp(-policy.distill_clamp, policy.distill_clamp)
            distilled = -policy.distill_coef * estimate
        if policy.entropy_form == "sampled":
            entropy = -log_prob.exp() * log_prob
        return cls(
            log_prob=log_prob,
            sample=sample,
            old=old,
            ref=ref,
            advantage=rewarded if distilled is None else rewarded + distilled,
            distilled=distilled,
            mask=mask,
            inside=inside,
            log_ratio=log_ratio,
            ratio=chosen.exp(),
            entropy=None if entropy is None else clean(entropy),
        )


ROUNDING = 64
"""Machine epsilons up to which a teacher and the policy are taken to agree."""


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over each row's tokens, [N, 1]."""
    return torch.where(mask, values, 0.0).sum(dim=1, keepdim=True)


def row_mean(values: Tensor, mask: Tensor, epsilon: float = 0.0) -> Tensor:
    """Mean over each row's tokens, [N, 1]; 0 for a row without any."""
    count = mask.sum(dim=1, keepdim=True).clamp_min(1).to(values.dtype)
    return row_sum(values, mask) / (count + epsilon)


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over all tokens of the batch, a scalar; 0 without any."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp_min(1)


def _of_sequence(log_ratio: Tensor, mask: Tensor, epsilon: float) -> Tensor:
    return row_mean(log_ratio, mask, epsilon).expand_as(log_ratio)


LOG_RATIOS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "token": lambda log_ratio, mask, epsilon: log_ratio,
    "sequence": _of_sequence,
    "sequence_token": lambda log_ratio, mask, epsilon: (
        log_ratio - log_ratio.detach() + _of_sequence(log_ratio, mask, epsilon).detach()
    ),
    "none": lambda log_ratio, mask, epsilon: torch.zeros_like(log_ratio),
}
