"""The policy term of each token, by `policy.objective`, and where its clip binds."""

from collections.abc import Callable

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.loss_inputs import LossInputs, row_mean, row_sum


def _clipped(policy: PolicyConfig, ratio: Tensor) -> Tensor:
    return ratio.clamp(1 - policy.clip_epsilon_low, 1 + policy.clip_epsilon_high)


def _clip(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    advantage = inputs.advantage
    ratio = inputs.ratio if policy.ratio_max is None else inputs.ratio.clamp(max=policy.ratio_max)
    loss = -torch.minimum(ratio * advantage, _clipped(policy, inputs.ratio) * advantage)
    if policy.dual_clip is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -policy.dual_clip * advantage), loss)


def _either(condition: Tensor, first: float, second: float, like: Tensor) -> Tensor:
    """`first` where `condition` holds, `second` elsewhere, in the dtype and on the device of `like`."""
    return torch.where(condition, like.new_full((), first), like.new_full((), second))


def _soft_clip(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    first, second = policy.soft_clip_temperature_positive, policy.soft_clip_temperature_negative
    temperature = _either(inputs.advantage > 0, first, second, inputs.ratio)
    gate = torch.sigmoid(temperature * (inputs.ratio - 1)) * 4 / temperature
    return -gate * inputs.advantage


def _geometric(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    sign = inputs.advantage.sign()
    log_ratio = inputs.log_ratio
    clipped = log_ratio.clamp(-policy.clip_epsilon_low, policy.clip_epsilon_high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clipped)
    ratio = row_mean(pessimistic, inputs.mask, policy.length_epsilon).exp()
    advantage = row_mean(inputs.advantage, inputs.mask, policy.length_epsilon)
    return (-ratio * advantage).expand_as(log_ratio)


LOG_W_MIN, LOG_W_MAX = -18.420680743952367, 20.0
"""log(1e-8) and 20: where VESPO's sequence ratio is cut off."""


def _vespo(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """phi(W) = W^k exp(lambda (1 - W)) with W = p(sequence) / q(sequence), the engine's where a mismatch is weighed."""
    log_w = row_sum(inputs.log_ratio.detach().clamp(-20.0, 20.0), inputs.mask)
    if policy.mismatch != "none":
        weight = (inputs.old - inputs.sample).exp().clamp(policy.mismatch_floor, policy.mismatch_cap)
        log_w = log_w + row_sum(weight.log().clamp(LOG_W_MIN, LOG_W_MAX), inputs.mask)
    log_w = log_w.clamp(LOG_W_MIN, LOG_W_MAX)
    positive = inputs.advantage >= 0
    power, slope = (_either(positive, *pair, inputs.ratio) for pair in (VESPO_POWERS, VESPO_SLOPES))
    phi = (slope + power * log_w - slope * log_w.exp()).exp()
    return -phi * inputs.advantage * inputs.log_prob


VESPO_POWERS, VESPO_SLOPES = (2.0, 3.0), (3.0, 2.0)
"""k and lambda of `_vespo`, where the advantage is not negative and where it is."""


POLICY_TERMS: dict[str, Callable[[PolicyConfig, LossInputs], Tensor]] = {
    "clip": _clip,
    "cispo": lambda policy, of: -_clipped(policy, of.ratio).detach() * of.advantage * of.log_prob,
    "clamp": lambda policy, of: -_clipped(policy, of.ratio) * of.advantage,
    "soft_clip": _soft_clip,
    "geometric": _geometric,
    "vespo": _vespo,
    "none": lambda policy, of: -(of.log_prob if policy.ratio == "none" else of.ratio) * of.advantage,
}


PROPORTIONAL = frozenset({"clip", "cispo", "clamp", "soft_clip", "geometric", "vespo", "none"})
"""Policy terms that are something finite times the advantage of the token's row."""


def teaching_rows(policy: PolicyConfig, advantage: Tensor, mask: Tensor) -> Tensor:
    """The rows whose gradient need not be zero, bool [N].

    It is zero where the advantage is, if nothing but a `PROPORTIONAL` policy term has a gradient.

    advantage: [N, 1] or [N, R], the reward's; a teacher may add to any of them. mask: bool [N, R], in the loss.
    """
    others = (
        policy.kl_coef if policy.kl_placement == "loss" else 0.0,
        policy.kl_inference_coef,
        policy.environment_coef,
        policy.covariance_penalty if policy.select_tokens == "kl_covariance" else 0.0,
    )
    if policy.objective not in PROPORTIONAL or any(others) or policy.uses_entropy:
        return torch.ones(len(mask), dtype=torch.bool, device=mask.device)
    if policy.distill_coef != 0:
        return mask.any(1)
    return (advantage != 0).any(1) & mask.any(1)


Binding = tuple[Tensor, Tensor]
"""bool [N, R]: where the lower and where the upper clip binds, that is, changes the gradient."""


def _binds_by_sign(policy: PolicyConfig, inputs: LossInputs) -> Binding:
    low, high = _binds_always(policy, inputs)
    return low & (inputs.advantage < 0), high & (inputs.advantage > 0)


def _binds_always(policy: PolicyConfig, inputs: LossInputs) -> Binding:
    return inputs.ratio < 1 - policy.clip_epsilon_low, inputs.ratio > 1 + policy.clip_epsilon_high


def _binds_in_log_space(policy: PolicyConfig, inputs: LossInputs) -> Binding:
    low = inputs.log_ratio < -policy.clip_epsilon_low
    high = inputs.log_ratio > policy.clip_epsilon_high
    return low & (inputs.advantage < 0), high & (inputs.advantage > 0)


def _binds_never(policy: PolicyConfig, inputs: LossInputs) -> Binding:
    never = torch.zeros_like(inputs.mask)
    return never, never


CLIP_BINDS: dict[str, Callable[[PolicyConfig, LossInputs], Binding]] = {
    "clip": _binds_by_sign,
    "cispo": _binds_always,
    "clamp": _binds_always,
    "soft_clip": _binds_never,
    "geometric": _binds_in_log_space,
    "vespo": _binds_never,
    "none": _binds_never,
}
