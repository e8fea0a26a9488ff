"""Loads an objective's policy term, and computes clip masks and masks of rows with gradient.

`objectives/NAME.py` has the policy term of `policy.objective=NAME`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from config.schema.policy import OBJECTIVES, PolicyConfig
from torchgrpo.training.loss_inputs import LossInputs

ClipMasks = tuple[Tensor, Tensor]
"""Masks, bool [N, R], of tokens whose lower and whose upper clip binds, that is, changes the gradient."""


@dataclass(frozen=True)
class PolicyTerm:
    """Policy term of an objective.

    loss: computes the loss of each token, [N, R]. clip_binds: computes where the clip binds. proportional:
    whether the loss is a finite factor times the advantage of the row, so that rows with zero advantage have
    no gradient.
    """

    loss: Callable[[PolicyConfig, LossInputs], Tensor]
    clip_binds: Callable[[PolicyConfig, LossInputs], ClipMasks]
    proportional: bool = True


def policy_term(policy: PolicyConfig) -> PolicyTerm:
    """Loads the policy term of `policy.objective`."""
    term: PolicyTerm = OBJECTIVES.load(policy.objective)
    return term


def clip_ratio(policy: PolicyConfig, ratio: Tensor) -> Tensor:
    """Clips the ratio to the policy's clip range."""
    return ratio.clamp(1 - policy.clip_epsilon_low, 1 + policy.clip_epsilon_high)


def scalar_where(condition: Tensor, first: float, second: float, like: Tensor) -> Tensor:
    """Returns `first` where `condition` holds, `second` elsewhere, with dtype and device of `like`."""
    return torch.where(condition, like.new_full((), first), like.new_full((), second))


def clip_binds_by_sign(policy: PolicyConfig, inputs: LossInputs) -> ClipMasks:
    """Returns the clip masks if a clip binds only in the direction of the advantage."""
    low, high = clip_binds_either_sign(policy, inputs)
    return low & (inputs.advantage < 0), high & (inputs.advantage > 0)


def clip_binds_either_sign(policy: PolicyConfig, inputs: LossInputs) -> ClipMasks:
    """Returns the clip masks if a clip binds for advantages of either sign."""
    return inputs.ratio < 1 - policy.clip_epsilon_low, inputs.ratio > 1 + policy.clip_epsilon_high


def clip_binds_nowhere(policy: PolicyConfig, inputs: LossInputs) -> ClipMasks:
    """Returns all-false clip masks, for objectives without a clip."""
    all_false = torch.zeros_like(inputs.mask)
    return all_false, all_false


def rows_with_gradient(policy: PolicyConfig, advantage: Tensor, mask: Tensor) -> Tensor:
    """Returns a mask [N] of rows whose gradient may be nonzero.

    If only a proportional policy term has a gradient, rows with zero advantage have zero gradient.

    advantage: [N, 1] or [N, R], of the reward; a teacher may add to all of its values. mask: bool [N, R],
        tokens in the loss.
    """
    other_coefs = (
        policy.kl_coef if policy.kl_placement == "loss" else 0.0,
        policy.kl_inference_coef,
        policy.environment_coef,
        policy.covariance_penalty if policy.select_tokens == "kl_covariance" else 0.0,
    )
    if not policy_term(policy).proportional or any(other_coefs) or policy.uses_entropy:
        return torch.ones(len(mask), dtype=torch.bool, device=mask.device)
    if policy.distill_coef != 0:
        return mask.any(1)
    return (advantage != 0).any(1) & mask.any(1)
