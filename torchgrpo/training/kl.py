"""KL estimators per token, from the log-probs of the sampled tokens alone (k1, k2, k3: Schulman 2020)."""

from collections.abc import Callable

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig

ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda difference: -difference,
    "k2": lambda difference: 0.5 * difference.square(),
    "k3": lambda difference: torch.expm1(difference) - difference,
    "abs": lambda difference: difference.abs(),
}


def kl_estimate(
    policy: PolicyConfig,
    log_prob: Tensor,
    other_log_prob: Tensor,
    inside: Tensor,
    importance: Tensor | None = None,
) -> Tensor:
    """KL(policy || other) per token, [N, R]; 0 where `inside` (bool) is False, whatever stands there.

    importance: [N, R], a factor of each estimate, before `kl_clamp`.
    """
    difference = torch.where(inside, other_log_prob - log_prob, 0.0)
    if policy.kl_log_ratio_clamp is not None:
        difference = difference.clamp(-policy.kl_log_ratio_clamp, policy.kl_log_ratio_clamp)
    estimate = ESTIMATORS[policy.kl_estimator](difference)
    if importance is not None:
        estimate = estimate * torch.where(inside, importance, 1.0)
    if policy.kl_clamp is not None:
        estimate = estimate.clamp(-policy.kl_clamp, policy.kl_clamp)
    return estimate
