"""From generated completions to those that a batch holds, and what was generated for it.

    candidates of a prompt ──choose_balanced──▶ a group ──refused by the learner?──▶ another group in its place

A group carries totals over everything that was generated for its place, `("generated", ...)` [N, 1], the same
in all its rows: so the metrics of a batch speak of the policy, not of what was picked.
"""

import random
from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase

from envs.token_env import OUTCOMES
from envs.verdicts import judged, success


def choose_balanced(scored: TensorDictBase, candidates: int, repeats: int, seed: int) -> TensorDictBase:
    """`repeats` of every prompt's `candidates`: as many right as wrong ones, or as near to it as there are.

    scored: [P * candidates], group-major. Which of the right (or wrong) ones is random, fixed by `seed` and the
    group's id. Completions whose reward errored are taken last. Their order stays.
    """
    if candidates == repeats:
        return scored
    valid = judged(scored).view(-1, candidates)
    right = valid & (success(scored).view(-1, candidates) > 0.5)
    wrong = valid & ~right
    num_right, num_wrong = right.sum(1), wrong.sum(1)
    take_right = torch.minimum(num_right, (repeats - num_wrong).clamp_min(repeats // 2))
    take_wrong = torch.minimum(num_wrong, repeats - take_right)
    order = _random(scored["group_id"][::candidates, 0].tolist(), candidates, seed)
    chosen = _first(right, take_right, order) | _first(wrong, take_wrong, order)
    chosen |= _first(~valid, repeats - take_right - take_wrong, order)
    return scored[chosen.flatten()]


def _random(group_ids: Sequence[int], width: int, seed: int) -> torch.Tensor:
    """[P, width] uniform numbers that depend on the seed and each group's id alone."""
    generators = [random.Random((seed << 40) + group_id) for group_id in group_ids]
    return torch.tensor([[generator.random() for _ in range(width)] for generator in generators])


def _first(members: torch.Tensor, count: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """[P, C] bool: the `count` [P] members of each row that come first in `order`."""
    place = order.masked_fill(~members, torch.inf).argsort(1).argsort(1)
    return members & (place < count[:, None])


def totals(scored: TensorDictBase, candidates: int) -> TensorDictBase:
    """Sums over each prompt's candidates, [P] of [1] float64.

    Rewards, their squares and their parts are those of the judged completions. `zero_variance`: 1 where all
    judged rewards are equal. `members`, of a mixture: the same sums, [P, members], in the column of the prompt's.
    """
    valid = judged(scored).view(-1, candidates)
    reward = scored["next", "reward"].view(-1, candidates).double()
    invalid = scored["next", "reward_status"].view(-1, candidates) == OUTCOMES.index("invalid")
    highest = reward.masked_fill(~valid, -torch.inf).amax(1)
    lowest = reward.masked_fill(~valid, torch.inf).amin(1)
    prompts = [len(valid)]

    def total(values: torch.Tensor) -> torch.Tensor:
        return torch.where(valid, values, 0.0).sum(1, keepdim=True)

    parts = {
        name: total(part.view(-1, candidates).double())
        for name, part in scored["next", "reward_parts"].items()
    }
    sums = TensorDict(
        groups=torch.ones(*prompts, 1, dtype=torch.float64),
        completions=torch.full((*prompts, 1), float(candidates), dtype=torch.float64),
        judged=valid.double().sum(1, keepdim=True),
        invalid=invalid.double().sum(1, keepdim=True),
        reward=total(reward),
        reward_squared=total(reward.square()),
        zero_variance=(highest <= lowest).double()[:, None],
        reward_parts=TensorDict(parts, batch_size=prompts),
        batch_size=prompts,
    )
    member = scored.get("member", None)
    if member is not None:
        lengths = scored["tokens", "response_mask"].sum(-1).view(-1, candidates).double()
        of_prompt = TensorDict(
            completions=sums["completions"],
            judged=sums["judged"],
            reward=sums["reward"],
            length=lengths.sum(1, keepdim=True),
            batch_size=prompts,
        )
        sums["members"] = of_prompt.apply(lambda total: total * member[::candidates])
    return sums


def in_place_of(refused: TensorDictBase, group: TensorDictBase) -> TensorDictBase:
    """`group`, whose totals now count what was generated for `refused` as well."""
    same_parts([refused["generated"], group["generated"]])
    group["generated"] = group["generated"] + refused["generated"]
    return group


def same_parts(scores: Sequence[TensorDictBase]) -> None:
    """Gives all of them the same `reward_parts`: zeros for those that only others have.

    A TensorDict without any part, as of groups whose judging failed, does not survive all operations.
    """
    for score in scores:
        if score.get("reward_parts", None) is None:
            score["reward_parts"] = TensorDict({}, batch_size=score.batch_size)
    dtypes = {name: part.dtype for score in scores for name, part in score["reward_parts"].items()}
    for score in scores:
        for name in dtypes.keys() - set(score["reward_parts"].keys()):
            score["reward_parts"][name] = torch.zeros(*score.batch_size, 1, dtype=dtypes[name])
