"""Absolute bounds, by dtype, on the difference between log-probs of engine and learner."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """Largest differences that rounding makes.

    mean, largest: over fixed sequences, |difference| / (1 + |log-prob|), for rounding grows with what is rounded.
    sampled: the mean of the same over tokens that an engine sampled. moved: nats by which the learner's log-probs
    differ between two checks, from which on an engine with the new weights cannot answer with the bits of before.
    """

    mean: float
    largest: float
    sampled: float
    moved: float


BOUNDS = {
    "float32": Bounds(mean=1e-4, largest=5e-3, sampled=5e-4, moved=1e-5),
    "tf32": Bounds(mean=1e-3, largest=5e-2, sampled=3e-3, moved=1e-4),
    "float16": Bounds(mean=2e-3, largest=1e-1, sampled=6e-3, moved=1e-3),
    "bfloat16": Bounds(mean=6e-3, largest=5e-1, sampled=3e-2, moved=5e-3),
    "fp8": Bounds(mean=5e-2, largest=1.0, sampled=1.5e-1, moved=5e-2),
}
"""The coarser arithmetic of the two sides counts. Figures of good and of faulty pushes: docs/benchmarks.md."""


def coarsest(dtypes: Iterable[str | None]) -> str:
    """The one of these that rounds most; None is none."""
    return max((dtype for dtype in dtypes if dtype is not None), key=list(BOUNDS).index)
