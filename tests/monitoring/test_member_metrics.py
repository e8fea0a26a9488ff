"""Metrics of each data set of a mixture, on a batch made by hand."""

import pytest
import torch
from envs.token_env import OUTCOMES
from rollout.collector import collate
from tensordict import TensorDict

from monitoring.metrics import member_metrics, rollout_metrics
from rollout.selection import in_place_of, totals

NAMES = ("sums", "words", "puzzles")


def scored(member: int, rewards: list[float], lengths: list[int], errors: int = 0) -> TensorDict:
    """One group; of its completions the last `errors` could not be judged."""
    count, width = len(rewards), max(lengths)
    status = [OUTCOMES.index("scored")] * (count - errors) + [OUTCOMES.index("error")] * errors
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    tokens = TensorDict(
        prompt=torch.ones(count, 2, dtype=torch.int64),
        prompt_mask=torch.ones(count, 2, dtype=torch.bool),
        response=mask.long(),
        response_mask=mask,
        loss_mask=mask,
        batch_size=[count],
    )
    made = TensorDict(
        tokens=tokens,
        member=torch.tensor([[place == member for place in range(len(NAMES))]] * count),
        sample_log_prob=torch.zeros(count, width),
        policy_version=torch.zeros(count, width, dtype=torch.int64),
        finish_reason=torch.zeros(count, 1, dtype=torch.int64),
        next=TensorDict(
            reward=torch.tensor(rewards)[:, None],
            reward_status=torch.tensor(status)[:, None],
            reward_parts=TensorDict(batch_size=[count]),
            batch_size=[count],
        ),
        batch_size=[count],
    )
    made["generated"] = totals(made, count).repeat_interleave(count, dim=0)
    return made


def test_every_member_has_its_own_means_and_one_without_completions_none() -> None:
    batch = collate(
        [scored(0, [1.0, 0.0], [2, 4]), scored(1, [0.5, 0.5], [1, 1]), scored(0, [1.0, 1.0], [3, 3])]
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
    found = member_metrics(collate([scored(2, [1.0, 9.0], [2, 2], errors=1)]), 2, NAMES)
    assert (found["completions/puzzles"], found["reward/mean/puzzles"]) == (2.0, 1.0)
    nothing = member_metrics(collate([scored(2, [9.0, 9.0], [2, 2], errors=2)]), 2, NAMES)
    assert "reward/mean/puzzles" not in nothing


def test_a_group_that_was_replaced_counts_for_its_own_member() -> None:
    """As `reward/mean` does: dynamic sampling does not make a member look better than it is."""
    batch = collate([in_place_of(scored(0, [0.0, 0.0], [5, 5]), scored(1, [1.0, 0.0], [1, 1]))])
    found = member_metrics(batch, 2, NAMES)
    assert (found["completions/sums"], found["reward/mean/sums"]) == (2.0, 0.0)
    assert (found["completions/words"], found["reward/mean/words"]) == (2.0, 0.5)
    batch["mask"], batch["advantage"] = batch["tokens", "loss_mask"], torch.zeros(2, 1)
    assert rollout_metrics(batch, 2, 0, NAMES)["reward/mean"] == pytest.approx(0.25)


def test_groups_of_which_none_could_be_judged_are_replaced_and_logged() -> None:
    """They have no parts at all, and a TensorDict without any is lost in some operations."""
    failed, other = (scored(0, [0.0, 0.0], [1, 1], errors=2) for _ in range(2))
    batch = collate([in_place_of(failed, other), scored(0, [1.0, 0.0], [1, 1])])
    batch["mask"], batch["advantage"] = batch["tokens", "loss_mask"], torch.zeros(4, 1)
    found = rollout_metrics(batch, 2, 0)
    assert (found["reward/errors"], found["reward/mean"]) == (pytest.approx(4 / 6), 0.5)
