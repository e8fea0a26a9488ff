"""Whether an engine moved with the learner, since the last push or over several."""

from dataclasses import replace

import pytest
import torch

from rollout.weights.evidence import Answer, DrawnRow, Evidence

NOISE = 1e-3
TOKENS = 64


def normal(seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def moved(engine: torch.Tensor, learner: torch.Tensor, age: int) -> Evidence:
    """By so much since the engine drew these tokens."""
    before = normal(0)
    last = torch.zeros(TOKENS, dtype=torch.bool)
    return Evidence(before + engine, before + learner, last, before, before, least=2.0, noise=NOISE, age=age)


@pytest.mark.parametrize("size", [0.004, 0.1])
def test_a_lost_push_shows_among_several(size: float) -> None:
    """Steps alike in size, along the same line or not, above noise and far above it."""
    first = size * normal(1)
    for second in (0.8 * first, size * normal(2)):
        right = moved(first + second + NOISE * normal(3), first + second, age=2)
        lost = moved(first + NOISE * normal(3), first + second, age=2)
        assert right.follows and not lost.follows


def test_over_one_push_half_of_the_way_is_enough() -> None:
    step = 0.1 * normal(1)
    assert moved(0.6 * step, step, age=1).follows
    assert not moved(0.6 * step, step, age=2).follows
    assert not moved(0.4 * step, step, age=1).follows


def test_what_noise_may_hide_is_no_fault() -> None:
    for age in (1, 2, 4):
        assert moved(torch.zeros(TOKENS), 1.5 * age * NOISE * normal(1), age).follows


def test_an_answer_is_what_the_next_one_is_compared_with() -> None:
    rows = [DrawnRow([1, 2], [3, 4], [-9.0, -9.0], None), DrawnRow([1], [5], [-9.0], None)]
    answer = Answer(rows, {"a": [[-0.1, -0.2, -0.3], [-0.4]]}, torch.tensor([-1.0, -2.0, -3.0]))
    assert [(row.engine, row.learner) for row in answer.rows_of("a")] == [
        ([-0.2, -0.3], [-1.0, -2.0]),
        ([-0.4], [-3.0]),
    ]


def test_few_tokens_that_were_near_each_other_by_chance_accuse_nobody() -> None:
    """The last tokens of three sequences under a bfloat16 engine, whose differences before the push were small."""
    learner = torch.tensor([0.05, -0.02, 0.15])
    seen = Evidence(
        learner + torch.tensor([-0.025, -0.01, -0.129]),
        learner,
        torch.ones(3, dtype=torch.bool),
        torch.tensor([-0.013, 0.0, -0.002]),
        torch.zeros(3),
    )
    assert not seen.follows
    assert replace(seen, rounding=torch.tensor([0.02, 0.01, 0.1])).follows
    lost = replace(
        seen, engine=seen.engine_before, learner=10 * learner, rounding=torch.tensor([0.02, 0.01, 0.1])
    )
    assert not lost.follows, "what rounding does not explain"
