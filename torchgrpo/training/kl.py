"""Per-token KL estimators from log-probs of sampled tokens (k1, k2, k3: Schulman 2020)."""

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
    policy: PolicyConfig, log_prob: Tensor, other_log_prob: Tensor, mask: Tensor, importance: Tensor | None = None
) -> Tensor:
    """Estimates KL(policy || other) per token, [N, R].

    mask: bool [N, R]; the estimate is 0 where false, even for non-finite inputs. importance: [N, R], factor of
    each estimate, before `kl_clamp`.
    """
    difference = torch.where(mask, other_log_prob - log_prob, 0.0)
    if policy.kl_log_ratio_clamp is not None:
        difference = difference.clamp(-policy.kl_log_ratio_clamp, policy.kl_log_ratio_clamp)
    estimate = ESTIMATORS[policy.kl_estimator](difference)
    if importance is not None:
        estimate = estimate * torch.where(mask, importance, 1.0)
    if policy.kl_clamp is not None:
        estimate = estimate.clamp(-policy.kl_clamp, policy.kl_clamp)
    return estimate
