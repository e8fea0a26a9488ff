"""Tests pass@k against counting, and intervals and the paired test against simulations."""

import math
from itertools import combinations

import numpy as np
import pytest

from torchgrpo.evaluation.statistics import (
    ProblemResults,
    format_table,
    mean_interval,
    paired_test,
    pass_at_k,
    proportion_interval,
    summarize,
)
from torchgrpo.evaluation.student_t import two_sided_p, two_sided_quantile


def problem_results(*correct: bool, errors: int = 0) -> ProblemResults:
    count = len(correct)
    return ProblemResults(correct, tuple(float(c) for c in correct), (10,) * count, (False,) * count, errors)


@pytest.mark.parametrize(
    ("c", "expected"),
    [
        (0, {1: 0.0, 2: 0.0, 4: 0.0, 8: 0.0}),
        (1, {1: 0.125, 2: 0.25, 4: 0.5, 8: 1.0}),
        (3, {1: 0.375, 2: 0.642857, 4: 0.928571, 8: 1.0}),
    ],
)
def test_pass_at_k_has_the_numbers_of_megatron(c: int, expected: dict[int, float]) -> None:
    for k, value in expected.items():
        assert pass_at_k(8, c, k) == pytest.approx(value, abs=1e-6)


def test_pass_at_k_counts_subsets() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(np.mean([any(s) for s in subsets]))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_has_no_meaning(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="needs 1 <= k <= n"):
        pass_at_k(n, c, k)


def test_a_summary_by_hand() -> None:
    problems = [
        ProblemResults((True, False, False, False), (1.0, 0.0, 0.0, 0.5), (3, 5, 7, 9), (False, True, True, True)),
        problem_results(True, True, True, True),
        problem_results(False, False, False, False),
    ]
    metrics = summarize(problems, 4)
    assert metrics["pass@1"] == metrics["avg@4"] == pytest.approx(5 / 12)
    assert [metrics[f"pass@{k}"] for k in (2, 3, 4)] == pytest.approx([1.5 / 3, 1.75 / 3, 2 / 3])
    assert metrics["score"] == pytest.approx((1.5 / 4 + 1) / 3)
    assert metrics["truncated"] == pytest.approx(3 / 12)
    assert metrics["length"] == pytest.approx((24 + 80) / 12)
    assert (metrics["problems"], metrics["errors"]) == (3, 0)
    assert 0 < metrics["pass@4_low"] < 0.25 and 0.95 < metrics["pass@4_high"] < 1
    assert "pass@4    0.667" in format_table("aime", metrics, 4)


def test_a_table_for_a_person() -> None:
    """The table shows pass@k for 1, the powers of two below n, and n."""
    problems = [
        problem_results(True, *[False] * 5),
        ProblemResults((True,) * 6, (1.0,) * 6, (40,) * 6, (True,) * 6, errors=4),
    ]
    assert format_table("aime", summarize(problems, 6), 6).splitlines() == [
        "aime: 2 problems, 6 completions each",
        "  pass@1    0.583  [0.003, 0.998]",
        "  pass@2    0.667  [0.005, 0.999]",
        "  pass@4    0.833  [0.015, 0.999]",
        "  pass@6    1.000  [0.012, 1.000]",
        "  length 25.0, truncated 50.0%, errors 25.0%",
    ]
    few = format_table("aime", summarize([problem_results(True, True, errors=2)], 4), 4)
    assert "pass@2" in few and "pass@4" not in few  # no problem has four scored completions
    assert format_table("aime", summarize([problem_results(errors=2)], 2), 2) == "aime: 0 problems, 2 completions each"


def test_a_table_has_the_reward_where_it_is_not_the_share_of_correct_completions() -> None:
    problems = [ProblemResults((False, False), (0.25, 0.5), (3, 3), (False, False), errors=0)] * 2
    assert format_table("games", summarize(problems, 2), 2).splitlines()[3] == "  reward    0.375  [0.375, 0.375]"


def test_a_table_goes_through_the_powers_of_two() -> None:
    for n, ks in ((1, [1]), (8, [1, 2, 4, 8]), (300, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300])):
        lines = format_table("aime", summarize([problem_results(*[True] * n)], n), n).splitlines()
        assert [line.split()[0] for line in lines[1:-1]] == [f"pass@{k}" for k in ks]


