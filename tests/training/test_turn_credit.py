"""Tests of advantages of turns: values by hand, and their bias under random lengths."""

import math
import random
import statistics
from collections import defaultdict
from dataclasses import replace
from itertools import chain

import pytest

from config.schema.errors import ConfigError
from config.schema.policy import load_policy
from envs.group import Group, SampledCompletion, SequenceStart, Turn
from tests.groups import make_completion, make_group
from tests.training.episode_groups import episode, random_streams, split_groups, whole_groups
from torchgrpo.batches.rollout import Rollout
from torchgrpo.training.credit_assignment import assign_credit

POLICY = load_policy("rloo", credit="turn")


def turn_advantages(groups: list[Group], **fields: object) -> list[list[float]]:
    """Returns the advantages of each row's sampled tokens."""
    batch = assign_credit(load_policy("rloo", credit="turn", **fields), Rollout.from_groups(groups), 16).batch
    assert not batch.advantage[~batch.tokens.loss_mask].any()
    return [row[mask].tolist() for row, mask in zip(batch.advantage, batch.tokens.loss_mask, strict=True)]


def test_three_episodes_by_hand() -> None:
    """Returns-to-go are 3, 2, 2 and 1, 1 and 2.5.

    The verdict of the third adds 0.5 to its only turn.
    """
    group = make_group(0, [episode([1.0, 0.0, 2.0]), episode([0.0, 1.0]), episode([2.0], score=2.5)])
    assert turn_advantages([group]) == [[1.25, 1.0, 0.0], [-1.75, -1.0], [0.5]]
    assert turn_advantages([group], group_of_one="raw") == [[1.25, 1.0, 2.0], [-1.75, -1.0], [0.5]]
    assert turn_advantages([group], baseline="none") == [[3.0, 2.0, 2.0], [1.0, 1.0], [2.5]]


def test_a_failed_episode_is_in_no_baseline() -> None:
    completions = [episode([1.0, 0.0, 2.0]), episode([0.0, 1.0]), episode([2.0], score=2.5)]
    group = make_group(0, [*completions, episode([5.0, 5.0, 5.0, 5.0], has_error=True)])
    assert turn_advantages([group]) == [[1.25, 1.0, 0.0], [-1.75, -1.0], [0.5], [0.0] * 4]


def test_completions_without_turns_are_single_turns() -> None:
    group = make_group(0, [make_completion(2, 1.0), make_completion(3, 0.0), make_completion(1, 0.5)])
    assert turn_advantages([group]) == [[0.75] * 2, [-0.75] * 3, [0.0]]


def test_equal_returns_have_no_advantage() -> None:
    """The sums 0.1 + 0.2 and 0.3 are equal in the precision of rewards."""
    group = make_group(0, [episode([0.0, 0.1, 0.2]), episode([0.3, 0.1, 0.2]), episode([0.0, 0.3, 0.0], 0.1 + 0.2)])
    advantages = turn_advantages([group])
    assert [row[1] for row in advantages] == [0.0, 0.0, 0.0]
    assert [row[2] for row in advantages] == pytest.approx([0.1, 0.1, -0.2])


def test_the_last_turn_carries_the_overlong_penalty() -> None:
    """The longest episode, of five tokens, loses one."""
    group = make_group(0, [episode([1.0, 0.0, 2.0]), episode([0.0, 3.0])])
    policy = load_policy("rloo", credit="turn", overlong_cache=2, overlong_fraction=1.0)
    advantage = assign_credit(policy, Rollout.from_groups([group]), max_tokens=5).batch.advantage
    assert advantage[:, ::2].tolist() == [[-1.0, -2.0, 0.0], [1.0, 2.0, 0.0]]


def test_whitening_centres_the_tokens() -> None:
    groups = [make_group(number, [episode([1.0, 0.0, 2.0]), episode([0.0, 1.0])]) for number in range(2)]
    groups[1].completions[0] = episode([9.0], has_error=True)
    whitened = turn_advantages(groups, whiten="tokens")
    values = [value for row in (whitened[0], whitened[1], whitened[3]) for value in row]
    assert statistics.mean(values) == pytest.approx(0.0, abs=1e-6)
    assert statistics.stdev(values) == pytest.approx(1.0, abs=1e-5)
    assert whitened[2] == [0.0]


def test_turns_have_their_advantages_in_any_number_of_sequences() -> None:
    streams = random_streams(2)
    whole = turn_advantages(whole_groups(streams))
    split = turn_advantages(split_groups(streams, 2, share=1.0, drops_replies=True))
    assert len(split) > len(whole)
    assert list(chain.from_iterable(split)) == list(chain.from_iterable(whole))


