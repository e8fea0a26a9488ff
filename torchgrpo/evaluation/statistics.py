"""What an evaluation says, as pure functions of who solved what: pass@k, avg@k, intervals, and a paired test."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchgrpo.evaluation.student_t import two_sided_p, two_sided_quantile

CONFIDENCE = 0.95
_AGREEMENT, _SAME = 0.1, 1e-12


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


def proportion_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95% intervals of the means of `values` [problems, columns], each in 0..1, over problems of the same kind.

    Wilson's (1927) with as many independent answers as the spread over problems is worth (effective sample size, Korn
    and Graubard 1998, Survey Methodology 24) and Student's quantile: with p the mean, s^2 the variance, N problems,
    d = (N s^2 + c) / (N p (1 - p) + c) and a = t^2 d / N, the ends are
    (p + a/2 +- sqrt(a p (1 - p) + a^2 / 4)) / (1 + a). c = 0.1 takes d to 1, as of one answer a problem, where nearly
    all problems agree and s^2 says little.

    NaN: the problem does not count in that column; every column counts at least one, and one alone says nothing: 0..1.
    Returns the lower and the upper ends, [columns].
    """
    counts, means, variances, quantiles = _moments(values)
    spread = means * (1 - means)
    design = (counts * variances + _AGREEMENT) / (counts * spread + _AGREEMENT)
    a = np.where(counts > 1, quantiles, 0.0) ** 2 * design / counts
    half = np.sqrt(a * spread + a * a / 4)
    low, high = ((means + a / 2 + sign * half) / (1 + a) for sign in (-1, 1))
    return np.where(counts > 1, low.clip(0), 0.0), np.where(counts > 1, high.clip(None, 1), 1.0)


def mean_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `proportion_interval`, of values without bounds: Student's t. Of one problem both ends are its value."""
    counts, means, variances, quantiles = _moments(values)
    half = np.where(counts > 1, quantiles, 0.0) * np.sqrt(variances / counts)
    return means - half, means + half


def _moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of each column: counted problems, mean, variance (0 of one), t quantile."""
    counts = (~np.isnan(values)).sum(axis=0)
    means = np.nanmean(values, axis=0)
    variances = np.nansum((values - means) ** 2, axis=0) / np.maximum(counts - 1, 1)
    quantiles = np.array([two_sided_quantile(CONFIDENCE, int(count) - 1) for count in counts])
    return counts, means, variances, quantiles


@dataclass(frozen=True)
class PairedTest:
    """How two evaluations of the same problems differ, the last less the first.

    difference: of the mean success, -1 to 1. low, high: its 95% interval. problems: those judged in both.
    p_value: chance of a difference at least as large, either way, where the policies are equally good; two-sided.
    """

    difference: float
    low: float
    high: float
    p_value: float
    problems: int

    @property
    def significant(self) -> bool:
        """At the 5% level; exactly where the interval leaves out 0."""
        return self.p_value < 1 - CONFIDENCE

    @property
    def words(self) -> str:
        """One line for a person, in percentage points."""
        if not self.problems:
            return "no problem was judged in both"
        ends = f"[{100 * self.low:.1f}, {100 * self.high:.1f}]"
        chance = f"p = {self.p_value:.2g}" if self.p_value >= 0.001 else "p < 0.001"
        if not self.significant:
            return f"not significant: {100 * self.difference:+.1f} points {ends}, {chance}"
        verb = "improved" if self.difference > 0 else "worsened"
        return f"{verb} by {100 * abs(self.difference):.1f} points {ends}, {chance}"


def paired_test(first: Sequence[float] | np.ndarray, last: Sequence[float] | np.ndarray) -> PairedTest:
    """Student's paired t-test of each problem's success, in 0..1, NaN where it was not judged.

    Pairs take out how hard a problem is (Miller 2024, arXiv 2411.00640, section 4). Where all differences are equal
    they have no spread to measure; then two made-up ones, 1 and -1 of half a problem's weight each beside one of 0,
    stand in (Agresti and Min 2005, Statistics in Medicine 24).

    Raises:
        ValueError: not the same number of problems.
    """
    if len(first) != len(last):
        raise ValueError(f"{len(first)} and {len(last)} problems: a pair needs both")
    differences = np.asarray(last, dtype=float) - np.asarray(first, dtype=float)
    differences = differences[~np.isnan(differences)]
    problems = len(differences)
    if problems < 2:
        difference = float(differences.sum())
        return PairedTest(difference, -1.0, 1.0, 1.0, problems)
    difference = centre = float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(problems)
    if np.ptp(differences) < _SAME:
        weight = problems + 2
        centre *= problems / weight
        error = math.sqrt(((differences @ differences + 1) / weight - centre**2) / weight)
    reach = two_sided_quantile(CONFIDENCE, problems - 1) * error
    p_value = two_sided_p(centre / error, problems - 1)
    return PairedTest(difference, max(-1.0, centre - reach), min(1.0, centre + reach), p_value, problems)


def summarize(tallies: Sequence[Tally], n: int) -> dict[str, float]:
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
    rows = []
    for tally in judged:
        m, correct = len(tally.correct), sum(tally.correct)
        passes = [pass_at_k(m, correct, k) if k <= m else math.nan for k in range(1, largest + 1)]
        rows.append([*passes, correct / m, float(np.mean(tally.scores))])
    values = np.array(rows)
    shares, scores = proportion_interval(values[:, :-1]), mean_interval(values[:, -1:])
    ends = [np.concatenate(both) for both in zip(shares, scores, strict=True)]
    for name, mean, low, high in zip(names, np.nanmean(values, axis=0), *ends, strict=True):
        metrics |= {name: float(mean), f"{name}_low": float(low), f"{name}_high": float(high)}
    lengths = [length for tally in judged for length in tally.lengths]
    truncated = [cut for tally in judged for cut in tally.truncated]
    return metrics | {"length": float(np.mean(lengths)), "truncated": float(np.mean(truncated))}


def table(name: str, metrics: dict[str, float], n: int) -> str:
    """A few lines for a person: pass@k at powers of two, the rest in words."""
    ks = sorted({1, n, *(k for k in (2, 4, 8, 16, 32, 64, 128, 256) if k < n)})
    lines = [f"{name}: {metrics['problems']:.0f} problems, {n} completions each"]
    for key in [f"pass@{k}" for k in ks if f"pass@{k}" in metrics]:
        low, high = metrics[f"{key}_low"], metrics[f"{key}_high"]
        lines.append(f"  {key:<9} {metrics[key]:.3f}  [{low:.3f}, {high:.3f}]")
    if "length" in metrics:
        lines.append(
            f"  length {metrics['length']:.1f}, truncated {metrics['truncated']:.1%}, errors {metrics['errors']:.1%}"
        )
    return "\n".join(lines)
