"""Do intervals hold the truth 95% of the time, and does the paired test cry wolf 5% of the time?

    python benchmarks/intervals.py [--trials 4000]

Prints tables over problems, completions of each (n) and pass rate. Every trial draws problems whose chances of being
solved spread around the pass rate (Beta with mean m and weight 1: most are nearly always or nearly never solved), then
n completions of each. `mixed` draws the pass rate of every trial from 0.02 to 0.98, which averages over what the
discreteness of few 0/1 answers does at one rate. `in doubt` is the mean number of problems whose two results differ.
A minute on one core.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from evaluation.statistics import paired_test, proportion_interval  # noqa: E402

PROBLEMS, COMPLETIONS = (10, 30, 100, 500), (1, 4, 8)
RATES = (0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 0.95, None)
GRAIN = 1e-9


def chances(
    problems: int, rate: float | None, trials: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Every problem's chance [problems, trials], and the true pass rate of each trial."""
    truth = generator.uniform(0.02, 0.98, trials) if rate is None else np.full(trials, rate)
    return generator.beta(truth, 1 - truth, size=(problems, trials)), truth


def coverage(
    problems: int, n: int, rate: float | None, trials: int, generator: np.random.Generator
) -> tuple[float, float]:
    """Shares of trials in which Wilson's interval, and the percentile bootstrap, hold the true pass rate."""
    chance, truth = chances(problems, rate, trials, generator)
    values = generator.binomial(n, chance) / n
    shares = []
    for low, high in (proportion_interval(values), percentile_bootstrap(values, generator)):
        shares.append(float(np.mean((low <= truth + GRAIN) & (high >= truth - GRAIN))))
    return shares[0], shares[1]


def percentile_bootstrap(values: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """What is usual, for comparison: 200 resamples of the problems."""
    drawn = generator.multinomial(len(values), np.full(len(values), 1 / len(values)), size=200)
    low, high = np.quantile(drawn @ values / len(values), [0.025, 0.975], axis=0)
    return low, high


def false_positives(
    problems: int, n: int, rate: float | None, trials: int, generator: np.random.Generator
) -> tuple[float, float]:
    """Share of pairs of equally good evaluations that differ significantly; problems in doubt."""
    chance, _ = chances(problems, rate, trials, generator)
    first, last = (generator.binomial(n, chance) / n for _ in range(2))
    found = [paired_test(first[:, trial], last[:, trial]).significant for trial in range(trials)]
    return float(np.mean(found)), float((first != last).sum(axis=0).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=4000)
    trials = parser.parse_args().trials
    generator = np.random.default_rng(0)
    heads = "".join(f"{rate or 'mixed':>12}" for rate in RATES)
    print(f"coverage of 95% intervals, % (percentile bootstrap in brackets)\nproblems  n{heads}")
    for problems in PROBLEMS:
        for n in COMPLETIONS:
            cells = (
                coverage(problems, n, rate, min(trials, 1_000_000 // problems), generator) for rate in RATES
            )
            row = "".join(f"{100 * ours:>6.1f} ({100 * usual:2.0f}) " for ours, usual in cells)
            print(f"{problems:>8} {n:>2}  {row}", flush=True)
    print(f"\nfalse positives of the paired test, % (problems in doubt)\nproblems  n{heads}")
    for problems in PROBLEMS:
        for n in COMPLETIONS:
            cells = (false_positives(problems, n, rate, trials, generator) for rate in RATES)
            row = "".join(f"{100 * share:>5.1f} ({doubt:>3.0f}) " for share, doubt in cells)
            print(f"{problems:>8} {n:>2}  {row}", flush=True)


if __name__ == "__main__":
    main()
