"""The rules by which success draws: what a prompt, or a source, of success p is worth, and the shares that follow."""

from collections.abc import Callable, Mapping


def learnability(success: float) -> float:
    """p (1 - p), the variance of a verdict: largest where half of the answers are right, 0 where a group teaches
    nothing (Rutherford et al. 2024, arXiv 2408.15099; Foster and Foerster 2025, arXiv 2502.12272)."""
    return success * (1 - success)


def failure(success: float) -> float:
    """1 - p (Kimi k1.5, arXiv 2501.12599, section 2.3.4)."""
    return 1 - success


RULES: dict[str, Callable[[float], float]] = {"learnability": learnability, "failure": failure}


def shares(base: Mapping[str, float], worth: Mapping[str, float], floor: float) -> dict[str, float]:
    """floor b_i + (1 - floor) b_i f_i / sum_j b_j f_j with the base shares b, which sum to 1, and the worth f.

    Where nothing is worth anything, the base shares. They sum to 1 either way.
    """
    total = sum(base.values())
    favoured = sum(base[name] * worth[name] for name in base)
    if not favoured:
        return {name: weight / total for name, weight in base.items()}
    return {
        name: floor * weight / total + (1 - floor) * weight * worth[name] / favoured
        for name, weight in base.items()
    }
