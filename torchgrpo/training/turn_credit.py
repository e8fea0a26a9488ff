"""Computes an advantage for each turn of an episode, from its reward and later ones.

    G_t = r_t + ... + r_T                     return-to-go; the last turn carries what the turns' rewards leave
    A_t = G_t - mean of G_t over the other completions of the group that came to turn t

The baseline of an action depends on no action of the same episode, so it adds no bias, even if actions decide how long
an episode is. Rewards of turns are not normalised by turn: the number of baselines in a return would then depend on the
turn at which the episode stops, and so would the expected advantage.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig
from envs.group import Group, SampledCompletion
from torchgrpo.batches.rollout import Rollout


def turn_advantage(policy: PolicyConfig, rollout: Rollout, adjustment: Tensor, valid: Tensor) -> Tensor:
    """Computes the advantage of every sampled token from the turn that it belongs to.

    adjustment: [P, G], change of the reward by length and KL; the last turn carries it. valid: bool [P, G], completions
    with a score; the others enter no baseline.

    Returns float64 [N, R], 0 for tokens that the policy did not sample and in completions that are not valid.
    """
    returns, is_reached = turn_returns(rollout.groups, adjustment)
    is_reached &= (valid & returns.isfinite().all(dim=2))[:, :, None]
    if policy.baseline == "leave_one_out":
        returns = _minus_mean_of_others(returns, is_reached, keeps_lone=policy.group_of_one == "raw")
    advantage = torch.where(is_reached, returns, 0.0).flatten(0, 1)
    tokens = rollout.batch.tokens
    per_token = [
        advantage[number, _turn_numbers(one)]
        for number, one in enumerate(one for group in rollout.groups for one in group.completions)
    ]
    zeros = torch.zeros(tokens.response_mask.shape, dtype=advantage.dtype)
    spread = zeros.masked_scatter(tokens.response_mask.cpu(), torch.cat(per_token)).to(tokens.response_mask.device)
    return torch.where(tokens.loss_mask, spread, 0.0)


def turn_returns(groups: Sequence[Group], adjustment: Tensor) -> tuple[Tensor, Tensor]:
    """Computes returns-to-go float64 [P, G, T] and a mask of the turns that were reached.

    The first return of a completion is its reward, adjustment included. Returns have the precision of float32, as
    rewards have, so that sums in another order do not differ.
    """
    longest = max(len(_turns(one)) for group in groups for one in group.completions)
    returns = torch.zeros(*adjustment.shape, longest, dtype=torch.float64)
    is_reached = torch.zeros(returns.shape, dtype=torch.bool)
    for place, group in enumerate(groups):
        for number, one in enumerate(group.completions):
            assert one.verdict is not None
            earned_before = [0.0, *accumulate(reward for _, reward in _turns(one)[:-1])]
            remaining = [one.verdict.score - earned for earned in earned_before]
            returns[place, number, : len(remaining)] = torch.tensor(remaining, dtype=torch.float32).double()
            is_reached[place, number, : len(remaining)] = True
    return torch.where(is_reached, returns + adjustment.cpu()[:, :, None], 0.0), is_reached


def _minus_mean_of_others(returns: Tensor, is_reached: Tensor, keeps_lone: bool) -> Tensor:
    """Subtracts the mean return of the other completions that reached the turn, [P, G, T].

    keeps_lone: whether a completion without others keeps its return; otherwise it gets 0.
    """
    count = is_reached.sum(dim=1, keepdim=True)
    first = returns.gather(1, is_reached.int().argmax(dim=1, keepdim=True))
    relative = torch.where(is_reached, returns - first, 0.0)  # equal returns give exact zeros
    of_others = (relative.sum(dim=1, keepdim=True) - relative) / (count - 1).clamp_min(1)
    return torch.where(count > 1, relative - of_others, returns if keeps_lone else 0.0)


def _turns(completion: SampledCompletion) -> list[tuple[int, float]]:
    """Returns start and reward of each turn.

    A completion without turns is a single turn.
    """
    return [(turn.start, turn.reward) for turn in completion.turns] or [(0, 0.0)]


def _turn_numbers(completion: SampledCompletion) -> Tensor:
    """Returns the number of each token's turn, int64 [tokens].

    A reply of the environment belongs to the turn before it. Turns are numbered in the order of time, and stand in that
    of the sequences.
    """
    numbers = torch.zeros(len(completion.token_ids), dtype=torch.int64)
    for start, number in sorted((start, number) for number, (start, _) in enumerate(_turns(completion))):
        numbers[start:] = number
    return numbers
