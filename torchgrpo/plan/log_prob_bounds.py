"""Defines bounds on the difference between log-probs of engine and learner, by dtype."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """Largest differences of log-probs that rounding causes.

    mean, largest: bounds on |difference| / (1 + |log-prob|) over fixed sequences; the divisor is there because rounding
    errors grow with the rounded number. sampled_mean: bound on the mean of the same quotient over tokens that an engine
    sampled. log_prob_change: change of the learner's log-probs between two checks, in nats, above which an engine with
    the new weights cannot return the same bits as before.
    """

    mean: float
    largest: float
    sampled_mean: float
    log_prob_change: float


BOUNDS = {
    "float32": Bounds(mean=1e-4, largest=5e-3, sampled_mean=5e-4, log_prob_change=1e-5),
    "tf32": Bounds(mean=1e-3, largest=5e-2, sampled_mean=3e-3, log_prob_change=1e-4),
    "float16": Bounds(mean=2e-3, largest=1e-1, sampled_mean=6e-3, log_prob_change=1e-3),
    "bfloat16": Bounds(mean=6e-3, largest=5e-1, sampled_mean=3e-2, log_prob_change=5e-3),
    "fp8": Bounds(mean=5e-2, largest=1.0, sampled_mean=1.5e-1, log_prob_change=5e-2),
}
"""Bounds by dtype; the coarser dtype of engine and learner counts.

docs/benchmarks.md has measured differences of good and of faulty pushes.
"""


def coarsest_dtype(dtypes: Iterable[str | None]) -> str:
    """Returns the dtype that rounds most; None entries are ignored."""
    return max((dtype for dtype in dtypes if dtype is not None), key=list(BOUNDS).index)
