"""Policy terms, one file of `objectives/` for each value of `policy.objective`, and where their clips bind."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from config.schema.policy import OBJECTIVES, PolicyConfig
from torchgrpo.training.loss_inputs import LossInputs

Binding = tuple[Tensor, Tensor]
"""bool [N, R]: where the lower and where the upper clip binds, that is, changes the gradient."""


@dataclass(frozen=True)
class PolicyTerm:
    """An objective.

    loss: of each token, [N, R]. binds: where its clip does. proportional: the loss is something finite times the
    advantage of the token's row, so that rows with none have no gradient.
    """

    loss: Callable[[PolicyConfig, LossInputs], Tensor]
    binds: Callable[[PolicyConfig, LossInputs], Binding]
    proportional: bool = True


def policy_term(policy: PolicyConfig) -> PolicyTerm:
    term: PolicyTerm = OBJECTIVES.load(policy.objective)
    return term


def clipped(policy: PolicyConfig, ratio: Tensor) -> Tensor:
    return ratio.clamp(1 - policy.clip_epsilon_low, 1 + policy.clip_epsilon_high)


def either(condition: Tensor, first: float, second: float, like: Tensor) -> Tensor:
    """`first` where `condition` holds, `second` elsewhere, in the dtype and on the device of `like`."""
    return torch.where(condition, like.new_full((), first), like.new_full((), second))


def binds_by_sign(policy: PolicyConfig, inputs: LossInputs) -> Binding:
    low, high = binds_always(policy, inputs)
    return low & (inputs.advantage < 0), high & (inputs.advantage > 0)


def binds_always(policy: PolicyConfig, inputs: LossInputs) -> Binding:
    return inputs.ratio < 1 - policy.clip_epsilon_low, inputs.ratio > 1 + policy.clip_epsilon_high


def binds_never(policy: PolicyConfig, inputs: LossInputs) -> Binding:
    never = torch.zeros_like(inputs.mask)
    return never, never


def teaching_rows(policy: PolicyConfig, advantage: Tensor, mask: Tensor) -> Tensor:
    """The rows whose gradient need not be zero, bool [N].

    It is zero where the advantage is, if nothing but a proportional policy term has a gradient.

    advantage: [N, 1] or [N, R], the reward's; a teacher may add to any of them. mask: bool [N, R], in the loss.
    """
    others = (
        policy.kl_coef if policy.kl_placement == "loss" else 0.0,
        policy.kl_inference_coef,
        policy.environment_coef,
        policy.covariance_penalty if policy.select_tokens == "kl_covariance" else 0.0,
    )
    if not policy_term(policy).proportional or any(others) or policy.uses_entropy:
        return torch.ones(len(mask), dtype=torch.bool, device=mask.device)
    if policy.distill_coef != 0:
        return mask.any(1)
    return (advantage != 0).any(1) & mask.any(1)
