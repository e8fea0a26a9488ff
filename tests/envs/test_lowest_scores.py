"""Invalid completions never score above a wrong one, whatever a reward gives."""

from collections.abc import Sequence
from contextlib import closing

import pytest

from config.schema.env import EnvConfig
from envs.example import Outcome
from envs.group import Group, Verdict
from envs.judging.lowest_scores import LowestScores, at_most
from envs.judging.service import RewardService
from envs.task import Completion, make_task
from tests.groups import make_completion, make_group

HERE = "tests.envs.users_rewards"


def group(*verdicts: tuple[float, Outcome], number: int = 0, source: str = "", left_out: int = 0) -> Group:
    made = [make_completion(2, score, outcome=outcome) for score, outcome in verdicts]
    kept = len(made) - left_out
    return make_group(number, made[:kept], source=source, left_out=made[kept:])


def scores(groups: Sequence[Group]) -> list[list[float]]:
    return [[verdict.score for verdict in each.candidate_verdicts] for each in groups]


def test_the_lowest_score_of_the_group_counts_where_it_is_below_the_minimum() -> None:
    groups = [
        group((-3.0, "scored"), (-1.0, "scored"), (0.0, "invalid"), (0.0, "error")),
        group((0.5, "scored"), (0.0, "invalid"), number=1),
        group((-3.0, "scored"), (-4.0, "invalid"), number=2),
    ]
    LowestScores().settle(groups)
    assert scores(groups) == [[-3.0, -1.0, -3.0, 0.0], [0.5, 0.0], [-3.0, -4.0]]


def test_candidates_that_are_left_out_count_too() -> None:
    one = group((0.0, "invalid"), (-2.0, "scored"), (0.0, "invalid"), left_out=2)
    LowestScores().settle([one])
    assert scores([one]) == [[-2.0, -2.0, -2.0]]


def test_a_group_without_a_score_takes_the_lowest_of_the_run() -> None:
    lowest = LowestScores()
    first = [group((0.0, "invalid"), (0.0, "invalid"))]
    lowest.settle(first)
    assert scores(first) == [[0.0, 0.0]], "nothing is known"
    both = [group((0.0, "invalid")), group((-3.0, "scored"), (-1.0, "scored"), number=1)]
    lowest.settle(both)
    assert scores(both) == [[-3.0], [-3.0, -1.0]], "whichever comes first in a batch"
    later = [group((-1.0, "scored"), (0.0, "invalid")), group((0.0, "invalid"), number=1)]
    lowest.settle(later)
    assert scores(later) == [[-1.0, -1.0], [-3.0]]


def test_a_group_that_was_judged_before_any_score_is_lowered_later() -> None:
    lowest, early, late = LowestScores(), group((0.0, "invalid")), group((-3.0, "scored"), number=1)
    lowest.settle([early])
    assert scores([early]) == [[0.0]]
    lowest.settle([late])
    lowest.lower([early])
    assert scores([early]) == [[-3.0]]


def test_members_of_a_mixture_have_their_own() -> None:
    lowest = LowestScores()
    made = [
        group((-3.0, "scored"), source="a"),
        group((0.0, "invalid"), source="b", number=1),
        group((0.0, "invalid"), source="a", number=2),
    ]
    lowest.settle(made)
    assert scores(made) == [[-3.0], [0.0], [-3.0]]
    assert lowest.seen == {"a": -3.0}


def test_settling_twice_changes_nothing() -> None:
    lowest, made = LowestScores(), [group((-3.0, "scored"), (0.0, "invalid"))]
    lowest.settle(made)
    before = scores(made)
    lowest.settle(made)
    assert scores(made) == before


@pytest.mark.parametrize("score", [0.0, 5.0])
def test_an_invalid_completion_is_no_success(score: float) -> None:
    assert Verdict(score, {"control_tokens": 1.0}, "invalid").success == 0.0
    assert Verdict(score, {"accuracy": 1.0}, "invalid").success == 0.0
    assert at_most(Verdict(score, {}, "invalid"), 2.0).score == min(score, 2.0)


def test_a_declared_minimum_is_given_by_the_service() -> None:
    env = EnvConfig(dataset="arithmetic", reward=[f"{HERE}:least", f"{HERE}:judge"], reward_workers=1)
    task = make_task(env)
    with closing(RewardService(task, env)) as service:
        marked = Completion("", control_tokens=True)
        (verdict,) = service.score([marked], task.examples("train")[:1])
    assert (verdict.outcome, verdict.score) == ("invalid", -6.5)


@pytest.mark.parametrize("in_process", [True, False])
def test_a_judge_that_says_invalid_itself_gives_no_more_than_the_minimum(in_process: bool) -> None:
    env = EnvConfig(dataset="arithmetic", reward=f"{HERE}:invalid_five", reward_workers=1)
    with closing(RewardService(make_task(env), env)) as service:
        if in_process:
            service.close()
            service._pool = None
        (verdict,) = service.score([Completion("2")], make_task(env).examples("train")[:1])
    assert (verdict.outcome, verdict.score, verdict.success) == ("invalid", 0.0, 0.0)
