"""Metrics of each data set of a mixture, on a batch made by hand."""

from typing import Any

import pytest
import torch

from envs.group import Group
from envs.task import Example
from monitoring.metrics import member_metrics, rollout_metrics
from tests.groups import completion, group
from training.batch import collate

NAMES = ("sums", "words", "puzzles")


def scored(member: int, rewards: list[float], lengths: list[int], errors: int = 0, **more: Any) -> Group:
    """Of its completions the last `errors` could not be judged."""
    outcomes = ["scored"] * (len(rewards) - errors) + ["error"] * errors
    completions = [
        completion(score, tokens, outcome=outcome)
        for score, tokens, outcome in zip(rewards, lengths, outcomes, strict=True)
    ]
    example = Example(({"role": "user", "content": "?"},), "5", 0, source=NAMES[member])
    return group(completions, example=example, **more)


def test_every_member_has_its_own_means_and_one_without_completions_none() -> None:
    batch = collate(
        [scored(0, [1.0, 0.0], [2, 4]), scored(1, [0.5, 0.5], [1, 1]), scored(0, [1.0, 1.0], [3, 3])], NAMES
    )
    assert member_metrics(batch, 2, NAMES) == {
        "completions/sums": 4.0,
        "reward/mean/sums": 0.75,
        "length/response_mean/sums": 3.0,
        "completions/words": 2.0,
        "reward/mean/words": 0.5,
        "length/response_mean/words": 1.0,
        "completions/puzzles": 0.0,
    }
    assert member_metrics(batch, 2, ()) == {}


def test_what_could_not_be_judged_counts_in_no_reward() -> None:
    found = member_metrics(collate([scored(2, [1.0, 9.0], [2, 2], errors=1)], NAMES), 2, NAMES)
    assert (found["completions/puzzles"], found["reward/mean/puzzles"]) == (2.0, 1.0)
    nothing = member_metrics(collate([scored(2, [9.0, 9.0], [2, 2], errors=2)], NAMES), 2, NAMES)
    assert "reward/mean/puzzles" not in nothing


def test_a_group_that_was_replaced_counts_for_its_own_member() -> None:
    """As `reward/mean` does: dynamic sampling does not make a member look better than it is."""
    batch = collate([scored(1, [1.0, 0.0], [1, 1], in_place_of=scored(0, [0.0, 0.0], [5, 5]))], NAMES)
    found = member_metrics(batch, 2, NAMES)
    assert (found["completions/sums"], found["reward/mean/sums"]) == (2.0, 0.0)
    assert (found["completions/words"], found["reward/mean/words"]) == (2.0, 0.5)
    batch["mask"], batch["advantage"] = batch["tokens", "loss_mask"], torch.zeros(2, 1)
    assert rollout_metrics(batch, 2, 0, NAMES)["reward/mean"] == pytest.approx(0.25)


def test_groups_of_which_none_could_be_judged_are_replaced_and_logged() -> None:
    """They have no parts at all, and a TensorDict without any is lost in some operations."""
    failed = scored(0, [0.0, 0.0], [1, 1], errors=2)
    other = scored(0, [0.0, 0.0], [1, 1], errors=2, in_place_of=failed)
    batch = collate([other, scored(0, [1.0, 0.0], [1, 1])])
    batch["mask"], batch["advantage"] = batch["tokens", "loss_mask"], torch.zeros(4, 1)
    found = rollout_metrics(batch, 2, 0)
    assert (found["reward/errors"], found["reward/mean"]) == (pytest.approx(4 / 6), 0.5)
