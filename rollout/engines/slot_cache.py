"""A key/value cache whose rows have lengths of their own, so that sequences can come and go at any step."""

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [rows, heads, capacity, head_dim]; a decode step writes one token per row.

    `positions` [rows] int64 says where: it is shared by all layers and set by `SlotCache.at`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.positions = torch.zeros(0, dtype=torch.int64)
        self.rows = torch.zeros(0, dtype=torch.int64)
        self.width = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise RuntimeError("a slot is filled by SlotCache.admit before it is decoded")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None
        self.keys[self.rows, :, self.positions] = key_states[:, :, 0]
        self.values[self.rows, :, self.positions] = value_states[:, :, 0]
        return self.keys[:, :, : self.width], self.values[:, :, : self.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.width, 0

    def get_seq_length(self) -> int:
        return self.width

    def get_max_length(self) -> int:
        return -1


def _stretch(states: torch.Tensor | None, capacity: int) -> torch.Tensor:
    """[rows, heads, length, head_dim] with zeros up to `capacity` positions."""
    assert states is not None
    return torch.nn.functional.pad(states, (0, 0, 0, capacity - states.shape[2]))


def _spread(states: torch.Tensor, source: torch.Tensor, capacity: int) -> torch.Tensor:
    """Rows `source` of `states` [prompts, heads, length, head_dim], with zeros up to `capacity` positions.

    Zeros, not whatever memory holds: the attention multiplies masked values by 0, and a NaN would stay one.
    """
    _, heads, length, head_dim = states.shape
    spread = states.new_empty(len(source), heads, capacity, head_dim)
    torch.index_select(states, 0, source, out=spread[:, :, :length])
    spread[:, :, length:] = 0
    return spread


class SlotCache(Cache):
    """All layers of `SlotLayer`, with the three moves that continuous batching needs: admit, at, keep.

    Memory follows the rows: `capacity` positions, a quarter more than they fill when they come to need more, and
    never more than the `longest` that a row may reach.
    """

    def __init__(self, num_layers: int) -> None:
        self.slots = [SlotLayer() for _ in range(num_layers)]
        super().__init__(layers=list(self.slots))
        self.capacity = self.longest = 0

    def admit(
        self, prefilled: Cache, source: torch.Tensor, longest: int, free: torch.Tensor | None = None
    ) -> None:
        """A row for every entry of `source`, the index of its prompt in `prefilled`.

        longest: positions that the longest of the new rows may reach.
        free: rows that nobody needs any more; the first new ones take their places, the others are appended.
        """
        reused = 0 if free is None else len(free)
        self.longest = max(self.longest, longest)
        self._make_room(prefilled.get_seq_length())
        for layer, filled in zip(self.slots, prefilled.layers, strict=True):
            assert isinstance(filled, DynamicLayer) and filled.keys is not None and filled.values is not None
            if reused < len(source):
                self._append(layer, filled, source[reused:])
            if reused:
                assert layer.keys is not None and layer.values is not None
                length = filled.keys.shape[2]
                layer.keys[free, :, :length] = filled.keys.index_select(0, source[:reused])
                layer.values[free, :, :length] = filled.values.index_select(0, source[:reused])

    def _append(self, layer: SlotLayer, filled: DynamicLayer, source: torch.Tensor) -> None:
        assert filled.keys is not None and filled.values is not None
        keys = _spread(filled.keys, source, self.capacity)
        values = _spread(filled.values, source, self.capacity)
        if layer.keys is not None and layer.values is not None and layer.keys.shape[0]:
            keys, values = torch.cat([layer.keys, keys]), torch.cat([layer.values, values])
        layer.keys, layer.values, layer.is_initialized = keys, values, True

    def _make_room(self, width: int) -> None:
        """For `width` positions and some more, so that rows are copied to larger memory only now and then."""
        if width <= self.capacity:
            return
        self.capacity = min(self.longest, width + width // 4)
        for layer in self.slots:
            if layer.is_initialized:
                layer.keys = _stretch(layer.keys, self.capacity)
                layer.values = _stretch(layer.values, self.capacity)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The next forward writes row i at `positions[i]`; returns its mask [rows, 1, 1, width] bool."""
        width = int(positions.max()) + 1
        self._make_room(width)
        rows = torch.arange(len(positions), device=positions.device)
        for layer in self.slots:
            layer.positions, layer.rows, layer.width = positions, rows, width
        return (torch.arange(width, device=positions.device) <= positions[:, None])[:, None, None]

    def keep(self, rows: torch.Tensor) -> None:
        """Drop every row that `rows` (int64 indices) does not name."""
        for layer in self.slots:
            assert layer.keys is not None and layer.values is not None
            layer.keys, layer.values = layer.keys.index_select(0, rows), layer.values.index_select(0, rows)
        if not len(rows):
            self.capacity = self.longest = 0
