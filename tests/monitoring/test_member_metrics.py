"""Metrics of each data set of a mixture, on groups made by hand."""

from collections.abc import Sequence

import pytest
import torch

from envs.group import Group
from tests.groups import make_completion, make_group
from torchgrpo.batches.rollout import Rollout
from torchgrpo.monitoring.metrics import rollout_metrics

NAMES = ("sums", "words", "puzzles")


def scored(name: str, rewards: list[float], lengths: list[int], errors: int = 0) -> Group:
    """One group; of its completions the last `errors` could not be judged."""
    judged = len(rewards) - errors
    rows = enumerate(zip(rewards, lengths, strict=True))
    completions = [
        make_completion(length, reward, outcome="scored" if row < judged else "error")
        for row, (reward, length) in rows
    ]
    return make_group(0, completions, source=name)


def found_in(groups: Sequence[Group], members: Sequence[str] = NAMES) -> dict[str, float]:
    rollout = Rollout.of(groups)
    batch = rollout.batch
    batch.mask, batch.advantage = batch.tokens.loss_mask, torch.zeros(len(batch), 1)
    return rollout_metrics(rollout, 0, members)


def of_members(groups: Sequence[Group]) -> dict[str, float]:
    return {name: value for name, value in found_in(groups).items() if name.endswith(NAMES)}


def test_every_member_has_its_own_means_and_one_without_completions_none() -> None:
    groups = [
        scored("sums", [1.0, 0.0], [2, 4]),
        scored("words", [0.5, 0.5], [1, 1]),
        scored("sums", [1.0, 1.0], [3, 3]),
    ]
    assert of_members(groups) == {
        "completions/sums": 4.0,
        "reward/mean/sums": 0.75,
        "length/response_mean/sums": 3.0,
        "completions/words": 2.0,
        "reward/mean/words": 0.5,
        "length/response_mean/words": 1.0,
        "completions/puzzles": 0.0,
    }
    assert not [name for name in found_in(groups, ()) if name.endswith(NAMES)]


def test_what_could_not_be_judged_counts_in_no_reward() -> None:
    found = of_members([scored("puzzles", [1.0, 9.0], [2, 2], errors=1)])
    assert (found["completions/puzzles"], found["reward/mean/puzzles"]) == (2.0, 1.0)
    nothing = of_members([scored("puzzles", [9.0, 9.0], [2, 2], errors=2)])
    assert "reward/mean/puzzles" not in nothing


def test_a_group_that_was_replaced_counts_for_its_own_member() -> None:
    """As `reward/mean` does: dynamic sampling does not make a member look better than it is."""
    group = scored("words", [1.0, 0.0], [1, 1])
    group.in_place_of = scored("sums", [0.0, 0.0], [5, 5])
    found = found_in([group])
    assert (found["completions/sums"], found["reward/mean/sums"]) == (2.0, 0.0)
    assert (found["completions/words"], found["reward/mean/words"]) == (2.0, 0.5)
    assert found["length/response_mean/sums"] == 5.0
    assert found["reward/mean"] == pytest.approx(0.25)


def test_groups_of_which_none_could_be_judged_are_replaced_and_logged() -> None:
    failed, other = (scored("sums", [0.0, 0.0], [1, 1], errors=2) for _ in range(2))
    other.in_place_of = failed
    found = found_in([other, scored("sums", [1.0, 0.0], [1, 1])], ())
    assert (found["reward/errors"], found["reward/mean"]) == (pytest.approx(4 / 6), 0.5)
