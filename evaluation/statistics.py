"""What an evaluation says, as pure functions of who solved what: pass@k, avg@k, intervals over problems."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Tally:
    """One problem: one entry for every completion that could be judged, in sampling order.

    correct: solved or not. scores: rewards. lengths: sampled tokens. truncated: cut off at the limit.
    errors: completions that could not be judged through no fault of the model; they are in no other entry.
    """

    correct: tuple[bool, ...]
    scores: tuple[float, ...]
    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]
    errors: int = 0


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n completions, drawn without replacement, hold one of the c correct ones.

    Unbiased for the chance that k fresh completions hold a correct one (Chen et al. 2021, arXiv 2107.03374):
    1 - prod_{i=n-c+1..n} (1 - k / i).

    Raises:
        ValueError: k is not in 1..n, or c not in 0..n.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@k of n={n}, c={c}, k={k}: needs 1 <= k <= n and 0 <= c <= n")
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def bootstrap(values: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Percentile intervals of the means of `values` [problems, columns] under resampling of problems.

    NaN: the problem does not count in that column; every column counts at least one. Returns the lower and
    the upper ends, [columns].
    """
    problems = len(values)
    counted = ~np.isnan(values)
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(problems, np.full(problems, 1 / problems), size=RESAMPLES).astype(float)
    sums, weights = drawn @ np.where(counted, values, 0.0), drawn @ counted
    means = np.divide(sums, weights, out=np.full_like(sums, np.nan), where=weights > 0)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.nanquantile(means, [tail, 1 - tail], axis=0)
    return low, high


def summarize(tallies: Sequence[Tally], n: int, seed: int = 0) -> dict[str, float]:
    """Metrics of one set of problems with n completions each.

    pass@1 ... pass@n, avg@n (share of correct completions) and score (mean reward), each with `_low` and
    `_high`, the ends of its 95% interval over problems; length and truncated (share) over completions; errors
    (share) and problems. A problem with m < n judged completions counts in pass@k for k <= m; one without
    any counts in `errors` alone.
    """
    judged = [tally for tally in tallies if tally.correct]
    failed = sum(tally.errors for tally in tallies)
    attempts = failed + sum(len(tally.correct) for tally in judged)
    metrics = {"problems": float(len(judged)), "errors": failed / max(1, attempts)}
    if not judged:
        return metrics
    largest = max(len(tally.correct) for tally in judged)
    names = [*(f"pass@{k}" for k in range(1, largest + 1)), f"avg@{n}", "score"]
    values = np.array([_row(tally, largest) for tally in judged])
    ends = bootstrap(values, seed)
    for name, mean, low, high in zip(names, np.nanmean(values, axis=0), *ends, strict=True):
        metrics |= {name: float(mean), f"{name}_low": float(low), f"{name}_high": float(high)}
    lengths = [length for tally in judged for length in tally.lengths]
    truncated = [cut for tally in judged for cut in tally.truncated]
    return metrics | {"length": float(np.mean(lengths)), "truncated": float(np.mean(truncated))}


def _row(tally: Tally, largest: int) -> list[float]:
    """pass@1 ... pass@largest, the share of correct completions, the mean score of one problem."""
    m, correct = len(tally.correct), sum(tally.correct)
    passes = [pass_at_k(m, correct, k) if k <= m else float("nan") for k in range(1, largest + 1)]
    return [*passes, correct / m, float(np.mean(tally.scores))]


def table(name: str, metrics: dict[str, float], n: int) -> str:
    """A few lines for a person: pass@k at powers of two, the rest in words."""
    ks = sorted({1, n, *(k for k in (2, 4, 8, 16, 32, 64, 128, 256) if k < n)})
    lines = [f"{name}: {metrics['problems']:.0f} problems, {n} completions each"]
    for key in [f"pass@{k}" for k in ks if f"pass@{k}" in metrics]:
        lines.append(
            f"  {key:<9} {metrics[key]:.3f}  [{metrics[key + '_low']:.3f}, {metrics[key + '_high']:.3f}]"
        )
    if "length" in metrics:
        lines.append(
            f"  length {metrics['length']:.1f}, truncated {metrics['truncated']:.1%}, errors {metrics['errors']:.1%}"
        )
    return "\n".join(lines)
