"""Tests of minimum scores: an invalid completion never scores above a wrong one."""

from collections.abc import Sequence
from contextlib import closing

import pytest

from config.schema.env import EnvConfig
from envs.example import Outcome
from envs.group import Group, Verdict
from envs.reward_workers.minimum_scores import MinimumScores, lower_invalid_score
from envs.reward_workers.service import RewardService
from envs.task import Completion, make_task
from tests.groups import make_completion, make_group

REWARDS_MODULE = "tests.envs.user_rewards"


def group(*verdicts: tuple[float, Outcome], number: int = 0, source: str = "", num_unselected: int = 0) -> Group:
    completions = [make_completion(2, score, outcome=outcome) for score, outcome in verdicts]
    num_selected = len(completions) - num_unselected
    return make_group(
        number, completions[:num_selected], source=source, unselected_candidates=completions[num_selected:]
    )


def scores(groups: Sequence[Group]) -> list[list[float]]:
    return [[verdict.score for verdict in each.candidate_verdicts] for each in groups]


def test_the_lowest_score_of_the_group_counts_where_it_is_below_the_minimum() -> None:
    groups = [
        group((-3.0, "scored"), (-1.0, "scored"), (0.0, "invalid"), (0.0, "error")),
        group((0.5, "scored"), (0.0, "invalid"), number=1),
        group((-3.0, "scored"), (-4.0, "invalid"), number=2),
    ]
    MinimumScores().record_and_lower(groups)
    assert scores(groups) == [[-3.0, -1.0, -3.0, 0.0], [0.5, 0.0], [-3.0, -4.0]]


def test_candidates_that_are_left_out_count_too() -> None:
    one = group((0.0, "invalid"), (-2.0, "scored"), (0.0, "invalid"), num_unselected=2)
    MinimumScores().record_and_lower([one])
    assert scores([one]) == [[-2.0, -2.0, -2.0]]


def test_a_group_without_a_score_takes_the_lowest_of_the_run() -> None:
    minimum_scores = MinimumScores()
    first = [group((0.0, "invalid"), (0.0, "invalid"))]
    minimum_scores.record_and_lower(first)
    assert scores(first) == [[0.0, 0.0]], "nothing is known"
    both = [group((0.0, "invalid")), group((-3.0, "scored"), (-1.0, "scored"), number=1)]
    minimum_scores.record_and_lower(both)
    assert scores(both) == [[-3.0], [-3.0, -1.0]], "whichever comes first in a batch"
    later = [group((-1.0, "scored"), (0.0, "invalid")), group((0.0, "invalid"), number=1)]
    minimum_scores.record_and_lower(later)
    assert scores(later) == [[-1.0, -1.0], [-3.0]]


def test_a_group_scored_before_any_valid_score_is_lowered_later() -> None:
    minimum_scores, early, late = MinimumScores(), group((0.0, "invalid")), group((-3.0, "scored"), number=1)
    minimum_scores.record_and_lower([early])
    assert scores([early]) == [[0.0]]
    minimum_scores.record_and_lower([late])
    minimum_scores.lower_invalid_scores([early])
    assert scores([early]) == [[-3.0]]


def test_sources_of_a_mixture_have_separate_minimums() -> None:
    minimum_scores = MinimumScores()
    groups = [
        group((-3.0, "scored"), source="a"),
        group((0.0, "invalid"), source="b", number=1),
        group((0.0, "invalid"), source="a", number=2),
    ]
    minimum_scores.record_and_lower(groups)
    assert scores(groups) == [[-3.0], [0.0], [-3.0]]
    assert minimum_scores.minimum_by_source == {"a": -3.0}


def test_recording_twice_changes_nothing() -> None:
    minimum_scores, groups = MinimumScores(), [group((-3.0, "scored"), (0.0, "invalid"))]
    minimum_scores.record_and_lower(groups)
    before = scores(groups)
    minimum_scores.record_and_lower(groups)
    assert scores(groups) == before


@pytest.mark.parametrize("score", [0.0, 5.0])
def test_an_invalid_completion_is_no_success(score: float) -> None:
    assert Verdict(score, {"control_tokens": 1.0}, "invalid").success == 0.0
    assert Verdict(score, {"accuracy": 1.0}, "invalid").success == 0.0
    assert lower_invalid_score(Verdict(score, {}, "invalid"), 2.0).score == min(score, 2.0)


def test_a_declared_minimum_is_given_by_the_service() -> None:
    env = EnvConfig(
        dataset="arithmetic", reward=[f"{REWARDS_MODULE}:least", f"{REWARDS_MODULE}:judge"], reward_workers=1
    )
    task = make_task(env)
    with closing(RewardService(task, env)) as service:
        marked = Completion("", control_tokens=True)
        (verdict,) = service.score([marked], task.examples("train")[:1])
    assert (verdict.outcome, verdict.score) == ("invalid", -6.5)


@pytest.mark.parametrize("in_process", [True, False])
def test_a_reward_with_outcome_invalid_scores_at_most_the_minimum(in_process: bool) -> None:
    env = EnvConfig(dataset="arithmetic", reward=f"{REWARDS_MODULE}:invalid_five", reward_workers=1)
    with closing(RewardService(make_task(env), env)) as service:
        if in_process:
            service.close()
            service._pool = None
        (verdict,) = service.score([Completion("2")], make_task(env).examples("train")[:1])
    assert (verdict.outcome, verdict.score, verdict.success) == ("invalid", 0.0, 0.0)
