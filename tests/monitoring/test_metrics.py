"""Tests of the rollout metrics against hand-computed numbers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from envs.group import Group, SampledCompletion
from envs.task import Outcome
from tests.episodes import failed_episode, rewritten_episode, tool_episode
from tests.groups import make_completion, make_group
from torchgrpo.batches.rollout import Rollout
from torchgrpo.monitoring.episode_metrics import episode_metrics
from torchgrpo.monitoring.metric_table import meaning_of
from torchgrpo.monitoring.metrics import rollout_metrics, without_timings
from torchgrpo.monitoring.monitor import completion_rows

LENGTHS = [1, 2, 3, 4, 5, 6, 3, 2, 1]
REWARDS = [1.0, 0.0, 9.0, 0.0, 0.0, 0.0, 9.0, 9.0, 9.0]
FORMATS = [0.5, 1.0, 77.0, 0.0, 0.0, 0.0, 77.0, 77.0, 77.0]
ADVANTAGES = [2.0, -1.0, 50.0, 0.0, 0.0, 0.0, 50.0, 50.0, 50.0]
OUTCOMES: list[Outcome] = [
    *("scored", "scored", "error"),
    *("scored", "scored", "invalid"),
    *("error", "error", "error"),
]
TRUNCATED_ROWS = (1, 5, 8)


def completions(outcomes: Sequence[Outcome] = OUTCOMES) -> list[SampledCompletion]:
    """Returns nine completions; rewards and components of errors must not count."""
    return [
        make_completion(
            LENGTHS[row],
            REWARDS[row],
            {"format": FORMATS[row]},
            outcome=outcomes[row],
            finish_reason="length" if row in TRUNCATED_ROWS else "stop",
            versions=7,
        )
        for row in range(9)
    ]


def three_groups(rows: Sequence[SampledCompletion] | None = None) -> list[Group]:
    """Returns three groups.

    They have an error, equal rewards with an invalid completion, and errors only.
    """
    rows = completions() if rows is None else rows
    return [make_group(start, rows[start : start + 3]) for start in (0, 3, 6)]


def credit_groups(groups: list[Group]) -> Rollout:
    """Returns a rollout with the advantages above; completions with a score are in the loss."""
    rollout = Rollout.from_groups(groups)
    batch = rollout.batch
    batch.advantage = torch.tensor(ADVANTAGES)[:, None]
    has_score = [verdict.has_score for group in groups for verdict in group.verdicts]
    batch.mask = batch.tokens.loss_mask & torch.tensor(has_score)[:, None]
    return rollout


def metrics_of(groups: list[Group]) -> dict[str, float]:
    return rollout_metrics(credit_groups(groups), policy_version=7)


def test_metrics_of_a_batch() -> None:
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


def test_temperature_and_overlong_penalty() -> None:
    groups = [
        make_group(number, group.completions, temperature=temperature)
        for number, (group, temperature) in enumerate(zip(three_groups(), (0.5, 0.9, 1.3), strict=True))
    ]
    rollout = credit_groups(groups)
    rollout.batch.length_reward = torch.tensor([-1.0, -0.5, 66.0, 0.0, 0.0, 0.0, 66.0, 66.0, 66.0])[:, None]
    metrics = rollout_metrics(rollout, policy_version=7)
    assert metrics["rollout/temperature"] == pytest.approx(0.9)
    assert metrics["reward/overlong_penalty"] == pytest.approx(-1.5 / 5)


def test_metrics_are_finite_with_few_or_no_scores() -> None:
    metrics = metrics_of(three_groups(completions(["scored", *["error"] * 8])))
    names = ("reward/mean", "reward/std", "advantage/mean", "advantage/std", "reward/zero_variance_groups")
    assert [metrics[name] for name in names] == [1.0, 0.0, 2.0, 0.0, 1.0]
    metrics = metrics_of(three_groups(completions(["error"] * 9)))
    names = ("reward/mean", "reward/format", "advantage/mean", "sample_utilization", "age/mean", "age/max")
    assert [metrics[name] for name in names] == [0.0] * 6


def test_rewards_are_compared_as_float32() -> None:
    """Uses 0.1 + 0.2 and 0.3, which are equal as float32."""
    groups = [make_group(0, [make_completion(1, score) for score in (0.1 + 0.2, 0.3, 0.3)])]
    rollout = Rollout.from_groups(groups)
    rollout.batch.advantage, rollout.batch.mask = torch.zeros(3, 1), rollout.batch.tokens.loss_mask
    assert rollout_metrics(rollout, 0)["reward/zero_variance_groups"] == 1.0


def test_ages_count_tokens_in_the_loss() -> None:
    """Checks ages with older tokens in rows 0 and 1.

    Row 2, an error, has the oldest tokens and does not count.
    """
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


def test_rewards_include_replaced_groups() -> None:
    """Replaces the second group once and the third group twice."""
    groups = three_groups()
    first = make_group(10, [make_completion(1, 2.0, {"format": 1.0}) for _ in range(3)])
    second = make_group(11, [make_completion(1, 0.0, {"format": 0.0}, outcome="invalid") for _ in range(3)])
    third = make_group(12, [make_completion(1, score, {"format": 0.5}) for score in (1.0, 0.0, 0.0)])
    groups[1].replaces = first
    groups[2].replaces, second.replaces = second, third
    metrics = metrics_of(groups)
    rewards = [1.0, 0.0, 0.0, 0.0, 0.0, *[2.0] * 3, *[0.0] * 3, 1.0, 0.0, 0.0]
    mean = sum(rewards) / 14
    expected = {
        "groups/generated": 6.0,
        "reward/mean": mean,
        "reward/std": (sum((reward - mean) ** 2 for reward in rewards) / 13) ** 0.5,
        "reward/zero_variance_groups": 4 / 6,
        "reward/errors": 4 / 18,
        "reward/invalid": 4 / 18,
        "reward/format": (1.5 + 3.0 + 1.5) / 14,
        "sample_utilization": 5 / 18,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["advantage/mean"] == pytest.approx(1 / 5)  # only groups in training
    assert metrics["length/response_mean"] == 3.0


def test_unselected_candidates_count_as_generated() -> None:
    groups = three_groups()
    candidates = [make_completion(9, 4.0, {"format": 1.0}), make_completion(9, 7.0, outcome="error")]
    groups[1] = replace(groups[1], unselected_candidates=candidates)
    metrics = metrics_of(groups)
    expected = {
        "groups/generated": 3.0,
        "reward/mean": 5 / 6,
        "reward/zero_variance_groups": 1 / 3,
        "reward/errors": 5 / 11,
        "reward/format": 2.5 / 6,
        "sample_utilization": 5 / 11,
        "length/response_max": 6.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_metrics_are_finite_with_replaced_groups_without_scores() -> None:
    groups = three_groups(completions(["error"] * 9))
    for group, other in zip(groups, three_groups(completions(["error"] * 9)), strict=True):
        group.replaces = other
    metrics = metrics_of(groups)
    names = ("reward/mean", "reward/std", "reward/format", "reward/errors", "reward/zero_variance_groups")
    assert [metrics[name] for name in names] == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_turns_are_counted_with_environment_tokens() -> None:
    """Counts turns in rows 3 and 5; all other rows have one turn.

    S is a sampled token, E a token of the environment. Row 3 is SESS, row 5 is SEESES.
    """
    assert "turns/mean" not in metrics_of(three_groups())
    rows = completions()
    rows[0] = replace(rows[0], sampled_mask=[True])
    assert "turns/mean" not in metrics_of(three_groups(rows))
    rows[3] = replace(rows[3], sampled_mask=[True, False, True, True])
    rows[5] = replace(rows[5], sampled_mask=[True, False, False, True, False, True])
    metrics = metrics_of(three_groups(rows))
    assert metrics["turns/mean"] == pytest.approx((7 + 2 + 3) / 9)
    assert metrics["turns/sampled_tokens"] == pytest.approx((27 - 4) / 9)


def episode_groups() -> list[Group]:
    """Returns two groups of three episodes with one or two sequences.

    An unselected candidate has no score.
    """
    first = make_group(1, [tool_episode(), rewritten_episode(), rewritten_episode()])
    second = make_group(2, [tool_episode(), tool_episode(), rewritten_episode()])
    return [replace(first, unselected_candidates=[failed_episode()]), second]


def episode_rollout(advantages: Sequence[float], width: int = 1) -> Rollout:
    """Returns the rollout of these groups, with one advantage for each completion.

    width: 1 for an advantage of each row; otherwise the advantages of tokens, that of the last token 1 higher.
    """
    rollout = Rollout.from_groups(episode_groups())
    batch = rollout.batch
    assert batch.episode is not None and len(batch) == 9
    batch.mask = batch.tokens.loss_mask & (batch.episode != 5)  # the last completion is not in the loss
    batch.advantage = torch.tensor(advantages)[batch.episode[:, 0], None].repeat(1, width)
    if width > 1:
        last = batch.tokens.response_mask.sum(1) - 1
        batch.advantage[torch.arange(9), last] += 1
    return rollout


def test_an_episode_counts_once_in_every_metric() -> None:
    """Gives episodes with two sequences other values, so that means by row differ."""
    advantages = [1.0, -2.0, -4.0, 3.0, 2.0, 9.0]
    rollout = episode_rollout(advantages)
    rollout.batch.length_reward = torch.tensor([-1.0, -2.0, -2.0, -3.0, -3.0, -4.0, -5.0, -6.0, -6.0])[:, None]
    metrics = rollout_metrics(rollout, policy_version=0)
    in_loss = advantages[:5]
    mean = sum(in_loss) / 5
    expected = {
        "advantage/mean": mean,
        "advantage/std": (sum((value - mean) ** 2 for value in in_loss) / 4) ** 0.5,
        "sample_utilization": 5 / 7,
        "length/response_mean": (3 * 9 + 3 * 6) / 6,
        "length/response_max": 9.0,
        "length/truncated": 0.0,
        "reward/mean": 3 / 6,
        "reward/overlong_penalty": -(1 + 2 + 3 + 4 + 5 + 6) / 6,
        "turns/mean": (3 * 2 + 3 * 3) / 6,
        "turns/max": 3.0,
        "turns/sampled_tokens": (3 * 6 + 3 * 5) / 6,
        "agent/sequences": (3 * 1 + 3 * 2) / 6,
        "age/histogram/0": 3 * 6 + 2 * 5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_token_advantages_of_turns_are_averaged_over_the_episode() -> None:
    """The last token of both sequences has an advantage that is higher by 1."""
    rollout = episode_rollout([0.0, 1.0, 1.0, 0.0, 0.0, 9.0], width=9)
    values = [1 / 6, 1 + 2 / 5, 1 + 2 / 5, 1 / 6, 1 / 6]
    assert rollout_metrics(rollout, 0)["advantage/mean"] == pytest.approx(sum(values) / 5)
    assert rollout.batch.advantage is not None
    rows = completion_rows(rollout, rollout.batch.advantage)
    assert [row.advantage for row in rows] == pytest.approx([*values, 0.0])
    assert [row.completion for row in rows[:2]] == ["I multiply. mul 84", "40 41"]


def test_episodes_without_a_score_count_among_ends_and_turns() -> None:
    metrics = rollout_metrics(episode_rollout([0.0] * 6), 0)
    ends = {"stop": 3 / 7, "length": 0.0, "turns": 0.0, "deadline": 3 / 7, "error": 1 / 7}
    seconds = {"engine_p50": 0.75, "engine_p95": 3.0, "environment_p50": 0.25, "environment_p95": 7.0}
    seconds |= {"start_p50": 0.0, "start_p95": 0.0}
    tools = {"calls": 9 / 7, "errors": 1 / 3, "malformed": 1 / 3, "unknown": 0.0, "timeouts": 0.0}
    expected = {f"agent/end/{name}": value for name, value in ends.items()}
    expected |= {f"agent/seconds/{name}": value for name, value in seconds.items()}
    expected |= {f"tools/{name}": value for name, value in tools.items()}
    expected |= {"reward/turn/1": 0.75 / 7, "reward/turn/2": 2.25 / 6, "reward/turn/3": 0.0}
    names = [name for name in metrics if name.startswith(("agent/end/", "agent/seconds/", "tools/", "reward/turn/"))]
    assert {name: metrics[name] for name in names} == pytest.approx(expected)


def test_calls_that_the_environment_answers_itself_are_counted() -> None:
    episode = tool_episode()
    episode.turns[0] = replace(episode.turns[0], tool_outcomes=())
    metrics = episode_metrics([episode, failed_episode()])
    assert metrics["tools/calls"] == 1.0 and metrics["tools/malformed"] == 0.0
    assert "tools/calls" not in episode_metrics([rewritten_episode()])


def test_rewards_of_late_turns_are_left_out() -> None:
    turn = failed_episode().turns[0]
    episode = make_completion(2, turns=[replace(turn, reward=float(number)) for number in range(12)])
    rewards = {name: value for name, value in episode_metrics([episode]).items() if name.startswith("reward/turn/")}
    assert rewards == {f"reward/turn/{number}": number - 1.0 for number in range(1, 9)}


def test_metrics_of_episodes_are_in_the_table() -> None:
    metrics = rollout_metrics(episode_rollout([0.0] * 6), 0)
    assert [name for name in metrics if not meaning_of(name)] == []


def test_timings_are_left_out() -> None:
    row = {"reward/mean": 1.0, "time/push_s": 2.0, "idle/engines": 0.5, "throughput/tokens_per_s": 9.0}
    row |= {"agent/seconds/engine_p50": 0.5, "agent/seconds/environment_p95": 0.5}
    assert without_timings(row) == {"reward/mean": 1.0}
