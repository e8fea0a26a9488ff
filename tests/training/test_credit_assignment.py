"""Tests of advantages, loss masks and dynamic sampling on hand-written groups."""

import math
import statistics
from typing import Any

import pytest

from config.schema.env import EnvConfig
from config.schema.policy import PolicyConfig, load_policy
from envs.group import Group
from envs.reward_workers.task_scorer import component_weights
from tests.groups import make_completion, make_group
from torchgrpo.batches.batch import collate
from torchgrpo.batches.rollout import Rollout
from torchgrpo.training.credit_assignment import assign_credit
from torchgrpo.training.dynamic_sampling import group_filter, groups_to_train_on

DYNAMIC = PolicyConfig(filter_range=[0.0, 1.0], dynamic_batching=True)


def rated_group(*accuracies: float, errors: int = 0) -> Group:
    right = [make_completion(2, accuracy, {"accuracy": accuracy}) for accuracy in accuracies]
    return make_group(0, [*right, *[make_completion(2, 9.0, {"accuracy": 1.0}, outcome="error")] * errors])


@pytest.mark.parametrize(
    ("group", "is_selected"),
    [
        (rated_group(0.0, 1.0), True),
        (rated_group(0.0, 0.0), False),
        (rated_group(1.0, 1.0), False),
        (rated_group(0.0, 0.0, errors=1), False),
        (rated_group(1.0, 1.0, errors=1), False),
        (rated_group(0.0, 1.0, errors=1), True),
        (rated_group(errors=2), False),
    ],
)
def test_dynamic_sampling_selects_groups_inside_its_range(group: Group, is_selected: bool) -> None:
    assert group_filter(DYNAMIC)(group) is is_selected
    assert groups_to_train_on(DYNAMIC, [group]).tolist() == [is_selected]


def test_without_dynamic_sampling_all_groups_are_selected() -> None:
    assert group_filter(PolicyConfig())(rated_group(errors=2))
    assert group_filter(PolicyConfig(filter_range=[0.0, 1.0]))(rated_group(1.0, 1.0))


def test_rewards_equal_in_float32_have_no_deviation() -> None:
    """A group with rewards 0.1 + 0.2 and 0.3 (equal in float32) has no gradient."""
    policy = PolicyConfig(filter_range=[0.0, math.inf], filter_on="reward_std", dynamic_batching=True)
    group = make_group(0, [make_completion(2, 0.1 + 0.2), make_completion(2, 0.3)])
    assert not group_filter(policy)(group)
    assert not assign_credit(policy, Rollout.from_groups([group]), 9).batch.advantage.any()


def test_a_group_outside_the_range_is_masked_and_keeps_its_advantages() -> None:
    groups = [rated_group(0.0, 1.0), rated_group(1.0, 1.0)]
    groups[1].group_id = 1
    policy = PolicyConfig(filter_range=[0.0, 1.0], baseline="none", scale="none")
    batch = assign_credit(policy, Rollout.from_groups(groups), 9).batch
    assert batch.mask.any(-1).tolist() == [True, True, False, False]
    assert batch.advantage[:, 0].tolist() == [0.0, 1.0, 1.0, 1.0]


def test_truncated_and_errored_completions_are_not_in_the_loss() -> None:
    completions = [
        make_completion(2, 1.0),
        make_completion(2, 0.0, finish_reason="length"),
        make_completion(2, 5.0, outcome="error"),
        make_completion(3, 0.0, sampled_mask=[True, False, True]),
    ]
    group = make_group(0, completions)
    batch = assign_credit(PolicyConfig(filter_truncated=True), Rollout.from_groups([group]), 9).batch
    no = [False] * 3
    assert batch.mask.tolist() == [[True, True, False], no, no, [True, False, True]]
    assert batch.advantage[2] == 0


