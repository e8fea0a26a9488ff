"""From values per token to one number; microbatches and ranks add up to the global batch exactly.

Every aggregation is a weight per row: loss = sum_i w_i sum_t l_it. The weights need a few totals of the
global batch; given those, a microbatch's part is a plain sum, whatever the split.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from config.schema.policy import PolicyConfig


@dataclass(frozen=True)
class BatchTotals:
    """What the aggregations need to know of the global batch.

    tokens: positions in the loss. sequences: rows. nonempty: rows with a token in the loss. positions: rows
    times width, padding included. width: R. passes: passes of `pass_size` rows. pass_tokens: [N], the token
    count of each row's pass, for the rows at hand (set only for `aggregation=pass_mean`). environment_tokens: those
    that the environment wrote.
    """

    tokens: float
    sequences: float
    nonempty: float
    positions: float
    width: float
    passes: float
    pass_tokens: Tensor | None = None
    environment_tokens: float = 0

    @classmethod
    def of(cls, policy: PolicyConfig, mask: Tensor, environment: Tensor | None = None) -> "BatchTotals":
        """Totals of the rows of `mask`, [N, R] bool: the positions in the loss. environment: bool [N, R], or None."""
        rows, width = mask.shape
        lengths = mask.sum(dim=1)
        counts = torch.stack([lengths.sum(), (lengths > 0).sum()]).tolist()
        pass_tokens, passes = None, 1
        if "pass_mean" in (policy.aggregation, policy.kl_aggregation):
            size = policy.pass_size or max(rows, 1)
            pass_of_row = torch.arange(rows, device=mask.device) // size
            passes = -(-rows // size)
            per_pass = lengths.new_zeros(passes).index_add_(0, pass_of_row, lengths)
            pass_tokens = per_pass[pass_of_row]
        return cls(
            tokens=counts[0],
            sequences=rows,
            nonempty=counts[1],
            positions=rows * width,
            width=width,
            passes=passes,
            pass_tokens=pass_tokens,
            environment_tokens=0 if environment is None else int(environment.sum()),
        )

    def select(self, rows: Tensor | slice) -> "BatchTotals":
        """The same totals for a microbatch: `rows` of the batch that `of` saw."""
        if self.pass_tokens is None:
            return self
        return replace(self, pass_tokens=self.pass_tokens[rows])


def _lengths(mask: Tensor) -> Tensor:
    return mask.sum(dim=1, keepdim=True)


def _sequences(policy: PolicyConfig, totals: BatchTotals) -> float:
    return max(totals.sequences if policy.count_empty else totals.nonempty, 1)


def _constant_length(policy: PolicyConfig, totals: BatchTotals) -> float:
    return policy.constant_length or max(totals.width, 1)


def _pass_mean(policy: PolicyConfig, mask: Tensor, totals: BatchTotals) -> Tensor:
    if totals.pass_tokens is None or totals.pass_tokens.shape[0] != mask.shape[0]:
        raise ValueError(
            "aggregation=pass_mean needs BatchTotals.pass_tokens of the rows at hand: "
            "take BatchTotals.of(policy, mask of the batch).select(rows)"
        )
    tokens = totals.pass_tokens.to(mask.device).clamp_min(1)[:, None].double()
    return 1.0 / (tokens * max(totals.passes, 1))


def _uniform(weight: float, mask: Tensor) -> Tensor:
    return torch.full((mask.shape[0], 1), weight, dtype=torch.float64, device=mask.device)


ROW_WEIGHTS: dict[str, Callable[[PolicyConfig, Tensor, BatchTotals], Tensor]] = {
    "token_mean": lambda policy, mask, totals: _uniform(1 / max(totals.tokens, 1), mask),
    "sequence_mean": lambda policy, mask, totals: (
        1.0 / ((_lengths(mask).clamp_min(1).double() + policy.length_epsilon) * _sequences(policy, totals))
    ),
    "sequence_sum": lambda policy, mask, totals: _uniform(1 / _sequences(policy, totals), mask),
    "constant_length": lambda policy, mask, totals: _uniform(
        1 / (_sequences(policy, totals) * _constant_length(policy, totals)), mask
    ),
    "constant_length_sum": lambda policy, mask, totals: _uniform(1 / _constant_length(policy, totals), mask),
    "pass_mean": _pass_mean,
    "length_weighted": lambda policy, mask, totals: _lengths(mask).double() / max(totals.positions, 1),
    "padded_mean": lambda policy, mask, totals: _uniform(1 / max(totals.positions, 1), mask),
    "token_sum": lambda policy, mask, totals: _uniform(1.0, mask),
}


def aggregate(policy: PolicyConfig, how: str, values: Tensor, mask: Tensor, totals: BatchTotals) -> Tensor:
    """This microbatch's part of the aggregated value, a scalar.

    values: [N, R], zero wherever they are not to count. mask: [N, R] bool, for lengths.
    """
    weight = ROW_WEIGHTS[how](policy, mask, totals).to(values.dtype)
    return (weight * values.sum(dim=1, keepdim=True)).sum()
