"""Tests of the metrics of each data set of a mixture, on hand-made groups."""

from collections.abc import Sequence

import pytest
import torch

from envs.group import Group
from tests.groups import make_completion, make_group
from torchgrpo.batches.rollout import Rollout
from torchgrpo.monitoring.metrics import rollout_metrics

NAMES = ("sums", "words", "puzzles")


def scored_group(name: str, rewards: list[float], lengths: list[int], errors: int = 0) -> Group:
    """Returns a group whose last `errors` completions have no score."""
    num_scored = len(rewards) - errors
    rows = enumerate(zip(rewards, lengths, strict=True))
    completions = [
        make_completion(length, reward, outcome="scored" if row < num_scored else "error")
        for row, (reward, length) in rows
    ]
    return make_group(0, completions, source=name)


def compute_metrics(groups: Sequence[Group], members: Sequence[str] = NAMES) -> dict[str, float]:
    rollout = Rollout.from_groups(groups)
    batch = rollout.batch
    batch.mask, batch.advantage = batch.tokens.loss_mask, torch.zeros(len(batch), 1)
    return rollout_metrics(rollout, 0, members)


def member_metrics(groups: Sequence[Group]) -> dict[str, float]:
    return {name: value for name, value in compute_metrics(groups).items() if name.endswith(NAMES)}


def test_each_data_set_with_completions_has_means() -> None:
    groups = [
        scored_group("sums", [1.0, 0.0], [2, 4]),
        scored_group("words", [0.5, 0.5], [1, 1]),
        scored_group("sums", [1.0, 1.0], [3, 3]),
    ]
    assert member_metrics(groups) == {
        "completions/sums": 4.0,
        "reward/mean/sums": 0.75,
        "length/response_mean/sums": 3.0,
        "completions/words": 2.0,
        "reward/mean/words": 0.5,
        "length/response_mean/words": 1.0,
        "completions/puzzles": 0.0,
    }
    assert not [name for name in compute_metrics(groups, ()) if name.endswith(NAMES)]


def test_completions_without_a_score_do_not_count_in_rewards() -> None:
    metrics = member_metrics([scored_group("puzzles", [1.0, 9.0], [2, 2], errors=1)])
    assert (metrics["completions/puzzles"], metrics["reward/mean/puzzles"]) == (2.0, 1.0)
    metrics_without_score = member_metrics([scored_group("puzzles", [9.0, 9.0], [2, 2], errors=2)])
    assert "reward/mean/puzzles" not in metrics_without_score


def test_replaced_group_counts_for_its_data_set() -> None:
    """Includes replaced groups, as in `reward/mean`, so dynamic sampling does not bias the means."""
    group = scored_group("words", [1.0, 0.0], [1, 1])
    group.replaces = scored_group("sums", [0.0, 0.0], [5, 5])
    metrics = compute_metrics([group])
    assert (metrics["completions/sums"], metrics["reward/mean/sums"]) == (2.0, 0.0)
    assert (metrics["completions/words"], metrics["reward/mean/words"]) == (2.0, 0.5)
    assert metrics["length/response_mean/sums"] == 5.0
    assert metrics["reward/mean"] == pytest.approx(0.25)


def test_replaced_groups_without_scores_are_logged() -> None:
    failed, other = (scored_group("sums", [0.0, 0.0], [1, 1], errors=2) for _ in range(2))
    other.replaces = failed
    metrics = compute_metrics([other, scored_group("sums", [1.0, 0.0], [1, 1])], ())
    assert (metrics["reward/errors"], metrics["reward/mean"]) == (pytest.approx(4 / 6), 0.5)
