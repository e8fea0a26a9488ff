"""Which groups and completions are trained on, and what each is worth, of groups made by hand."""

import math
import statistics
from typing import Any

import pytest

from config.schema.env import EnvConfig
from config.schema.policy import PolicyConfig, load_policy
from envs.group import Group
from envs.judging.judge import part_weights
from tests.groups import make_completion, make_group
from torchgrpo.batches.batch import collate
from torchgrpo.batches.rollout import Rollout
from torchgrpo.training.credit import credit
from torchgrpo.training.dynamic_sampling import group_filter, in_range

DYNAMIC = PolicyConfig(filter_range=[0.0, 1.0], dynamic_batching=True)


def rated(*accuracies: float, errors: int = 0) -> Group:
    right = [make_completion(2, accuracy, {"accuracy": accuracy}) for accuracy in accuracies]
    return make_group(0, [*right, *[make_completion(2, 9.0, {"accuracy": 1.0}, outcome="error")] * errors])


@pytest.mark.parametrize(
    ("group", "wanted"),
    [
        (rated(0.0, 1.0), True),
        (rated(0.0, 0.0), False),
        (rated(1.0, 1.0), False),
        (rated(0.0, 0.0, errors=1), False),
        (rated(1.0, 1.0, errors=1), False),
        (rated(0.0, 1.0, errors=1), True),
        (rated(errors=2), False),
    ],
)
def test_dynamic_sampling_wants_groups_between_its_bounds(group: Group, wanted: bool) -> None:
    assert group_filter(DYNAMIC)(group) is wanted
    assert in_range(DYNAMIC, [group]).tolist() == [wanted]


def test_without_dynamic_sampling_every_group_is_wanted() -> None:
    assert group_filter(PolicyConfig())(rated(errors=2))
    assert group_filter(PolicyConfig(filter_range=[0.0, 1.0]))(rated(1.0, 1.0))


def test_rewards_that_the_learner_cannot_tell_apart_do_not_deviate() -> None:
    """0.1 + 0.2 and 0.3 are one float32: such a group has no advantages, and dynamic sampling does not want it."""
    policy = PolicyConfig(filter_range=[0.0, math.inf], filter_on="reward_std", dynamic_batching=True)
    group = make_group(0, [make_completion(2, 0.1 + 0.2), make_completion(2, 0.3)])
    assert not group_filter(policy)(group)
    assert not credit(policy, Rollout.of([group]), 9).batch.advantage.any()


def test_a_group_outside_the_range_is_masked_and_keeps_its_advantages() -> None:
    groups = [rated(0.0, 1.0), rated(1.0, 1.0)]
    groups[1].group_id = 1
    policy = PolicyConfig(filter_range=[0.0, 1.0], baseline="none", scale="none")
    batch = credit(policy, Rollout.of(groups), 9).batch
    assert batch.mask.any(-1).tolist() == [True, True, False, False]
    assert batch.advantage[:, 0].tolist() == [0.0, 1.0, 1.0, 1.0]


def test_truncated_and_errored_completions_are_not_in_the_loss() -> None:
    completions = [
        make_completion(2, 1.0),
        make_completion(2, 0.0, finish_reason="length"),
        make_completion(2, 5.0, outcome="error"),
        make_completion(3, 0.0, sampled=[True, False, True]),
    ]
    group = make_group(0, completions)
    batch = credit(PolicyConfig(filter_truncated=True), Rollout.of([group]), 9).batch
    no = [False] * 3
    assert batch.mask.tolist() == [[True, True, False], no, no, [True, False, True]]
    assert batch.advantage[2] == 0


def test_what_length_costs() -> None:
    group = make_group(0, [make_completion(4, 1.0), make_completion(10, 1.0)])
    policy = PolicyConfig(overlong_cache=5, overlong_fraction=1.0)
    batch = credit(policy, Rollout.of([group]), max_tokens=10).batch
    assert batch.length_reward.tolist() == [[0.0], [-1.0]]
    assert batch.advantage[0] > 0 > batch.advantage[1]
    assert credit(PolicyConfig(), Rollout.of([group]), 10).batch.length_reward is None


def test_the_kl_may_be_part_of_the_reward() -> None:
    group = make_group(0, [make_completion(2, 1.0), make_completion(2, 1.0)])
    batch = collate([group])
    batch.ref_log_prob = batch.sample_log_prob.clone()
    batch.ref_log_prob[1] -= 0.5
    policy = PolicyConfig(kl_coef=0.1, kl_estimator="k1", kl_placement="reward", scale="none")
    credited = credit(policy, Rollout([group], batch), 9).batch
    assert credited.advantage[:, 0].tolist() == pytest.approx([0.05, -0.05])


def test_parts_of_the_reward_are_normalised_one_by_one() -> None:
    """Of two parts each has deviation 1 in its group, whatever its scale; one that no completion has says nothing."""
    parts = [{"right": 1.0, "short": 30.0}, {"right": 0.0, "short": 10.0}, {"right": 0.0}]
    group = make_group(0, [make_completion(2, sum(each.values()), each) for each in parts])
    policy = load_policy("gdpo", whiten="none", epsilon=0.0)
    weights = {"right": 1.0, "short": 0.5, "of another data set": 3.0}
    found = credit(policy, Rollout.of([group]), 9, weights).batch.advantage[:, 0].tolist()

    def z_scores(values: list[float]) -> list[float]:
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        return [(value - mean) / deviation for value in values]

    right, short = z_scores([1.0, 0.0, 0.0]), z_scores([30.0, 10.0, 0.0])
    assert found == pytest.approx([a + 0.5 * b for a, b in zip(right, short, strict=True)], rel=1e-6)
    alone = credit(policy, Rollout.of([group]), 9).batch.advantage[:, 0].tolist()
    assert alone == pytest.approx(z_scores([31.0, 10.0, 0.0]), rel=1e-6)


def test_a_discounted_batch_has_an_advantage_for_every_token() -> None:
    group = make_group(0, [make_completion(3, 1.0), make_completion(2, 0.0)])
    policy = PolicyConfig(scale="none", discount=0.5)
    advantage = credit(policy, Rollout.of([group]), 9).batch.advantage
    assert advantage.tolist() == [[0.125, 0.25, 0.5], [-0.25, -0.5, 0.0]]


@pytest.mark.parametrize(
    ("given", "weights"),
    [
        ({}, {}),
        ({"reward": "exact"}, {}),
        ({"reward_weights": {"accuracy": 1.0, "format": 0.2}}, {"accuracy": 1.0, "format": 0.2}),
        ({"reward": ["exact", "m:brief"]}, {"exact": 1.0, "brief": 1.0}),
        ({"reward": ["exact", "m:brief"], "reward_weights": [1.0, 0.2]}, {"exact": 1.0, "brief": 0.2}),
    ],
)
def test_what_the_parts_of_a_reward_count(given: dict[str, Any], weights: dict[str, float]) -> None:
    assert part_weights(EnvConfig(dataset="gsm8k", **given)) == weights


def test_groups_can_be_filtered_by_the_lead_of_their_best() -> None:
    groups = [rated(1.0, 0.0, 0.0), rated(1.0, 1.0, 0.0), rated(0.0, 0.0), rated(1.0), rated(1.0, errors=1)]
    assert [group_filter(load_policy("pass_at_k"))(group) for group in groups] == [
        True,
        False,
        False,
        False,
        False,
    ]
