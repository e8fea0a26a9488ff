"""Rules for sampling priorities by recent success, and the resulting shares of data sources."""

from collections.abc import Callable, Mapping


def learnability(success: float) -> float:
    """Returns p (1 - p), the variance of a binary reward with success rate p.

    The largest value is at p = 0.5; at 0 and 1 a group has no gradient. Sources: Rutherford et al. 2024,
    arXiv 2408.15099; Foster and Foerster 2025, arXiv 2502.12272.
    """
    return success * (1 - success)


def failure(success: float) -> float:
    """Returns 1 - p, the failure rate (Kimi k1.5, arXiv 2501.12599, section 2.3.4)."""
    return 1 - success


PRIORITY_RULES: dict[str, Callable[[float], float]] = {"learnability": learnability, "failure": failure}
"""Rules by name, as in `env.curriculum.priority` and `env.curriculum.sources`."""


def source_shares(base_weights: Mapping[str, float], priorities: Mapping[str, float], floor: float) -> dict[str, float]:
    """Returns the sampling share of every data source; the shares sum to 1.

    With base shares b (the normalized base weights) and priorities f, the share of source i is
    floor b_i + (1 - floor) b_i f_i / sum_j b_j f_j. If all priorities are 0, the shares are b.
    """
    total = sum(base_weights.values())
    weighted_total = sum(base_weights[name] * priorities[name] for name in base_weights)
    if not weighted_total:
        return {name: weight / total for name, weight in base_weights.items()}
    return {
        name: floor * weight / total + (1 - floor) * weight * priorities[name] / weighted_total
        for name, weight in base_weights.items()
    }
