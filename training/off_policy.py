"""How far the policy that generated a batch lies from the one that trains on it: gap, and sample size by age."""

from collections.abc import Sequence

import torch
from torch import Tensor

from training.loss_metrics import Metrics, effective_sample_size_of


def gap_percentiles(gaps: Sequence[Tensor]) -> dict[str, float]:
    """`mismatch/p50`, `p99` and `max` of |trainer log-prob - engine log-prob|; zeros without a token.

    gaps: of the tokens in the loss, one 1-D tensor a microbatch.
    """
    values = torch.cat(list(gaps)).float().sort().values
    count = values.numel()
    if not count:
        return {"mismatch/p50": 0.0, "mismatch/p99": 0.0, "mismatch/max": 0.0}
    places = [int(share * (count - 1)) for share in (0.5, 0.99, 1.0)]
    p50, p99, largest = values[places].tolist()
    return {"mismatch/p50": p50, "mismatch/p99": p99, "mismatch/max": largest}


@torch.no_grad()
def effective_sample_size_by_age(
    log_prob: Tensor, sample_log_prob: Tensor, age: Tensor, mask: Tensor, max_age: int
) -> Metrics:
    """Accumulators of `ess/age_K`, K = 0 ... max_age, of the ratios trainer / engine over the tokens of that age.

    log_prob, sample_log_prob: [N, R]. age: int64 [N, R], versions since the token was drawn. mask: [N, R].
    """
    log_ratio = log_prob.detach() - sample_log_prob
    return {
        f"ess/age_{k}": effective_sample_size_of(log_ratio, mask & (age == k)) for k in range(max_age + 1)
    }
