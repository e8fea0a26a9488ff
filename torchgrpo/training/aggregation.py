"""Aggregates a microbatch's token values to its share of a loss term, by batch totals.

Each aggregation is a weight per row: loss = sum_i w_i sum_t l_it. The weights depend on a few totals of the
global batch. With these totals, the share of a microbatch is a plain sum, whatever the split. Totals count completions,
so a completion has the same weight in one token sequence (row) as in several.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from config.schema.errors import ConfigError
from config.schema.policy import PolicyConfig
from torchgrpo.batches.batch import Batch, environment_token_mask
from torchgrpo.batches.episodes import EpisodeRows


@dataclass(frozen=True)
class BatchTotals:
    """Totals of the global batch that the aggregation weights depend on.

    tokens: positions in the loss. sequences: completions. nonempty: completions with a token in the loss. positions:
    completions times width, padding included. width: R, or the length of the longest completion where completions have
    several rows. passes: number of passes of `pass_size` completions. pass_tokens: [N], token count of the pass of each
    of these rows (set only for `aggregation=pass_mean`). episode_tokens: [N], tokens in the loss of the completion of
    each of these rows; None: each row is a completion. environment_tokens: tokens of the environment.
    """

    tokens: float
    sequences: float
    nonempty: float
    positions: float
    width: float
    passes: float
    pass_tokens: Tensor | None = None
    episode_tokens: Tensor | None = None
    environment_tokens: float = 0

    @classmethod
    def from_batch(cls, policy: PolicyConfig, batch: Batch) -> "BatchTotals":
        """Computes the totals of a batch with a mask."""
        assert batch.mask is not None
        episodes = batch.episode_rows
        return cls.from_mask(policy, batch.mask, environment_token_mask(batch.tokens, batch.mask, episodes), episodes)

    @classmethod
    def from_mask(
        cls,
        policy: PolicyConfig,
        mask: Tensor,
        environment: Tensor | None = None,
        episodes: EpisodeRows | None = None,
    ) -> "BatchTotals":
        """Computes the totals of a batch.

        mask: bool [N, R], the positions in the loss. environment: bool [N, R], environment tokens, or None. episodes:
        rows of each completion; None: each row is a completion.

        Raises:
            ConfigError: completions have several rows, and padding is included.
        """
        rows, width = mask.shape
        index, lengths, episode_tokens = torch.arange(rows, device=mask.device), mask.sum(dim=1), None
        if episodes is not None:
            if policy.include_padding:
                raise ConfigError(INCLUDED_PADDING)
            episode_tokens = episodes.sum(lengths[:, None])[:, 0]
            index, lengths = episodes.index, episode_tokens[episodes.is_first]
            width = int(episodes.lengths.max()) if rows else 0
        completions = len(lengths)
        counts = torch.stack([lengths.sum(), (lengths > 0).sum()]).tolist()
        pass_tokens, passes = None, 1
        if "pass_mean" in (policy.aggregation, policy.kl_aggregation):
            size = policy.pass_size or max(completions, 1)
            pass_of_completion = torch.arange(completions, device=mask.device) // size
            passes = -(-completions // size)
            per_pass = lengths.new_zeros(passes).index_add_(0, pass_of_completion, lengths)
            pass_tokens = per_pass[pass_of_completion][index]
        return cls(
            tokens=counts[0],
            sequences=completions,
            nonempty=counts[1],
            positions=completions * width,
            width=width,
            passes=passes,
            pass_tokens=pass_tokens,
            episode_tokens=episode_tokens,
            environment_tokens=0 if environment is None else int(environment.sum()),
        )

    def select(self, rows: Tensor | slice) -> "BatchTotals":
        """Returns the totals for a microbatch: `rows` of the batch of `from_mask`."""
        if self.pass_tokens is None and self.episode_tokens is None:
            return self
        pass_tokens, episode_tokens = (
            None if values is None else values[rows] for values in (self.pass_tokens, self.episode_tokens)
        )
        return replace(self, pass_tokens=pass_tokens, episode_tokens=episode_tokens)


INCLUDED_PADDING = (
    "policy.include_padding=true: this batch has completions of several token sequences, and their padding is not that "
    "of a single sequence; set policy.include_padding=false, or use a chat template or environment that keeps earlier "
    "messages"
)


def _lengths(mask: Tensor, totals: BatchTotals) -> Tensor:
    """Returns the number of loss tokens of each row's completion, [N, 1]."""
    if totals.episode_tokens is None:
        return mask.sum(dim=1, keepdim=True)
    return totals.episode_tokens.to(mask.device)[:, None]


def _sequence_count(policy: PolicyConfig, totals: BatchTotals) -> float:
    """Returns the number of completions to divide by."""
    return max(totals.sequences if policy.count_empty else totals.nonempty, 1)


def _constant_length(policy: PolicyConfig, totals: BatchTotals) -> float:
    """Returns the constant length to divide by."""
    return policy.constant_length or max(totals.width, 1)


def _pass_mean(policy: PolicyConfig, mask: Tensor, totals: BatchTotals) -> Tensor:
    """Computes row weights [N, 1] of the mean over passes of their token means."""
    if totals.pass_tokens is None or totals.pass_tokens.shape[0] != mask.shape[0]:
        raise ValueError(
            "aggregation=pass_mean needs BatchTotals.pass_tokens of these rows: "
            "take BatchTotals.from_mask(policy, mask of the batch).select(rows)"
        )
    tokens = totals.pass_tokens.to(mask.device).clamp_min(1)[:, None].double()
    return 1.0 / (tokens * max(totals.passes, 1))


def _uniform_weights(weight: float, mask: Tensor) -> Tensor:
    """Returns the same weight for each row, [N, 1]."""
    return torch.full((mask.shape[0], 1), weight, dtype=torch.float64, device=mask.device)


ROW_WEIGHTS: dict[str, Callable[[PolicyConfig, Tensor, BatchTotals], Tensor]] = {
    "token_mean": lambda policy, mask, totals: _uniform_weights(1 / max(totals.tokens, 1), mask),
    "sequence_mean": lambda policy, mask, totals: (
        1.0 / ((_lengths(mask, totals).clamp_min(1).double() + policy.length_epsilon) * _sequence_count(policy, totals))
    ),
    "sequence_sum": lambda policy, mask, totals: _uniform_weights(1 / _sequence_count(policy, totals), mask),
    "constant_length": lambda policy, mask, totals: _uniform_weights(
        1 / (_sequence_count(policy, totals) * _constant_length(policy, totals)), mask
    ),
    "constant_length_sum": lambda policy, mask, totals: _uniform_weights(1 / _constant_length(policy, totals), mask),
    "pass_mean": _pass_mean,
    "length_weighted": lambda policy, mask, totals: _lengths(mask, totals).double() / max(totals.positions, 1),
    "padded_mean": lambda policy, mask, totals: _uniform_weights(1 / max(totals.positions, 1), mask),
    "token_sum": lambda policy, mask, totals: _uniform_weights(1.0, mask),
}


def aggregate(policy: PolicyConfig, aggregation: str, values: Tensor, mask: Tensor, totals: BatchTotals) -> Tensor:
    """Computes the share of a microbatch in the aggregated value, a scalar.

    aggregation: a key of `ROW_WEIGHTS`. values: [N, R], zero at positions that do not count. mask: bool [N, R],
    for lengths.
    """
    weight = ROW_WEIGHTS[aggregation](policy, mask, totals).to(values.dtype)
    return (weight * values.sum(dim=1, keepdim=True)).sum()
