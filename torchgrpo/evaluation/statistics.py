"""Statistics of evaluations: pass@k, avg@n, confidence intervals, a paired test, and a text table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchgrpo.evaluation.student_t import two_sided_p, two_sided_quantile

CONFIDENCE_LEVEL = 0.95
_DESIGN_PRIOR, _EQUAL_TOLERANCE = 0.1, 1e-12


@dataclass(frozen=True)
class ProblemResults:
    """Results of one problem: an entry for every scored completion, in sampling order.

    correct: solved or not. scores: rewards. lengths: sampled tokens. truncated: cut off at the limit.
    errors: number of completions without a score, through no fault of the model; they are in no other field.
    """

    correct: tuple[bool, ...]
    scores: tuple[float, ...]
    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]
    errors: int = 0


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns the probability that k of n completions, sampled without replacement, include a correct one.

    c: number of correct completions.

    The estimator is unbiased for k fresh completions (Chen et al. 2021, arXiv 2107.03374):
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
    """Returns the ends of 95% intervals of column means, for values in 0..1.

    values: [problems, columns], a sample of problems of the same kind; NaN leaves a problem out of a column. Every
    column has at least one value; a column with only one has the interval 0..1.

    Wilson's interval (1927) with the effective sample size of the spread over problems (Korn and Graubard 1998, Survey
    Methodology 24) and Student's quantile: with p the mean, s^2 the variance, N problems,
    d = (N s^2 + c) / (N p (1 - p) + c) and a = t^2 d / N, the ends are
    (p + a/2 +- sqrt(a p (1 - p) + a^2 / 4)) / (1 + a). Where nearly all problems agree, s^2 is unreliable: c = 0.1
    then takes d to 1, the value of one answer per problem.

    Returns the lower and the upper ends, [columns].
    """
    counts, means, variances, quantiles = _moments(values)
    spread = means * (1 - means)
    design = (counts * variances + _DESIGN_PRIOR) / (counts * spread + _DESIGN_PRIOR)
    a = np.where(counts > 1, quantiles, 0.0) ** 2 * design / counts
    half = np.sqrt(a * spread + a * a / 4)
    low, high = ((means + a / 2 + sign * half) / (1 + a) for sign in (-1, 1))
    return np.where(counts > 1, low.clip(0), 0.0), np.where(counts > 1, high.clip(None, 1), 1.0)


def mean_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ends of 95% intervals of column means, for unbounded values, by Student's t.

    Shapes and NaN are as in `proportion_interval`. With one problem both ends are its value.
    """
    counts, means, variances, quantiles = _moments(values)
    half = np.where(counts > 1, quantiles, 0.0) * np.sqrt(variances / counts)
    return means - half, means + half


