"""Adds advantages and the loss mask to a rollout's batch, with formulas from other modules.

    rewards ─▶ overlong penalty ─▶ KL in the reward ─▶ advantage        mask: the tokens in the loss

Rewards and lengths are those of a completion, whatever the number of its token sequences (rows). The formulas are in
`training/advantage.py`, `training/turn_credit.py`, `training/dynamic_sampling.py` and
`training/overlong_completions.py`.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from envs.group import FINISH_REASONS, OUTCOMES, Group
from torchgrpo.batches.episodes import EpisodeRows
from torchgrpo.batches.rollout import Rollout
from torchgrpo.training.advantage import batch_advantage, kl_reward_penalty, whiten_advantage
from torchgrpo.training.dynamic_sampling import groups_to_train_on
from torchgrpo.training.overlong_completions import overlong_reward, rows_in_loss
from torchgrpo.training.turn_credit import turn_advantage


def assign_credit(
    policy: PolicyConfig,
    rollout: Rollout,
    max_tokens: int,
    component_weights: Mapping[str, float] = MappingProxyType({}),
) -> Rollout:
    """Adds `advantage` and `mask` to the batch of a rollout.

    Under `policy.overlong_cache` it also adds `length_reward`. Returns the same rollout.

    Args:
        rollout: the batch needs `ref_log_prob` if the KL is part of the reward.
        max_tokens: length limit of sampled responses.
        component_weights: weights of the reward components, for `policy.reward_components=separate`.
    """
    groups, batch, tokens = rollout.groups, rollout.batch, rollout.batch.tokens
    rows = EpisodeRows.from_masks(batch.episode, tokens.prompt_mask, tokens.response_mask)
    first, grouped = rows.is_first, (len(groups), -1)
    lengths = rows.lengths[first]
    verdict_rewards = batch.next.reward[first, 0].double()
    rewards = overlong_reward(policy, verdict_rewards, lengths, max_tokens)
    if policy.overlong_cache is not None:
        batch.length_reward = (rewards - verdict_rewards)[rows.index, None]
    if batch.ref_log_prob is not None:
        penalty = kl_reward_penalty(policy, batch.sample_log_prob, batch.ref_log_prob, tokens.loss_mask)
        rewards = rewards - rows.sum(penalty[:, None])[first, 0]
    valid = batch.next.reward_status[first, 0] != OUTCOMES.index("error")
    sampled = tokens.loss_mask & valid[rows.index, None]
    adjustment = (rewards - verdict_rewards).view(grouped)
    if policy.credit == "turn":
        advantage = turn_advantage(policy, rollout, adjustment, valid.view(grouped))
        has_reward = (valid & rewards.isfinite())[rows.index, None]
        batch.advantage = whiten_advantage(policy, advantage, has_reward, sampled).float()
    else:
        components = _reward_components(groups, component_weights, adjustment)
        mask = rows.token_mask(sampled)
        advantage = batch_advantage(policy, rewards.view(grouped), valid.view(grouped), mask, components)
        batch.advantage = rows.spread(advantage, sampled).float()
    has_stopped = batch.finish_reason[first, 0] == FINISH_REASONS.index("stop")
    in_loss = rows_in_loss(policy, lengths, has_stopped, max_tokens)
    if policy.reward_coef != 0:  # without a reward term, the teacher's advantage does not depend on a verdict
        in_loss &= valid
    if policy.filter_range is not None:  # without a range, each group with a valid completion is trained on
        in_loss &= groups_to_train_on(policy, groups).repeat_interleave(len(in_loss) // len(groups))
    batch.mask = tokens.loss_mask & in_loss[rows.index, None]
    return rollout


def _reward_components(
    groups: Sequence[Group], weights: Mapping[str, float], adjustment: Tensor
) -> list[tuple[float, Tensor]]:
    """Collects weight and values [P, G] of each reward component.

    A completion that lacks a component of its group gets 0 for the component. A component that the whole group
    lacks (it belongs to another data set) is NaN, that is, missing.

    adjustment: [P, G], change of the reward by length and KL, appended as one more component.
    """
    components = []
    for name, weight in weights.items():
        rows = []
        for group in groups:
            group_has_component = any(name in verdict.components for verdict in group.verdicts)
            absent = 0.0 if group_has_component else float("nan")
            rows.append([verdict.components.get(name, absent) for verdict in group.verdicts])
        components.append((weight, torch.tensor(rows, dtype=torch.float64)))
    return [*components, (1.0, adjustment)] if components and adjustment.any() else components
