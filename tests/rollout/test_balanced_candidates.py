"""Tests of the balanced choice among a prompt's candidates."""

from collections import Counter
from collections.abc import Sequence

import pytest

from envs.group import Verdict
from tests.groups import make_completion, make_group
from torchgrpo.rollout.group_rollout import choose_balanced_candidates


def verdicts(rewards: Sequence[float], errors: Sequence[int] = ()) -> list[Verdict]:
    """Makes verdicts of rewards. errors: indices of candidates whose scoring failed."""
    return [
        Verdict(reward, {"accuracy": reward}, "error" if index in errors else "scored")
        for index, reward in enumerate(rewards)
    ]


def chosen_indices(is_chosen: list[bool]) -> list[int]:
    return [index for index, chosen in enumerate(is_chosen) if chosen]


@pytest.mark.parametrize(
    ("candidates", "right_kept"),
    [
        ([1, 1, 1, 1, 0, 0, 0, 0], 2),
        ([1, 0, 0, 0, 0, 0, 0, 0], 1),
        ([1, 1, 1, 1, 1, 1, 1, 0], 3),
        ([1, 1, 1, 1, 1, 1, 1, 1], 4),
        ([0, 0, 0, 0, 0, 0, 0, 0], 0),
    ],
)
def test_right_and_wrong_as_evenly_as_there_are(candidates: list[float], right_kept: int) -> None:
    is_chosen = chosen_indices(choose_balanced_candidates(verdicts(candidates), 4, seed=0))
    assert len(is_chosen) == 4
    assert sum(candidates[index] for index in is_chosen) == right_kept


def test_candidates_without_a_score_are_chosen_last() -> None:
    four = choose_balanced_candidates(verdicts([1.0] * 8, errors=range(4)), 4, seed=0)
    assert chosen_indices(four) == [4, 5, 6, 7]
    six = chosen_indices(choose_balanced_candidates(verdicts([1.0] * 8, errors=range(6)), 4, seed=0))
    assert six[-2:] == [6, 7] and len(six) == 4


def test_the_choice_depends_on_the_seed_and_on_nothing_else() -> None:
    candidates = verdicts([1, 0] * 8)
    first, again = ([choose_balanced_candidates(candidates, 4, seed) for seed in range(20)] for _ in range(2))
    assert first == again
    assert len({tuple(chosen_indices(is_chosen)) for is_chosen in first}) > 10
    counts = Counter(index for is_chosen in first for index in chosen_indices(is_chosen))
    assert min(counts[index] for index in range(16)) >= 1  # no candidate index is preferred


def test_the_choice_is_stable_across_resumes() -> None:
    """A resumed run must choose the same candidates as before."""
    candidates = verdicts([1, 0, 0, 1, 1, 0, 1, 0, 0, 0], errors=[2])
    assert [
        chosen_indices(choose_balanced_candidates(candidates, 4, (7 << 40) + number)) for number in range(4)
    ] == EXPECTED_CHOICES


EXPECTED_CHOICES = [[0, 1, 3, 5], [3, 5, 6, 7], [0, 4, 5, 9], [3, 4, 5, 8]]


def test_without_an_accuracy_part_a_reward_of_one_is_success() -> None:
    group = make_group(0, [make_completion(score=score) for score in (1.0, 0.9, 2.0, -1.0)])
    assert [verdict.success for verdict in group.verdicts] == [1, 0, 1, 0]
    assert group.success_rate == 0.5


def test_candidates_without_a_score_are_no_failures() -> None:
    group = make_group(
        0, [make_completion(score=1.0), make_completion(outcome="error")], unselected_candidates=[make_completion()]
    )
    assert group.success_rate == 0.5
    assert make_group(0, [make_completion(outcome="error")]).success_rate == 0.0
