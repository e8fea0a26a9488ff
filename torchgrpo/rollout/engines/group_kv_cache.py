"""KV cache with one copy of each group's prompt, which also computes the rows' attention.

    RowCohort      rows that started in one step, so that their completions have one length until they end
                   prompts [groups, heads, longest prompt, D]     completions [rows, heads, tokens, D]
    GroupKVCache   all cohorts, in the order of their rows in the model's batch

The last row of a cohort replaces a row that ends; only the keys and values of the replacing row are moved.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from torchgrpo.rollout.engines.shared_prompt_attention import merge_partial_attention, partial_attention

_MIN_CAPACITY = 16
"""Smallest number of positions allocated for a completion; the allocation grows by a quarter."""
_MAX_PADDING_SHARE, _MAX_PADDING = 0.25, 512
"""Padding that a cohort's prompts may have: a share of their positions, or a number of positions if that is more."""


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Groups prompts of similar length into sets that need little padding.

    Returns sets of indices into `lengths`, longest prompts first.
    """
    sets: list[list[int]] = []
    padding = num_positions = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        longest = lengths[sets[-1][0]] if sets else 0
        padding, num_positions = padding + longest - lengths[index], num_positions + lengths[index]
        if not sets or padding > max(_MAX_PADDING_SHARE * num_positions, _MAX_PADDING):
            sets.append([])
            padding, num_positions = 0, lengths[index]
        sets[-1].append(index)
    return sets


@dataclass(frozen=True)
class PrefilledSequence:
    """Keys, values and last logits of a sequence that went through the model.

    keys, values: by layer, [heads, length, D] each. logits: after the last token, [vocabulary].
    """

    keys: list[Tensor]
    values: list[Tensor]
    logits: Tensor

    @property
    def length(self) -> int:
        return self.keys[0].shape[1]

    def slice_positions(self, begin: int, end: int) -> "PrefilledSequence":
        """Returns the sequence restricted to positions `begin` to `end`."""
        return PrefilledSequence(
            [each[:, begin:end] for each in self.keys], [each[:, begin:end] for each in self.values], self.logits
        )


class RowCohort:
    """Rows of the batch whose completions have the same number of tokens.

    Args:
        prompts: one for each group.
        groups: [rows], index of each row's prompt.
        longest: largest number of tokens of a completion.
        completions: tokens that each row has already, all of one length; None if the rows start.
    """

    def __init__(
        self,
        prompts: Sequence[PrefilledSequence],
        groups: Sequence[int],
        longest: int,
        completions: Sequence[PrefilledSequence] | None = None,
    ) -> None:
        self.lengths = np.array([one.length for one in prompts], dtype=np.int64)
        self.groups = np.array(groups, dtype=np.int64)
        layers = range(len(prompts[0].keys))
        self._prompts = [
            (_stack_padded([one.keys[i] for one in prompts]), _stack_padded([one.values[i] for one in prompts]))
            for i in layers
        ]
        # Added to the scores of prompts, [groups, 1, 1, longest]; None if all prompts have one length.
        self._mask: Tensor | None = None
        if (self.lengths != self.lengths.max()).any():
            keys = self._prompts[0][0]
            hidden = torch.from_numpy(np.arange(self.lengths.max()) >= self.lengths[:, None])
            mask = torch.zeros(hidden.shape, dtype=keys.dtype).masked_fill(hidden, -torch.inf)
            self._mask = mask[:, None, None].to(keys.device)
        self.num_tokens = 0 if completions is None else completions[0].length
        self._max_tokens = longest
        self.capacity = self._needed_capacity()
        self._completions = [self._empty(*self._prompts[i]) for i in layers]
        if completions is not None:
            for i, (keys, values) in enumerate(self._completions):
                keys[:, :, : self.num_tokens] = torch.stack([one.keys[i] for one in completions])
                values[:, :, : self.num_tokens] = torch.stack([one.values[i] for one in completions])
        self._index_queries()

    @property
    def rows(self) -> int:
        return len(self.groups)

    @property
    def positions(self) -> np.ndarray:
        """Positions of the next token of each row, int64 [rows]."""
        positions: np.ndarray = self.lengths[self.groups] + self.num_tokens
        return positions

    def _needed_capacity(self) -> int:
        """Returns the number of positions to allocate for the current tokens and the next ones."""
        return min(self._max_tokens, max(_MIN_CAPACITY, self.num_tokens + 1 + self.num_tokens // 4))

    def _empty(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        shape = (self.rows, keys.shape[1], self.capacity)
        return keys.new_empty(*shape, keys.shape[3]), values.new_empty(*shape, values.shape[3])

    def _index_queries(self) -> None:
        """Builds the index of each group's queries and its inverse.

        `_query_index`: rows of each group, [groups, largest number of rows]. `_row_index`: position of each row in it.
        """
        counts = np.bincount(self.groups, minlength=len(self.lengths))
        order = np.argsort(self.groups, kind="stable")
        columns = np.empty_like(order)
        columns[order] = np.arange(len(order)) - (counts.cumsum() - counts)[self.groups[order]]
        query_index = np.zeros((len(counts), counts.max()), dtype=np.int64)
        query_index[self.groups, columns] = np.arange(self.rows)
        device = self._prompts[0][0].device
        self._query_index = torch.from_numpy(query_index).to(device)
        self._row_index = torch.from_numpy(self.groups * query_index.shape[1] + columns).to(device)

    def make_room(self) -> None:
        """Makes room for one more token of every row."""
        if self.num_tokens < self.capacity:
            return
        self.capacity = self._needed_capacity()
        for i, old in enumerate(self._completions):
            self._completions[i] = self._empty(*old)
            for new, before in zip(self._completions[i], old, strict=True):
                new[:, :, : self.num_tokens] = before[: self.rows]

    def append_token(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Stores one token of every row; keys, values: [rows, heads, 1, D]."""
        for store, new in zip(self._completions[layer], (keys, values), strict=True):
            store[: self.rows, :, self.num_tokens] = new[:, :, 0]

    def attend(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Computes attention of each row to its prompt and completion, [rows, heads, 1, D].

        Attention of a group's rows to their prompt is one computation.
        """
        rows, heads, _, size = query.shape
        keys, values = self._prompts[layer]
        own_keys, own_values = (each[:rows, :, : self.num_tokens + 1] for each in self._completions[layer])
        per_key = heads // keys.shape[1]
        query = query.reshape(rows, keys.shape[1], per_key, size).contiguous()
        completion_part = partial_attention(query, own_keys, own_values, None, scale)
        # [groups, heads of keys, rows * per_key, D]
        shared = query[self._query_index].transpose(1, 2).flatten(2, 3)
        prompt_output, weight = partial_attention(shared, keys, values, self._mask, scale)
        by_row = (
            each.unflatten(2, (-1, per_key)).transpose(1, 2).flatten(0, 1)[self._row_index]
            for each in (prompt_output, weight)
        )
        return merge_partial_attention(completion_part, (next(by_row), next(by_row))).reshape(rows, heads, 1, -1)

    def drop_rows(self, row_indices: Sequence[int]) -> list[int]:
        """Drops finished rows; returns the old index of each remaining row."""
        finished = set(row_indices)
        num_kept = self.rows - len(finished)
        order = list(range(num_kept))
        holes = [index for index in order if index in finished]
        moved = [index for index in range(num_kept, self.rows) if index not in finished]
        for hole, row in zip(holes, moved, strict=True):
            order[hole] = row
        if holes:
            for pair in self._completions:
                for store in pair:
                    store[holes, :, : self.num_tokens] = store[moved, :, : self.num_tokens]
        self.groups = self.groups[order]
        if num_kept:
            self._index_queries()
        return order


def _stack_padded(states: list[Tensor]) -> Tensor:
    """Stacks states to [count, heads, longest, D], with zeros behind the shorter states.

    The padding is masked, but a NaN in uninitialized memory would survive the mask.
    """
    longest = max(each.shape[1] for each in states)
    out = states[0].new_zeros(len(states), states[0].shape[0], longest, states[0].shape[2])
    for row, each in zip(out, states, strict=True):
        row[:, : each.shape[1]] = each
    return out


class GroupKVCache(Cache):
    """Cache of the model's attention, for steps that decode one token per row."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.cohorts: list[RowCohort] = []
        self._layer = 0

    def begin_step(self, device: torch.device) -> Tensor:
        """Makes room for a step; returns the positions of the new tokens, int64 [rows, 1]."""
        for cohort in self.cohorts:
            cohort.make_room()
        positions = np.concatenate([cohort.positions for cohort in self.cohorts])
        return torch.from_numpy(positions).to(device)[:, None]

    def end_step(self) -> None:
        """Counts the tokens that a step stored."""
        for cohort in self.cohorts:
            cohort.num_tokens += 1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self._layer, sizes = layer_idx, [cohort.rows for cohort in self.cohorts]
        keys, values = key_states.split(sizes), value_states.split(sizes)
        for cohort, key, value in zip(self.cohorts, keys, values, strict=True):
            cohort.append_token(layer_idx, key, value)
        return key_states, value_states

    def attend(self, query: Tensor, scale: float) -> Tensor:
        """Computes attention, [rows, heads, 1, D], in the layer that was updated last."""
        queries = query.split([cohort.rows for cohort in self.cohorts])
        outputs = [cohort.attend(self._layer, rows, scale) for cohort, rows in zip(self.cohorts, queries, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
