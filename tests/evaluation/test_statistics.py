"""pass@k against counting by hand, intervals against repeated experiments."""

from itertools import combinations

import numpy as np
import pytest

from evaluation.statistics import Tally, bootstrap, pass_at_k, summarize, table


def tally(*correct: bool, errors: int = 0) -> Tally:
    count = len(correct)
    return Tally(correct, tuple(float(c) for c in correct), (10,) * count, (False,) * count, errors)


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


def test_pass_at_k_is_unbiased() -> None:
    generator = np.random.default_rng(0)
    chance, n, k = 0.15, 10, 4
    counts = generator.binomial(n, chance, size=20_000)
    mean = np.mean([pass_at_k(n, int(c), k) for c in counts])
    assert mean == pytest.approx(1 - (1 - chance) ** k, abs=0.005)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_has_no_meaning(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="needs 1 <= k <= n"):
        pass_at_k(n, c, k)


def test_a_summary_by_hand() -> None:
    problems = [
        Tally((True, False, False, False), (1.0, 0.0, 0.0, 0.5), (3, 5, 7, 9), (False, True, True, True)),
        tally(True, True, True, True),
        tally(False, False, False, False),
    ]
    metrics = summarize(problems, 4)
    assert metrics["pass@1"] == metrics["avg@4"] == pytest.approx(5 / 12)
    assert [metrics[f"pass@{k}"] for k in (2, 3, 4)] == pytest.approx([1.5 / 3, 1.75 / 3, 2 / 3])
    assert metrics["score"] == pytest.approx((1.5 / 4 + 1) / 3)
    assert metrics["truncated"] == pytest.approx(3 / 12)
    assert metrics["length"] == pytest.approx((24 + 80) / 12)
    assert (metrics["problems"], metrics["errors"]) == (3, 0)
    assert metrics["pass@4_low"] == 0.0 and metrics["pass@4_high"] == 1.0
    assert "pass@4    0.667" in table("aime", metrics, 4)


def test_a_table_for_a_person() -> None:
    """pass@k for one, for the powers of two below n, and for n."""
    problems = [tally(True, *[False] * 5), Tally((True,) * 6, (1.0,) * 6, (40,) * 6, (True,) * 6, errors=4)]
    assert table("aime", summarize(problems, 6), 6).splitlines() == [
        "aime: 2 problems, 6 completions each",
        "  pass@1    0.583  [0.167, 1.000]",
        "  pass@2    0.667  [0.333, 1.000]",
        "  pass@4    0.833  [0.667, 1.000]",
        "  pass@6    1.000  [1.000, 1.000]",
        "  length 25.0, truncated 50.0%, errors 25.0%",
    ]
    few = table("aime", summarize([tally(True, True, errors=2)], 4), 4)
    assert "pass@2" in few and "pass@4" not in few  # nobody judged four
    assert table("aime", summarize([tally(errors=2)], 2), 2) == "aime: 0 problems, 2 completions each"


def test_a_table_goes_through_the_powers_of_two() -> None:
    for n, ks in ((1, [1]), (8, [1, 2, 4, 8]), (300, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300])):
        lines = table("aime", summarize([tally(*[True] * n)], n), n).splitlines()
        assert [line.split()[0] for line in lines[1:-1]] == [f"pass@{k}" for k in ks]


def test_the_interval_of_one_problem_is_its_value() -> None:
    metrics = summarize([tally(True, False)], 2)
    for name in ("pass@1", "pass@2", "avg@2", "score"):
        assert metrics[f"{name}_low"] == metrics[f"{name}_high"] == metrics[name]


def test_errors_are_neither_right_nor_wrong() -> None:
    metrics = summarize([tally(True, False), tally(True, errors=1), tally(errors=2)], 2)
    assert metrics["problems"] == 2
    assert metrics["errors"] == pytest.approx(3 / 6)
    assert metrics["pass@1"] == pytest.approx(0.75)
    ends = ("pass@2", "pass@2_low", "pass@2_high")
    assert [metrics[name] for name in ends] == [1.0] * 3  # of the one problem with two judged completions
    assert summarize([tally(errors=2)], 2) == {"problems": 0.0, "errors": 1.0}


def test_intervals_are_seeded_and_shrink_with_the_problems() -> None:
    few, many = ([tally(i % 3 == 0, i % 2 == 0) for i in range(count)] for count in (30, 3000))
    assert summarize(few, 2, seed=1) == summarize(few, 2, seed=1)
    assert summarize(few, 2, seed=1) != summarize(few, 2, seed=2)
    widths = [m["pass@1_high"] - m["pass@1_low"] for m in (summarize(few, 2), summarize(many, 2))]
    assert widths[1] == pytest.approx(widths[0] / 10, rel=0.2)
    assert summarize([tally(True)] * 5, 1)["pass@1_low"] == 1.0


def test_intervals_leave_out_as_much_as_they_say() -> None:
    """Of many problems the mean is nearly normal: 95% of it lies within 1.96 standard errors."""
    values = np.repeat([[0.0], [1.0]], 500, axis=0)
    ends = np.array([bootstrap(values, seed) for seed in range(20)]).mean(axis=0)
    error = 0.5 / np.sqrt(1000)
    assert ends[:, 0] == pytest.approx([0.5 - 1.96 * error, 0.5 + 1.96 * error], abs=0.08 * error)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    inside = 0
    for trial in range(200):
        low, high = bootstrap(generator.random((60, 1)), seed=trial)
        inside += bool(low[0] <= 0.5 <= high[0])
    assert 0.89 <= inside / 200 <= 0.99