def test_one_problem_says_nothing_of_others() -> None:
    metrics = summarize([problem_results(True, False)], 2)
    for name in ("pass@1", "pass@2", "avg@2"):
        assert (metrics[f"{name}_low"], metrics[f"{name}_high"]) == (0, 1)
    assert metrics["score_low"] == metrics["score_high"] == metrics["score"]  # a score has no bounds


def test_errors_are_neither_right_nor_wrong() -> None:
    metrics = summarize([problem_results(True, False), problem_results(True, errors=1), problem_results(errors=2)], 2)
    assert metrics["problems"] == 2
    assert metrics["errors"] == pytest.approx(3 / 6)
    assert metrics["pass@1"] == pytest.approx(0.75)
    ends = ("pass@2", "pass@2_low", "pass@2_high")
    assert [metrics[name] for name in ends] == [1, 0, 1]  # of the one problem with two scored completions
    assert summarize([problem_results(errors=2)], 2) == {"problems": 0.0, "errors": 1.0}


def test_intervals_shrink_with_the_problems() -> None:
    few, many = ([problem_results(i % 3 == 0, i % 2 == 0) for i in range(count)] for count in (30, 3000))
    for name in ("pass@1", "score"):
        widths = [m[f"{name}_high"] - m[f"{name}_low"] for m in (summarize(few, 2), summarize(many, 2))]
        assert widths[1] == pytest.approx(widths[0] / 10, rel=0.1)


def test_an_interval_by_hand() -> None:
    """The interval of 50 of 100 is Wilson's with Student's quantile.

    Degrees of freedom: 99; s^2 = 25 / 99.
    """
    t = 1.9842169515
    a = t * t / 100 * (100 * 25 / 99 + 0.1) / (25 + 0.1)
    low, high = proportion_interval(np.repeat([[0.0], [1.0]], 50, axis=0))
    half = math.sqrt(a / 4 + a * a / 4) / (1 + a)
    assert (low[0], high[0]) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-9)
    low, high = mean_interval(np.array([[1.0], [2.0], [6.0]]))
    half = 4.3026527297 * math.sqrt(7 / 3)
    assert (low[0], high[0]) == pytest.approx((3 - half, 3 + half), abs=1e-8)


def test_problems_that_all_agree_leave_room_for_one_that_does_not() -> None:
    """The upper end for 0 of 100 problems is Wilson's for one answer each.

    That is t^2 / (N + t^2).
    """
    low, high = proportion_interval(np.zeros((100, 1)))
    assert (low[0], high[0]) == (0, pytest.approx(1.98421695**2 / (100 + 1.98421695**2)))
    low, high = proportion_interval(np.ones((100, 1)))
    assert high[0] == 1 and low[0] == pytest.approx(100 / (100 + 1.98421695**2))


