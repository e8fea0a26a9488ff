"""What groups and their batch say about themselves, against numbers that were counted by hand."""

from collections.abc import Sequence

import pytest
import torch

from envs.group import Group, SampledCompletion
from envs.task import Outcome
from tests.groups import make_completion, make_group
from torchgrpo.batches.rollout import Rollout
from torchgrpo.monitoring.metrics import rollout_metrics, without_clocks

LENGTHS = [1, 2, 3, 4, 5, 6, 3, 2, 1]
REWARDS = [1.0, 0.0, 9.0, 0.0, 0.0, 0.0, 9.0, 9.0, 9.0]
FORMATS = [0.5, 1.0, 77.0, 0.0, 0.0, 0.0, 77.0, 77.0, 77.0]
ADVANTAGES = [2.0, -1.0, 50.0, 0.0, 0.0, 0.0, 50.0, 50.0, 50.0]
OUTCOMES: list[Outcome] = [
    *("scored", "scored", "error"),
    *("scored", "scored", "invalid"),
    *("error", "error", "error"),
]
CUT = (1, 5, 8)


def completions(outcomes: Sequence[Outcome] = OUTCOMES) -> list[SampledCompletion]:
    """Nine; rewards and parts of what errored are numbers that nobody may count."""
    return [
        make_completion(
            LENGTHS[row],
            REWARDS[row],
            {"format": FORMATS[row]},
            outcome=outcomes[row],
            finish_reason="length" if row in CUT else "stop",
            versions=7,
        )
        for row in range(9)
    ]


def three_groups(rows: Sequence[SampledCompletion] | None = None) -> list[Group]:
    """One with an error, one of equal rewards with an invalid one, one that was not judged at all."""
    rows = completions() if rows is None else rows
    return [make_group(start, rows[start : start + 3]) for start in (0, 3, 6)]


def credited(groups: list[Group]) -> Rollout:
    """With the advantages above; what was judged is in the loss."""
    rollout = Rollout.of(groups)
    batch = rollout.batch
    batch.advantage = torch.tensor(ADVANTAGES)[:, None]
    judged = [verdict.judged for group in groups for verdict in group.verdicts]
    batch.mask = batch.tokens.loss_mask & torch.tensor(judged)[:, None]
    return rollout


def metrics_of(groups: list[Group]) -> dict[str, float]:
    return rollout_metrics(credited(groups), policy_version=7)


def test_a_batch_by_hand() -> None:
    assert metrics_of(three_groups()) == pytest.approx(
        {
            "reward/mean": 1 / 5,
            "reward/std": (0.8 / 4) ** 0.5,
            "reward/zero_variance_groups": 2 / 3,
            "reward/errors": 4 / 9,
            "reward/invalid": 1 / 9,
            "reward/invalid_gap": 1 / 4,
            "reward/format": 1.5 / 5,
            "groups/generated": 3.0,
            "groups/success": 1 / 5,
            "advantage/mean": 1 / 5,
            "advantage/std": (4.8 / 4) ** 0.5,
            "length/response_mean": 3.0,
            "length/response_max": 6.0,
            "length/truncated": 3 / 9,
            "sample_utilization": 5 / 9,
            "rollout/temperature": 1.0,
            "policy_version": 7.0,
            "age/mean": 0.0,
            "age/max": 0.0,
            "age/histogram/0": 18.0,
        }
    )


def test_what_differs_from_batch_to_batch() -> None:
    groups = [
        make_group(number, group.completions, temperature=temperature)
        for number, (group, temperature) in enumerate(zip(three_groups(), (0.5, 0.9, 1.3), strict=True))
    ]
    rollout = credited(groups)
    rollout.batch.length_reward = torch.tensor([-1.0, -0.5, 66.0, 0.0, 0.0, 0.0, 66.0, 66.0, 66.0])[:, None]
    metrics = rollout_metrics(rollout, policy_version=7)
    assert metrics["rollout/temperature"] == pytest.approx(0.9)
    assert metrics["reward/length"] == pytest.approx(-1.5 / 5)


def test_where_little_or_nothing_was_judged_all_numbers_are_finite() -> None:
    metrics = metrics_of(three_groups(completions(["scored", *["error"] * 8])))
    told = ("reward/mean", "reward/std", "advantage/mean", "advantage/std", "reward/zero_variance_groups")
    assert [metrics[name] for name in told] == [1.0, 0.0, 2.0, 0.0, 1.0]
    metrics = metrics_of(three_groups(completions(["error"] * 9)))
    told = ("reward/mean", "reward/format", "advantage/mean", "sample_utilization", "age/mean", "age/max")
    assert [metrics[name] for name in told] == [0.0] * 6


