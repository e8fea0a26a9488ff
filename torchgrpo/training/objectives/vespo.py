"""The objective `vespo`: log-prob times a smooth function of the sequence's whole ratio (VESPO)."""

from torch import Tensor

from config.schema.policy import PolicyConfig
from torchgrpo.training.loss_inputs import LossInputs, row_sum
from torchgrpo.training.policy_terms import PolicyTerm, binds_never, either

LOG_W_MIN, LOG_W_MAX = -18.420680743952367, 20.0
"""log(1e-8) and 20: where VESPO's sequence ratio is cut off."""


def _loss(policy: PolicyConfig, inputs: LossInputs) -> Tensor:
    """phi(W) = W^k exp(lambda (1 - W)) with W = p(sequence) / q(sequence), the engine's where a mismatch is weighed."""
    log_w = row_sum(inputs.log_ratio.detach().clamp(-20.0, 20.0), inputs.mask)
    if policy.mismatch != "none":
        weight = (inputs.old - inputs.sample).exp().clamp(policy.mismatch_floor, policy.mismatch_cap)
        log_w = log_w + row_sum(weight.log().clamp(LOG_W_MIN, LOG_W_MAX), inputs.mask)
    log_w = log_w.clamp(LOG_W_MIN, LOG_W_MAX)
    positive = inputs.advantage >= 0
    power, slope = (either(positive, *pair, inputs.ratio) for pair in (VESPO_POWERS, VESPO_SLOPES))
    phi = (slope + power * log_w - slope * log_w.exp()).exp()
    return -phi * inputs.advantage * inputs.log_prob


VESPO_POWERS, VESPO_SLOPES = (2.0, 3.0), (3.0, 2.0)
"""k and lambda of `_loss`, where the advantage is not negative and where it is."""


TERM = PolicyTerm(_loss, binds_never)
