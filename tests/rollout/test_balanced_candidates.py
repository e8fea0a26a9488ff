"""Balanced choice among the candidates of a prompt."""

from collections import Counter
from collections.abc import Sequence

import pytest

from envs.group import Verdict
from tests.groups import make_completion, make_group
from torchgrpo.rollout.generate import choose_balanced


def verdicts(rewards: Sequence[float], errors: Sequence[int] = ()) -> list[Verdict]:
    """errors: places of those that could not be judged."""
    return [
        Verdict(reward, {"accuracy": reward}, "error" if place in errors else "scored")
        for place, reward in enumerate(rewards)
    ]


def places(chosen: list[bool]) -> list[int]:
    return [place for place, taken in enumerate(chosen) if taken]


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
    chosen = places(choose_balanced(verdicts(candidates), 4, seed=0))
    assert len(chosen) == 4
    assert sum(candidates[place] for place in chosen) == right_kept


def test_what_errored_is_taken_last() -> None:
    four = choose_balanced(verdicts([1.0] * 8, errors=range(4)), 4, seed=0)
    assert places(four) == [4, 5, 6, 7]
    six = places(choose_balanced(verdicts([1.0] * 8, errors=range(6)), 4, seed=0))
    assert six[-2:] == [6, 7] and len(six) == 4


def test_the_choice_depends_on_the_seed_and_on_nothing_else() -> None:
    candidates = verdicts([1, 0] * 8)
    first, again = ([choose_balanced(candidates, 4, seed) for seed in range(20)] for _ in range(2))
    assert first == again
    assert len({tuple(places(chosen)) for chosen in first}) > 10
    counts = Counter(place for chosen in first for place in places(chosen))
    assert min(counts[place] for place in range(16)) >= 1  # no candidate's number is favoured


def test_the_choice_of_a_run_that_was_checkpointed_stays() -> None:
    """What a former version chose of these seeds: a resumed run goes on with the same groups."""
    candidates = verdicts([1, 0, 0, 1, 1, 0, 1, 0, 0, 0], errors=[2])
    assert [places(choose_balanced(candidates, 4, (7 << 40) + number)) for number in range(4)] == CHOSEN


CHOSEN = [[0, 1, 3, 5], [3, 5, 6, 7], [0, 4, 5, 9], [3, 4, 5, 8]]


def test_without_an_accuracy_part_a_reward_of_one_is_success() -> None:
    made = make_group(0, [make_completion(score=score) for score in (1.0, 0.9, 2.0, -1.0)])
    assert [verdict.success for verdict in made.verdicts] == [1, 0, 1, 0]
    assert made.success_rate == 0.5


def test_what_could_not_be_judged_is_no_failure() -> None:
    made = make_group(
        0, [make_completion(score=1.0), make_completion(outcome="error")], left_out=[make_completion()]
    )
    assert made.success_rate == 0.5
    assert make_group(0, [make_completion(outcome="error")]).success_rate == 0.0