def test_overlong_completions_lose_reward() -> None:
    group = make_group(0, [make_completion(4, 1.0), make_completion(10, 1.0)])
    policy = PolicyConfig(overlong_cache=5, overlong_fraction=1.0)
    batch = assign_credit(policy, Rollout.from_groups([group]), max_tokens=10).batch
    assert batch.length_reward.tolist() == [[0.0], [-1.0]]
    assert batch.advantage[0] > 0 > batch.advantage[1]
    assert assign_credit(PolicyConfig(), Rollout.from_groups([group]), 10).batch.length_reward is None


def test_the_kl_may_be_part_of_the_reward() -> None:
    group = make_group(0, [make_completion(2, 1.0), make_completion(2, 1.0)])
    batch = collate([group])
    batch.ref_log_prob = batch.sample_log_prob.clone()
    batch.ref_log_prob[1] -= 0.5
    policy = PolicyConfig(kl_coef=0.1, kl_estimator="k1", kl_placement="reward", scale="none")
    credited_batch = assign_credit(policy, Rollout([group], batch), 9).batch
    assert credited_batch.advantage[:, 0].tolist() == pytest.approx([0.05, -0.05])


def test_reward_components_are_normalised_separately() -> None:
    """Components have deviation 1 in their group, whatever their scale.

    A component that no completion has does not count.
    """
    parts = [{"right": 1.0, "short": 30.0}, {"right": 0.0, "short": 10.0}, {"right": 0.0}]
    group = make_group(0, [make_completion(2, sum(each.values()), each) for each in parts])
    policy = load_policy("gdpo", whiten="none", epsilon=0.0)
    weights = {"right": 1.0, "short": 0.5, "of another data set": 3.0}
    found = assign_credit(policy, Rollout.from_groups([group]), 9, weights).batch.advantage[:, 0].tolist()

    def z_scores(values: list[float]) -> list[float]:
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        return [(value - mean) / deviation for value in values]

    right, short = z_scores([1.0, 0.0, 0.0]), z_scores([30.0, 10.0, 0.0])
    assert found == pytest.approx([a + 0.5 * b for a, b in zip(right, short, strict=True)], rel=1e-6)
    alone = assign_credit(policy, Rollout.from_groups([group]), 9).batch.advantage[:, 0].tolist()
    assert alone == pytest.approx(z_scores([31.0, 10.0, 0.0]), rel=1e-6)


def test_a_discounted_batch_has_an_advantage_for_every_token() -> None:
    group = make_group(0, [make_completion(3, 1.0), make_completion(2, 0.0)])
    policy = PolicyConfig(scale="none", discount=0.5)
    advantage = assign_credit(policy, Rollout.from_groups([group]), 9).batch.advantage
    assert advantage.tolist() == [[0.125, 0.25, 0.5], [-0.25, -0.5, 0.0]]


@pytest.mark.parametrize(
    ("env_fields", "weights"),
    [
        ({}, {}),
        ({"reward": "exact"}, {}),
        ({"reward_weights": {"accuracy": 1.0, "format": 0.2}}, {"accuracy": 1.0, "format": 0.2}),
        ({"reward": ["exact", "m:brief"]}, {"exact": 1.0, "brief": 1.0}),
        ({"reward": ["exact", "m:brief"], "reward_weights": [1.0, 0.2]}, {"exact": 1.0, "brief": 0.2}),
    ],
)
def test_weights_of_reward_components(env_fields: dict[str, Any], weights: dict[str, float]) -> None:
    assert component_weights(EnvConfig(dataset="gsm8k", **env_fields)) == weights


def test_groups_can_be_filtered_by_the_margin_of_their_best() -> None:
    groups = [
        rated_group(1.0, 0.0, 0.0),
        rated_group(1.0, 1.0, 0.0),
        rated_group(0.0, 0.0),
        rated_group(1.0),
        rated_group(1.0, errors=1),
    ]
    assert [group_filter(load_policy("pass_at_k"))(group) for group in groups] == [True, False, False, False, False]