def sample_problem_rates(
    problems: int, n: int, rate: tuple[float, float], trials: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Samples success rates of problems [problems, trials], and the mean rate of each trial.

    Mean rates are uniform in the range `rate`; the rates of a trial's problems have a beta distribution.
    """
    truth = generator.uniform(*rate, trials)
    return generator.beta(truth, 1 - truth, size=(problems, trials)), truth


@pytest.mark.long
@pytest.mark.parametrize("n", [1, 4, 8])
@pytest.mark.parametrize("problems", [30, 100, 500])
def test_intervals_hold_the_truth_as_often_as_they_say(problems: int, n: int) -> None:
    """Coverage is 95 +- 2% for rewards and for rates near 0, 1 and between."""
    generator, trials = np.random.default_rng(problems + n), 4000
    for rate in ((0.01, 0.12), (0.2, 0.8), (0.88, 0.99)):
        chance, truth = sample_problem_rates(problems, n, rate, trials, generator)
        low, high = proportion_interval(generator.binomial(n, chance) / n)
        assert 0.93 <= np.mean((low <= truth) & (truth <= high)) <= 0.97
    low, high = mean_interval(generator.gamma(2.0, size=(problems, trials)) - 3.0)
    assert 0.93 <= np.mean((low <= -1) & (high >= -1)) <= 0.97


@pytest.mark.long
@pytest.mark.parametrize("n", [1, 4, 8])
@pytest.mark.parametrize("problems", [30, 100, 500])
def test_the_paired_test_is_wrong_one_time_in_twenty(problems: int, n: int) -> None:
    """The error rate is 5 +- 1%; the interval misses a true difference as often."""
    generator, trials = np.random.default_rng(problems + n), 10_000 if problems == 30 else 4000
    spread = generator.uniform(0.3, 0.7, trials)
    chance = generator.beta(2 * spread, 2 * (1 - spread), size=(problems, trials))
    first, last = (generator.binomial(n, chance) / n for _ in range(2))
    better = generator.binomial(n, (1 + chance) / 2) / n
    truth = (1 - spread) / 2
    wrong = missed = 0
    for before, after, risen, difference in zip(first.T, last.T, better.T, truth, strict=True):
        wrong += paired_test(before, after).significant
        found = paired_test(before, risen)
        missed += not found.low <= difference <= found.high
    assert 0.04 <= wrong / trials <= 0.06
    assert 0.03 <= missed / trials <= 0.07


def test_few_problems_are_never_called_different_too_often() -> None:
    generator = np.random.default_rng(0)
    for problems in range(2, 11):
        chance = generator.beta(1, 1, size=(problems, 2000))
        first, last = (generator.binomial(4, chance) / 4 for _ in range(2))
        pairs = zip(first.T, last.T, strict=True)
        found = [paired_test(before, after).significant for before, after in pairs]
        assert np.mean(found) <= 0.06, problems


def test_a_paired_test_by_hand() -> None:
    """The differences are 1, 0, 0, 1, 1 and one without a score.

    Mean 0.6, s^2 0.3, t = sqrt(6), 4 degrees of freedom.
    """
    nan = float("nan")
    found = paired_test([0, 1, 0, 0, 0, nan], [1, 1, 0, 1, 1, 1])
    half = 2.7764451052 * math.sqrt(0.3 / 5)
    assert found.difference == pytest.approx(0.6) and found.problems == 5
    assert found.low == pytest.approx(0.6 - half) and found.high == 1
    t = math.sqrt(6)
    assert found.p_value == pytest.approx(1 - (t / math.sqrt(4 + t * t)) * (1 + 2 / (4 + t * t)))
    assert not found.significant
    assert found.summary == "not significant: +60.0 points [-8.0, 100.0], p = 0.07"


def test_differences_that_are_all_equal() -> None:
    """Equal differences have no spread; they are significant only for many problems.

    No change is not significant.
    """
    assert not paired_test([0.0] * 4, [1.0] * 4).significant
    assert paired_test([0.0] * 10, [1.0] * 10).significant
    same = paired_test([0.5] * 30, [0.5] * 30)
    assert (same.difference, same.p_value) == (0, 1) and -0.07 < same.low < 0 < same.high < 0.07
    for each in (paired_test([], []), paired_test([0.0], [1.0])):
        assert (each.low, each.high, each.p_value) == (-1, 1, 1)
    assert paired_test([], []).summary == "no problem was scored in both"
    with pytest.raises(ValueError, match="1 and 2 problems"):
        paired_test([1.0], [1.0, 0.0])


def test_a_difference_in_words() -> None:
    """A difference is significant exactly where the interval excludes 0."""
    worse = paired_test([1.0] * 40 + [0.0] * 60, [0.0] * 20 + [1.0] * 20 + [0.0] * 60)
    assert worse.summary == "worsened by 20.0 points [-28.0, -12.0], p < 0.001"
    better = paired_test([0.0] * 100, [1.0] * 6 + [0.0] * 94)
    assert better.summary == "improved by 6.0 points [1.3, 10.7], p = 0.014"
    for count in range(12):
        found = paired_test([0.0] * 100, [1.0] * count + [0.0] * (100 - count))
        assert found.significant == (found.low > 0)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706205), (2, 4.302653), (3, 3.182446), (10, 2.228139), (29, 2.045230), (99, 1.984217), (499, 1.964729)],
)
def test_students_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert two_sided_quantile(0.95, degrees) == pytest.approx(quantile, abs=1e-6)
    assert two_sided_p(-quantile, degrees) == pytest.approx(0.05, abs=1e-7)


def test_students_t_has_edges() -> None:
    assert two_sided_p(0, 5) == 1 and two_sided_p(1e9, 5) == pytest.approx(0, abs=1e-12)
    assert two_sided_quantile(0.95, 0) == math.inf
    with pytest.raises(ValueError, match="0 degrees"):
        two_sided_p(1, 0)
