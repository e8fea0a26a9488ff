"""Policy term `vespo`: log-prob weighted by advantage and a smooth function of the sequence ratio."""

from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.loss_inputs import LossInputs, episode_sum
from torchgrpo.training.policy_terms import PolicyTerm, clip_binds_nowhere, scalar_where

LOG_W_MIN, LOG_W_MAX = -18.420680743952367, 20.0
"""Bounds of the log of the sequence ratio: log(1e-8) and 20."""


def _loss(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """Computes the loss of each token, [N, R].

    The weight is phi(W) = W^k exp(lambda (1 - W)) with W = p(sequence) / q(sequence). q is the engine's
    distribution if `policy.mismatch` is set.
    """
    log_w = episode_sum(inputs.log_ratio.detach().clamp(-20.0, 20.0), inputs.mask, inputs.episodes)
    if policy.mismatch != "none":
        weight = (inputs.old_log_prob - inputs.sample_log_prob).exp().clamp(policy.mismatch_floor, policy.mismatch_cap)
        log_w = log_w + episode_sum(weight.log().clamp(LOG_W_MIN, LOG_W_MAX), inputs.mask, inputs.episodes)
    log_w = log_w.clamp(LOG_W_MIN, LOG_W_MAX)
    positive = inputs.advantage >= 0
    power, slope = (scalar_where(positive, *pair, inputs.ratio) for pair in (VESPO_POWERS, VESPO_SLOPES))
    phi = (slope + power * log_w - slope * log_w.exp()).exp()
    return -phi * inputs.advantage * inputs.log_prob


VESPO_POWERS, VESPO_SLOPES = (2.0, 3.0), (3.0, 2.0)
"""k and lambda of `_loss`, each for non-negative and for negative advantages."""


TERM = PolicyTerm(_loss, clip_binds_nowhere)