def test_rewards_are_equal_where_the_learner_reads_one_number() -> None:
    """It reads float32, in which 0.1 + 0.2 is 0.3."""
    groups = [make_group(0, [make_completion(1, score) for score in (0.1 + 0.2, 0.3, 0.3)])]
    rollout = Rollout.of(groups)
    rollout.batch.advantage, rollout.batch.mask = torch.zeros(3, 1), rollout.batch.tokens.loss_mask
    assert rollout_metrics(rollout, 0)["reward/zero_variance_groups"] == 1.0


def test_ages_are_of_the_tokens_that_are_trained_on() -> None:
    """Row 0 has one token of version 4, row 1 two of 7 and 6; row 2, which errored, is the oldest of all."""
    rows = completions()
    rows[0].policy_versions, rows[1].policy_versions, rows[2].policy_versions = [4], [7, 6], [0, 0, 0]
    metrics = metrics_of(three_groups(rows))
    ages = {name: value for name, value in metrics.items() if name.startswith("age/")}
    assert ages == {
        "age/mean": pytest.approx((3 + 1) / 18),
        "age/max": 3.0,
        "age/histogram/0": 16.0,
        "age/histogram/1": 1.0,
        "age/histogram/2": 0.0,
        "age/histogram/3": 1.0,
    }


def test_with_replaced_groups_the_rewards_are_those_of_all_that_was_generated() -> None:
    """Three more groups for two of the places: the second was replaced once, the third twice."""
    groups = three_groups()
    first = make_group(10, [make_completion(1, 2.0, {"format": 1.0}) for _ in range(3)])
    second = make_group(11, [make_completion(1, 0.0, {"format": 0.0}, outcome="invalid") for _ in range(3)])
    third = make_group(12, [make_completion(1, score, {"format": 0.5}) for score in (1.0, 0.0, 0.0)])
    groups[1].in_place_of = first
    groups[2].in_place_of, second.in_place_of = second, third
    metrics = metrics_of(groups)
    rewards = [1.0, 0.0, 0.0, 0.0, 0.0, *[2.0] * 3, *[0.0] * 3, 1.0, 0.0, 0.0]
    mean = sum(rewards) / 14
    told = {
        "groups/generated": 6.0,
        "reward/mean": mean,
        "reward/std": (sum((reward - mean) ** 2 for reward in rewards) / 13) ** 0.5,
        "reward/zero_variance_groups": 4 / 6,
        "reward/errors": 4 / 18,
        "reward/invalid": 4 / 18,
        "reward/format": (1.5 + 3.0 + 1.5) / 14,
        "sample_utilization": 5 / 18,
    }
    assert {name: metrics[name] for name in told} == pytest.approx(told)
    assert metrics["advantage/mean"] == pytest.approx(1 / 5)  # of what is trained on
    assert metrics["length/response_mean"] == 3.0


def test_candidates_that_were_left_out_count_as_generated() -> None:
    groups = three_groups()
    groups[1].left_out = [make_completion(9, 4.0, {"format": 1.0}), make_completion(9, 7.0, outcome="error")]
    metrics = metrics_of(groups)
    told = {
        "groups/generated": 3.0,
        "reward/mean": 5 / 6,
        "reward/zero_variance_groups": 1 / 3,
        "reward/errors": 5 / 11,
        "reward/format": 2.5 / 6,
        "sample_utilization": 5 / 11,
        "length/response_max": 6.0,
    }
    assert {name: metrics[name] for name in told} == pytest.approx(told)


def test_where_none_of_it_was_judged_all_numbers_are_finite() -> None:
    groups = three_groups(completions(["error"] * 9))
    for group, other in zip(groups, three_groups(completions(["error"] * 9)), strict=True):
        group.in_place_of = other
    metrics = metrics_of(groups)
    told = ("reward/mean", "reward/std", "reward/format", "reward/errors", "reward/zero_variance_groups")
    assert [metrics[name] for name in told] == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_turns_are_counted_where_the_environment_wrote_some_tokens() -> None:
    """Row 3 (4 tokens): drawn, written, drawn, drawn. Row 5 (6 tokens): d w w d w d. The others are one turn each."""
    assert "turns/mean" not in metrics_of(three_groups())
    rows = completions()
    rows[0].sampled = [True]
    assert "turns/mean" not in metrics_of(three_groups(rows))
    rows[3].sampled = [True, False, True, True]
    rows[5].sampled = [True, False, False, True, False, True]
    metrics = metrics_of(three_groups(rows))
    assert metrics["turns/mean"] == pytest.approx((7 + 2 + 3) / 9)
    assert metrics["turns/drawn_tokens"] == pytest.approx((27 - 4) / 9)


def test_what_a_clock_measured_is_left_out() -> None:
    row = {"reward/mean": 1.0, "time/push_s": 2.0, "idle/engines": 0.5, "throughput/tokens_per_s": 9.0}
    assert without_clocks(row) == {"reward/mean": 1.0}
