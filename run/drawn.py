"""What a batch says of the engines that drew it: their log-probs beside the learner's, of the present weights alone."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from envs.group import Group, SampledCompletion
from rollout.weights.evidence import Drawn, DrawnRow
from training.batch import Batch

_ROWS, _LONGEST = 4, 1024
"""Rows that are kept of each engine, and tokens of the longest. By them a lost push is told from a wrong one."""


def drawn_tokens(
    batch: Batch, groups: Sequence[Group], log_ratio: Tensor, version: int
) -> Mapping[str, Drawn]:
    """By the engine's name, the tokens in the loss that policy `version` drew.

    groups: of the batch, in its order. log_ratio: float32 [N, R], trainer less engine, of the trainer's `version`.
    """
    assert batch.mask is not None
    own = batch.mask & (batch.policy_version == version)
    whole = (own == batch.tokens.response_mask).all(1).tolist()
    places: dict[str, list[int]] = {}
    rows: dict[str, list[DrawnRow]] = {}
    completions = ((group, one) for group in groups for one in group.completions)
    for place, (group, one) in enumerate(completions):
        places.setdefault(one.engine, []).append(place)
        kept = rows.setdefault(one.engine, [])
        if len(kept) < _ROWS and whole[place] and _can_be_scored(group, one):
            kept.append(_row(group, one, log_ratio[place]))
    return {name: Drawn(log_ratio[rows_of][own[rows_of]], rows[name]) for name, rows_of in places.items()}


def _can_be_scored(group: Group, one: SampledCompletion) -> bool:
    """Engines score the whole distribution at temperature 1, and have the logits of a whole sequence then."""
    sampling = group.sampling
    plain = sampling.temperature == 1 and sampling.top_p == 1 and sampling.top_k == 0
    return plain and not one.sampled and len(group.prompt) + len(one.token_ids) <= _LONGEST


def _row(group: Group, one: SampledCompletion, log_ratio: Tensor) -> DrawnRow:
    engine = torch.tensor(one.log_probs, dtype=torch.float64)
    learner = engine + log_ratio[: len(engine)].double()
    return DrawnRow(group.prompt, one.token_ids, one.log_probs, learner.tolist())