def test_turns_of_alternating_sequences_have_their_own_advantages() -> None:
    """The sequence of the second turn stands before that of the first and third."""
    one = replace(
        episode([1.0, 0.0, 2.0]),
        token_ids=[11, 10, 30, 12],
        sampled_mask=[True, True, False, True],
        log_probs=[-1.0, -1.0, 0.0, -1.0],
        policy_versions=[0] * 4,
        turns=[Turn({}, 1, 2, reward=1.0), Turn({}, 0, 1), Turn({}, 3, 4, reward=2.0)],
        sequence_starts=[SequenceStart(0, (7,)), SequenceStart(1, (5, 6))],
    )
    assert turn_advantages([make_group(0, [one])], baseline="none") == [[2.0], [3.0, 2.0]]


STOP, GO = 1, 2
LAST_TURN = 3


def stop_or_go(rng: random.Random) -> SampledCompletion:
    """Makes an episode that stops or goes on at random.

    The mean reward is one for the turn that ends it, and zero for the others. The mean return is thus the same for both
    actions at every turn, and their true advantage is zero.
    """
    actions, rewards = [], []
    while not actions or (actions[-1] == GO):
        actions.append(STOP if len(actions) == LAST_TURN or rng.random() < 0.5 else GO)
        rewards.append((actions[-1] == STOP) + rng.gauss(0.0, 1.0))
    one = episode(rewards)
    ids = iter(actions)
    one.token_ids = [next(ids) if sampled else 9 for sampled in one.sampled_mask]
    return one


def bias_by_action(groups: list[Group], advantages: list[list[float]]) -> dict[tuple[int, int], float]:
    """Returns the mean advantage of each action at each turn, in its standard errors."""
    values = defaultdict(list)
    completions = [one for group in groups for one in group.completions]
    for one, row in zip(completions, advantages, strict=True):
        for turn, (span, advantage) in enumerate(zip(one.turns, row, strict=True)):
            values[one.token_ids[span.start], turn].append(advantage)
    return {
        key: statistics.mean(each) / (statistics.stdev(each) / math.sqrt(len(each))) for key, each in values.items()
    }


def minus_means_of_turns(group: Group) -> list[list[float]]:
    """Returns the sum of each turn's reward and later ones, less their turns' means."""
    rewards = [[turn.reward for turn in one.turns] for one in group.completions]
    means = [statistics.mean(row[turn] for row in rewards if len(row) > turn) for turn in range(max(map(len, rewards)))]
    centred = [[reward - mean for reward, mean in zip(row, means, strict=False)] for row in rewards]
    return [[sum(row[turn:]) for turn in range(len(row))] for row in centred]


def test_actions_of_equal_value_have_no_advantage_on_average() -> None:
    """Rewards less the mean reward of their turn would favour the end of an episode."""
    rng = random.Random(0)
    groups = [make_group(number, [stop_or_go(rng) for _ in range(4)]) for number in range(2500)]
    bias = bias_by_action(groups, turn_advantages(groups))
    assert len(bias) == 2 * LAST_TURN + 1
    assert max(map(abs, bias.values())) < 4
    other = bias_by_action(groups, [row for group in groups for row in minus_means_of_turns(group)])
    assert other[STOP, 0] > 10 and other[GO, 0] < -10


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"baseline": "mean", "scale": "std_unbiased"},
            r"policy.baseline=mean .*set policy.baseline=leave_one_out policy.scale=none$",
        ),
        ({"baseline": "mean"}, r"policy.baseline=mean .*policy.credit=turn.*set policy.baseline=leave_one_out"),
        ({"scale": "std_unbiased"}, r"policy.scale=std_unbiased .*set policy.scale=none"),
        (
            {"reward_components": "separate"},
            r"policy.reward_components=separate .*set policy.reward_components=combined",
        ),
        ({"discount": 0.9}, r"policy.discount=0.9 .*set policy.discount=1"),
        ({"whiten": "rollouts"}, r"policy.whiten=rollouts .*set policy.whiten=none"),
        ({"objective": "geometric", "ratio": "token"}, r"policy.objective=geometric.*set policy.credit=completion"),
    ],
)
def test_fields_without_a_meaning_for_turns_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_policy("rloo", credit="turn", **fields)


def test_presets_with_a_meaning_for_turns_are_accepted() -> None:
    assert load_policy("reinforce_pp", credit="turn").whiten == "tokens"
    assert POLICY.baseline == "leave_one_out"
