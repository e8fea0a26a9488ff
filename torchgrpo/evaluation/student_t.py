"""Two-sided p-values and quantiles of Student's t distribution for whole degrees of freedom."""

import math
from functools import cache

import numpy as np


def two_sided_p(t: float, degrees_of_freedom: int) -> float:
    """Returns the probability that |T| is at least |t|.

    The series are those of Abramowitz and Stegun (1964), 26.7.3 and 26.7.4, exact but for rounding (1e-14).

    Raises:
        ValueError: degrees_of_freedom is below 1.
    """
    if degrees_of_freedom < 1:
        raise ValueError(f"{degrees_of_freedom} degrees of freedom: at least 1 is needed")
    angle = math.atan2(abs(t), math.sqrt(degrees_of_freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    if degrees_of_freedom % 2:
        steps = np.arange(2, degrees_of_freedom - 1, 2)
        terms = np.cumprod(np.concatenate([[cosine], steps / (steps + 1) * cosine**2]))
        series = angle + (sine * float(terms.sum()) if degrees_of_freedom > 1 else 0.0)
        return max(0.0, 1 - 2 / math.pi * series)
    steps = np.arange(1, degrees_of_freedom - 1, 2)
    terms = np.cumprod(np.concatenate([[1.0], steps / (steps + 1) * cosine**2]))
    return max(0.0, 1 - sine * float(terms.sum()))


@cache
def two_sided_quantile(confidence: float, degrees_of_freedom: int) -> float:
    """Returns the t for which |T| <= t has probability `confidence`.

    Infinity for 0 degrees of freedom.
    """
    if degrees_of_freedom == 0:
        return math.inf
    low, high = 0.0, 1.0
    while two_sided_p(high, degrees_of_freedom) > 1 - confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, degrees_of_freedom) > 1 - confidence else (low, middle)
    return high
