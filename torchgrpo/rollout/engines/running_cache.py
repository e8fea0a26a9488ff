"""Keys and values of everything that runs: each prompt once for its group, answers without a padded position.

    Band     rows that began in one step, so that their answers are of one length until they end
             prompts [groups, heads, longest prompt, D]     answers [rows, heads, tokens, D]
    RunningCache   all bands, in the order in which their rows stand in the model's batch

A row that ends gives its place to the last one of its band, whose keys and values are moved: nothing else is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from torchgrpo.rollout.engines.partial_attention import attend_partly, merge

_ROOM = 16
"""Positions that an answer's memory begins with; it grows by a quarter."""


_WASTE, _SMALL = 0.25, 512
"""Of the positions of a band's prompts, so many may be padding: as a share of the others, and in any case."""


def alike(lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of these lengths in sets that are padded to their longest without much waste."""
    sets: list[list[int]] = []
    padding = filled = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        longest = lengths[sets[-1][0]] if sets else 0
        padding, filled = padding + longest - lengths[place], filled + lengths[place]
        if not sets or padding > max(_WASTE * filled, _SMALL):
            sets.append([])
            padding, filled = 0, lengths[place]
        sets[-1].append(place)
    return sets


@dataclass(frozen=True)
class Computed:
    """A sequence that went through the model: by layer, keys and values [heads, length, D] each; and the logits
    [vocabulary] after its last token."""

    keys: list[Tensor]
    values: list[Tensor]
    logits: Tensor

    @property
    def length(self) -> int:
        return self.keys[0].shape[1]

    def part(self, begin: int, end: int) -> "Computed":
        """The same without what lies outside."""
        return Computed(
            [each[:, begin:end] for each in self.keys],
            [each[:, begin:end] for each in self.values],
            self.logits,
        )


class Band:
    """Rows of one age.

    Args:
        prompts: of its groups.
        groups: [rows], the prompt of each row.
        longest: tokens that an answer may come to have.
        answers: what each row has already; None for none. All of one length.
    """

    def __init__(
        self,
        prompts: Sequence[Computed],
        groups: Sequence[int],
        longest: int,
        answers: Sequence[Computed] | None = None,
    ) -> None:
        self.lengths = np.array([one.length for one in prompts], dtype=np.int64)
        self.groups = np.array(groups, dtype=np.int64)
        layers = range(len(prompts[0].keys))
        self._prompts = [
            (_stacked([one.keys[i] for one in prompts]), _stacked([one.values[i] for one in prompts]))
            for i in layers
        ]
        # Is added to the scores of prompts, [groups, 1, 1, longest], where not all are as long.
        self._mask: Tensor | None = None
        if (self.lengths != self.lengths.max()).any():
            keys = self._prompts[0][0]
            hidden = torch.from_numpy(np.arange(self.lengths.max()) >= self.lengths[:, None])
            mask = torch.zeros(hidden.shape, dtype=keys.dtype).masked_fill(hidden, -torch.inf)
            self._mask = mask[:, None, None].to(keys.device)
        self.filled = 0 if answers is None else answers[0].length
        self._longest = longest
        self.capacity = self._enough()
        self._answers = [self._empty(*self._prompts[i]) for i in layers]
        if answers is not None:
            for i, (keys, values) in enumerate(self._answers):
                keys[:, :, : self.filled] = torch.stack([one.keys[i] for one in answers])
                values[:, :, : self.filled] = torch.stack([one.values[i] for one in answers])
        self._seat()

    @property
    def rows(self) -> int:
        return len(self.groups)

    @property
    def positions(self) -> np.ndarray:
        """int64 [rows], of the token that comes next."""
        positions: np.ndarray = self.lengths[self.groups] + self.filled
        return positions

    def _enough(self) -> int:
        """Positions for what an answer has and the next ones."""
        return min(self._longest, max(_ROOM, self.filled + 1 + self.filled // 4))

    def _empty(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        shape = (self.rows, keys.shape[1], self.capacity)
        return keys.new_empty(*shape, keys.shape[3]), values.new_empty(*shape, values.shape[3])

    def _seat(self) -> None:
        """Where the queries of each group are, [groups, most of its rows], and where each row is among them."""
        counts = np.bincount(self.groups, minlength=len(self.lengths))
        order = np.argsort(self.groups, kind="stable")
        columns = np.empty_like(order)
        columns[order] = np.arange(len(order)) - (counts.cumsum() - counts)[self.groups[order]]
        seats = np.zeros((len(counts), counts.max()), dtype=np.int64)
        seats[self.groups, columns] = np.arange(self.rows)
        device = self._prompts[0][0].device
        self._seats = torch.from_numpy(seats).to(device)
        self._places = torch.from_numpy(self.groups * seats.shape[1] + columns).to(device)

    def make_room(self) -> None:
        """For one more token of every row."""
        if self.filled < self.capacity:
            return
        self.capacity = self._enough()
        for i, old in enumerate(self._answers):
            self._answers[i] = self._empty(*old)
            for new, before in zip(self._answers[i], old, strict=True):
                new[:, :, : self.filled] = before[: self.rows]

    def put(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """One token of every row: [rows, heads, 1, D]."""
        for store, new in zip(self._answers[layer], (keys, values), strict=True):
            store[: self.rows, :, self.filled] = new[:, :, 0]

    def attend(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """[rows, heads, 1, D]. What the rows of a group see of their prompt is computed together."""
        rows, heads, _, size = query.shape
        keys, values = self._prompts[layer]
        own_keys, own_values = (each[:rows, :, : self.filled + 1] for each in self._answers[layer])
        per_key = heads // keys.shape[1]
        query = query.reshape(rows, keys.shape[1], per_key, size).contiguous()
        own = attend_partly(query, own_keys, own_values, None, scale)
        # [groups, heads of keys, rows * per_key, D]
        shared = query[self._seats].transpose(1, 2).flatten(2, 3)
        seen, weight = attend_partly(shared, keys, values, self._mask, scale)
        by_row = (
            each.unflatten(2, (-1, per_key)).transpose(1, 2).flatten(0, 1)[self._places]
            for each in (seen, weight)
        )
        return merge(own, (next(by_row), next(by_row))).reshape(rows, heads, 1, -1)

    def drop(self, places: Sequence[int]) -> list[int]:
        """Rows that ended leave. Returns which of the rows stands now at each place."""
        ended = set(places)
        kept = self.rows - len(ended)
        order = list(range(kept))
        holes = [place for place in order if place in ended]
        moved = [place for place in range(kept, self.rows) if place not in ended]
        for hole, row in zip(holes, moved, strict=True):
            order[hole] = row
        if holes:
            for pair in self._answers:
                for store in pair:
                    store[holes, :, : self.filled] = store[moved, :, : self.filled]
        self.groups = self.groups[order]
        if kept:
            self._seat()
        return order


def _stacked(states: list[Tensor]) -> Tensor:
    """[count, heads, longest, D] with zeros behind the shorter ones: masked, but a NaN would stay one."""
    longest = max(each.shape[1] for each in states)
    out = states[0].new_zeros(len(states), states[0].shape[0], longest, states[0].shape[2])
    for row, each in zip(out, states, strict=True):
        row[:, : each.shape[1]] = each
    return out


class RunningCache(Cache):
    """What the model's attention writes to and reads from in a step that gives every row one token."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.bands: list[Band] = []
        self._layer = 0

    def begin(self, device: torch.device) -> Tensor:
        """Make room for a step; returns the positions of the new tokens, int64 [rows, 1]."""
        for band in self.bands:
            band.make_room()
        positions = np.concatenate([band.positions for band in self.bands])
        return torch.from_numpy(positions).to(device)[:, None]

    def end(self) -> None:
        """After a step."""
        for band in self.bands:
            band.filled += 1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self._layer, sizes = layer_idx, [band.rows for band in self.bands]
        keys, values = key_states.split(sizes), value_states.split(sizes)
        for band, key, value in zip(self.bands, keys, values, strict=True):
            band.put(layer_idx, key, value)
        return key_states, value_states

    def attend(self, query: Tensor, scale: float) -> Tensor:
        """[rows, heads, 1, D] of the layer that was updated last."""
        parts = query.split([band.rows for band in self.bands])
        outputs = [
            band.attend(self._layer, part, scale) for band, part in zip(self.bands, parts, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
