"""What every completion is worth, and which of them are trained on.

    rewards ─▶ overlong punishment ─▶ KL in the reward ─▶ advantage        mask: the tokens that the loss reads

The formulas are in `training/advantage.py`, `training/dynamic_sampling.py` and `training/overlong.py`.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from envs.group import FINISH_REASONS, OUTCOMES, Group
from torchgrpo.batches.rollout import Rollout
from torchgrpo.training.advantage import batch_advantage, reward_kl
from torchgrpo.training.dynamic_sampling import in_range
from torchgrpo.training.overlong import overlong_reward, rows_in_loss


def credit(
    policy: PolicyConfig,
    rollout: Rollout,
    max_tokens: int,
    part_weights: Mapping[str, float] = MappingProxyType({}),
) -> Rollout:
    """Adds `advantage`, `mask` and, under `policy.overlong_cache`, `length_reward` to the batch; returns the rollout.

    rollout: its batch has `ref_log_prob` where the KL is part of the reward. max_tokens: the longest response that may
    be sampled. part_weights: what the parts of the reward count in it, for `policy.reward_parts=apart`.
    """
    groups, batch = rollout.groups, rollout.batch
    lengths = batch.tokens.response_mask.sum(-1)
    given = batch.next.reward[:, 0].double()
    rewards = overlong_reward(policy, given, lengths, max_tokens)
    if policy.overlong_cache is not None:
        batch.length_reward = (rewards - given)[:, None]
    if batch.ref_log_prob is not None:
        taken_off = reward_kl(policy, batch.sample_log_prob, batch.ref_log_prob, batch.tokens.loss_mask)
        rewards = rewards - taken_off
    valid = batch.next.reward_status[:, 0] != OUTCOMES.index("error")
    grouped = (len(groups), -1)
    parts = _parts(groups, part_weights, (rewards - given).view(grouped))
    drawn = batch.tokens.loss_mask & valid[:, None]
    advantage = batch_advantage(policy, rewards.view(grouped), valid.view(grouped), drawn, parts)
    batch.advantage = advantage.float()
    stopped = batch.finish_reason[:, 0] == FINISH_REASONS.index("stop")
    kept = rows_in_loss(policy, lengths, stopped, max_tokens)
    if policy.reward_coef != 0:  # else a teacher's word does not depend on a verdict
        kept &= valid
    if policy.filter_range is not None:  # else a row that is valid makes its group one of those
        kept &= in_range(policy, groups).repeat_interleave(len(kept) // len(groups))
    batch.mask = batch.tokens.loss_mask & kept[:, None]
    return rollout


def _parts(
    groups: Sequence[Group], weights: Mapping[str, float], added: Tensor
) -> list[tuple[float, Tensor]]:
    """Weight and values [P, G] of each part of the reward; `added` [P, G], by length or KL, is one more.

    A completion without a part that others of its group have earned nothing of it; a part that none of them has is
    missing (another data set's).
    """
    parts = []
    for name, weight in weights.items():
        rows = []
        for group in groups:
            known = any(name in verdict.parts for verdict in group.verdicts)
            absent = 0.0 if known else float("nan")
            rows.append([verdict.parts.get(name, absent) for verdict in group.verdicts])
        parts.append((weight, torch.tensor(rows, dtype=torch.float64)))
    return [*parts, (1.0, added)] if parts and added.any() else parts