def _moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the number of values, mean, variance and t quantile of each column.

    The variance of one value is 0.
    """
    counts = (~np.isnan(values)).sum(axis=0)
    means = np.nanmean(values, axis=0)
    variances = np.nansum((values - means) ** 2, axis=0) / np.maximum(counts - 1, 1)
    quantiles = np.array([two_sided_quantile(CONFIDENCE_LEVEL, int(count) - 1) for count in counts])
    return counts, means, variances, quantiles


@dataclass(frozen=True)
class PairedTest:
    """Difference between two evaluations of the same problems, the last less the first.

    difference: of the mean success, -1 to 1. low, high: its 95% interval. problems: number scored in both.
    p_value: two-sided p-value under the hypothesis that the policies are equally good.
    """

    difference: float
    low: float
    high: float
    p_value: float
    problems: int

    @property
    def significant(self) -> bool:
        """Whether the difference is significant at the 5% level: exactly where the interval excludes 0."""
        return self.p_value < 1 - CONFIDENCE_LEVEL

    @property
    def summary(self) -> str:
        """Result as one line of text, in percentage points."""
        if not self.problems:
            return "no problem was scored in both"
        ends = f"[{100 * self.low:.1f}, {100 * self.high:.1f}]"
        chance = f"p = {self.p_value:.2g}" if self.p_value >= 0.001 else "p < 0.001"
        if not self.significant:
            return f"not significant: {100 * self.difference:+.1f} points {ends}, {chance}"
        verb = "improved" if self.difference > 0 else "worsened"
        return f"{verb} by {100 * abs(self.difference):.1f} points {ends}, {chance}"


def paired_test(first: Sequence[float] | np.ndarray, last: Sequence[float] | np.ndarray) -> PairedTest:
    """Compares the success of two evaluations on the same problems with Student's paired t-test.

    first, last: success of each problem, in 0..1; NaN where no completion was scored.

    Pairs remove the variance between problems (Miller 2024, arXiv 2411.00640, section 4). Equal differences have no
    spread. Then pseudo-observations are added: 1 and -1, each with the weight of half a problem, and a 0 (Agresti and
    Min 2005, Statistics in Medicine 24).

    Raises:
        ValueError: not the same number of problems.
    """
    if len(first) != len(last):
        raise ValueError(f"{len(first)} and {len(last)} problems: a paired comparison needs equal numbers")
    differences = np.asarray(last, dtype=float) - np.asarray(first, dtype=float)
    differences = differences[~np.isnan(differences)]
    problems = len(differences)
    if problems < 2:
        difference = float(differences.sum())
        return PairedTest(difference, -1.0, 1.0, 1.0, problems)
    difference = centre = float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(problems)
    if np.ptp(differences) < _EQUAL_TOLERANCE:
        weight = problems + 2
        centre *= problems / weight
        error = math.sqrt(((differences @ differences + 1) / weight - centre**2) / weight)
    reach = two_sided_quantile(CONFIDENCE_LEVEL, problems - 1) * error
    p_value = two_sided_p(centre / error, problems - 1)
    return PairedTest(difference, max(-1.0, centre - reach), min(1.0, centre + reach), p_value, problems)


def summarize(results: Sequence[ProblemResults], n: int) -> dict[str, float]:
    """Computes the metrics of a set of problems with n completions each.

    pass@1 ... pass@n, avg@n (share of correct completions) and score (mean reward), each with `_low` and
    `_high`, the ends of its 95% interval over problems; length and truncated (share) over completions; errors
    (share) and problems. A problem with m < n scored completions counts in pass@k for k <= m. A problem without
    scored completions counts in `errors` only.
    """
    scored = [problem for problem in results if problem.correct]
    failed = sum(problem.errors for problem in results)
    attempts = failed + sum(len(problem.correct) for problem in scored)
    metrics = {"problems": float(len(scored)), "errors": failed / max(1, attempts)}
    if not scored:
        return metrics
    largest = max(len(problem.correct) for problem in scored)
    names = [*(f"pass@{k}" for k in range(1, largest + 1)), f"avg@{n}", "score"]
    rows = []
    for problem in scored:
        m, correct = len(problem.correct), sum(problem.correct)
        passes = [pass_at_k(m, correct, k) if k <= m else math.nan for k in range(1, largest + 1)]
        rows.append([*passes, correct / m, float(np.mean(problem.scores))])
    values = np.array(rows)
    shares, scores = proportion_interval(values[:, :-1]), mean_interval(values[:, -1:])
    ends = [np.concatenate(both) for both in zip(shares, scores, strict=True)]
    for name, mean, low, high in zip(names, np.nanmean(values, axis=0), *ends, strict=True):
        metrics |= {name: float(mean), f"{name}_low": float(low), f"{name}_high": float(high)}
    lengths = [length for problem in scored for length in problem.lengths]
    truncated = [cut for problem in scored for cut in problem.truncated]
    return metrics | {"length": float(np.mean(lengths)), "truncated": float(np.mean(truncated))}


def format_table(name: str, metrics: dict[str, float], n: int) -> str:
    """Returns the metrics of a set as text.

    The k of pass@k are 1, n, and the powers of two below n up to 256. The mean reward is shown where it differs from
    the share of correct completions.
    """
    ks = sorted({1, n, *(k for k in (2, 4, 8, 16, 32, 64, 128, 256) if k < n)})
    lines = [f"{name}: {metrics['problems']:.0f} problems, {n} completions each"]
    labels = {f"pass@{k}": f"pass@{k}" for k in ks if f"pass@{k}" in metrics}
    if abs(metrics.get("score", 0.0) - metrics.get(f"avg@{n}", 0.0)) > 1e-6:
        labels["score"] = "reward"
    for key, label in labels.items():
        low, high = metrics[f"{key}_low"], metrics[f"{key}_high"]
        lines.append(f"  {label:<9} {metrics[key]:.3f}  [{low:.3f}, {high:.3f}]")
    if "length" in metrics:
        lines.append(
            f"  length {metrics['length']:.1f}, truncated {metrics['truncated']:.1%}, errors {metrics['errors']:.1%}"
        )
    return "\n".join(lines)
