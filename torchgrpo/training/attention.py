"""Attention of a packed sequence: a prompt sees itself, a response its prompt and itself, each causally.

The model's own code stays as it is. Its attention implementation is set once to the function registered here, and the
segments of a packed sequence reach that as a keyword of the model's forward; a forward without them is the plain
attention of transformers. On a GPU one kernel (flex attention) skips what no token may see. Elsewhere rows of like
length go through scaled dot-product attention together, and no other part of the model sees their padding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from config.schema.errors import RunError
from torchgrpo.plan.model_shape import plain_attention

NAME = "by_segments"
WASTE = 0.25
"""Elements of attention that a call may compute for its padding, as a share of those that it is for."""
SMALL = 1 << 13
"""Elements of attention that cost no more than one more call would."""
BLOCKED = ("cuda",)
"""Devices of which flex attention has a kernel with a backward pass."""
BLOCK = 128
"""Positions of a block of flex attention: one that no token of another may see is left out."""
HARMLESS = frozenset({"position_ids", "cache_position", "use_cache"})
"""Keywords of an attention that do not change which tokens it sees; no other may be set."""


def can_pack(model: PreTrainedModel) -> bool:
    """Whether the model can take packed sequences; another takes whole rows."""
    return plain_attention(model.config.to_dict())


class Segments:
    """Where prompts and responses lie in a packed sequence. int64, P prompts and N responses, in their order.

    No dataclass: FSDP2 would hand a copy of it to every layer, and each would plan its calls anew.

    prompt_starts, prompt_lengths: [P]. starts, lengths: [N], of the responses; a length may be 0.
    groups: [N], the prompt of each. layers: of a model that have attended by these.
    """

    def __init__(
        self, prompt_starts: Tensor, prompt_lengths: Tensor, starts: Tensor, lengths: Tensor, groups: Tensor
    ) -> None:
        self.prompt_starts = prompt_starts
        self.prompt_lengths = prompt_lengths
        self.starts = starts
        self.lengths = lengths
        self.groups = groups
        self.layers = 0
        self._prepared: dict[torch.device, Any] = {}

    @property
    def total(self) -> int:
        """Positions of the packed sequence."""
        return int(self.prompt_lengths.sum() + self.lengths.sum())

    def calls(self, device: torch.device) -> "Calls":
        """What is computed on `device`, made once for all layers."""
        if device not in self._prepared:
            self._prepared[device] = Calls.of(self, device)
        return self._prepared[device]  # type: ignore[no-any-return]

    def block_mask(self, device: torch.device) -> BlockMask:
        """The same for flex attention."""
        if device not in self._prepared:
            self._prepared[device] = _block_mask(self, device)
        return self._prepared[device]  # type: ignore[no-any-return]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: Segments | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function. query: [1, heads, L, D]; key, value: [1, heads of keys, L, D].

    Returns [1, L, heads, D]. Without `segments` it is transformers' own scaled dot-product attention.

    Raises:
        RunError: a packed sequence in an attention with more than queries, keys and values.
    """
    if segments is None:
        plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return plain(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **others
        )
    unknown = [name for name, value in others.items() if value is not None and name not in HARMLESS]
    if unknown:
        raise RunError(
            f"{type(module).__name__} attends with {', '.join(unknown)}, which a packed sequence does not have: set "
            "train.packing=false"
        )
    return _attend_by_segments(query, key, value, segments, scaling, dropout), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_by_segments(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, dropout: float
) -> Tensor:
    """[1, L, heads, D]. A compiled layer is cut here: what is called depends on where the segments lie."""
    segments.layers += 1
    if query.device.type in BLOCKED and dropout == 0.0:
        return _attend_in_blocks(query, key, value, segments, scaling)
    return segments.calls(query.device).attend(query, key, value, scaling, dropout)


def _attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None
) -> Tensor:
    """[1, L, heads, D] by flex attention, which takes operands of one dtype and no part in autocast."""
    device = query.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else value.dtype
    kernel = _compiled() if device.type == "cuda" else flex_attention
    out: Tensor = kernel(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        block_mask=segments.block_mask(device),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@dataclass(frozen=True)
class Call:
    """Some rows of one call of scaled dot-product attention.

    queries: int64 [n, Q] and keys: int64 [n, K], places in the packed sequence; a row shorter than others goes on
    with its last place. mask: bool [Q, K]; None where queries are keys, and causal.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float
    ) -> Tensor:
        """[n * Q, heads, D] from query [n * Q, heads, D] and key, value [n * K, heads of keys, D]."""
        out = scaled_dot_product_attention(
            _rows(query, self.queries),
            _rows(key, self.keys),
            _rows(value, self.keys),
            attn_mask=self.mask,
            dropout_p=dropout,
            is_causal=self.mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        flat: Tensor = out.transpose(1, 2).flatten(0, 1)
        return flat


def _rows(values: Tensor, places: Tensor) -> Tensor:
    """[n, heads, W, D] from [n * W, heads, D] and [n, W]."""
    rows: Tensor = values.unflatten(0, places.shape).transpose(1, 2)
    return rows


@dataclass(frozen=True)
class Calls:
    """Every call, and where in their outputs, one after the other, that of each position [L] is.

    queries, keys: int64, those of all calls, one after the other, so that a layer gathers once.
    """

    calls: tuple[Call, ...]
    queries: Tensor
    keys: Tensor
    places: Tensor

    @classmethod
    def of(cls, segments: Segments, device: torch.device) -> "Calls":
        planned = list(_planned(segments, device))
        made = tuple(call for call, _ in planned)
        begins, given = 0, []
        for call, (rows, columns, positions) in planned:
            given.append(np.stack([positions, begins + rows * call.queries.shape[1] + columns]))
            begins += call.queries.numel()
        positions, outputs = np.concatenate(given, axis=1)
        places = np.empty_like(outputs)
        places[positions] = outputs
        queries = torch.cat([call.queries.flatten() for call in made])
        keys = torch.cat([call.keys.flatten() for call in made])
        return cls(made, queries, keys, torch.from_numpy(places).to(device))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float
    ) -> Tensor:
        """As `attend`. In float32 for narrower operands: on a CPU the backward pass is up to three times as fast."""
        dtype = query.dtype
        query, key, value = (
            each[0].transpose(0, 1).to(torch.promote_types(dtype, torch.float32))
            for each in (query, key, value)
        )
        of_queries = [call.queries.numel() for call in self.calls]
        of_keys = [call.keys.numel() for call in self.calls]
        queries = query.index_select(0, self.queries).split(of_queries)
        keys, values = (each.index_select(0, self.keys).split(of_keys) for each in (key, value))
        with torch.autocast(query.device.type, enabled=False):
            outputs = [
                call.attend(one, seen, carried, scaling, dropout)
                for call, one, seen, carried in zip(self.calls, queries, keys, values, strict=True)
            ]
        return torch.cat(outputs).index_select(0, self.places)[None].to(dtype)


Given = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Outputs that a call is for: its rows, the columns of its queries, and the positions that these are, [count] each."""


def _planned(segments: Segments, device: torch.device) -> Iterator[tuple[Call, Given]]:
    """Calls that together give every position once: prompts alone, responses behind the keys of theirs."""
    spans = (segments.prompt_starts, segments.prompt_lengths, segments.starts, segments.lengths)
    prompts, prompt_lengths, starts, lengths = (each.cpu().numpy() for each in spans)
    groups = segments.groups.cpu().numpy()
    for chosen in _alike(prompt_lengths):
        places, given = _row_places(prompts[chosen], prompt_lengths[chosen])
        kept = torch.from_numpy(places).to(device)
        yield Call(kept, kept, None), given
    continued = lengths > 0
    for prompt_length in np.unique(prompt_lengths[groups[continued]]):
        rows = np.flatnonzero(continued & (prompt_lengths[groups] == prompt_length))
        seen_length = int(prompt_length)
        for chosen in _alike(lengths[rows], seen_length):
            some = rows[chosen]
            queries, given = _row_places(starts[some], lengths[some])
            seen = prompts[groups[some], None] + np.arange(seen_length)
            mask = torch.ones(queries.shape[1], seen_length + queries.shape[1], dtype=torch.bool)
            keys = torch.from_numpy(np.concatenate([seen, queries], axis=1)).to(device)
            mask = mask.tril(seen_length).to(device)
            yield Call(torch.from_numpy(queries).to(device), keys, mask), given


def _row_places(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, Given]:
    """int64 [n, widest]: the positions of each span; the last one goes on. And which of them are given."""
    columns = np.arange(lengths.max())
    places = starts[:, None] + np.minimum(columns, lengths[:, None] - 1)
    rows, of = np.nonzero(columns < lengths[:, None])
    return places, (rows, of, places[rows, of])


def _alike(widths: np.ndarray, prompt_length: int = 0) -> Iterator[np.ndarray]:
    """Rows in sets of like width, the widest first, each padded to its widest without much waste."""
    left = np.argsort(-widths, kind="stable")
    while len(left):
        sizes = widths[left] * (prompt_length + widths[left])
        needed = sizes.cumsum()
        wasted = sizes[0] * np.arange(1, len(left) + 1) - needed
        fits = wasted <= np.maximum(WASTE * needed, SMALL)
        count = len(left) if fits.all() else int(fits.argmin())
        yield left[:count]
        left = left[count:]


def _block_mask(segments: Segments, device: torch.device) -> BlockMask:
    """For flex attention over the packed sequence. PyTorch's `create_block_mask` gives the same, but looks at every
    pair of positions: on a GPU it has to be compiled, which takes seconds, and again for other lengths."""
    length = segments.total
    group, row = torch.empty(length, dtype=torch.int64), torch.full((length,), -1)
    prompts = _spans(segments.prompt_starts, segments.prompt_lengths)
    responses = _spans(segments.starts, segments.lengths)
    numbers = torch.arange(len(segments.prompt_starts))
    group[prompts] = numbers.repeat_interleave(segments.prompt_lengths.cpu())
    group[responses] = segments.groups.cpu().repeat_interleave(segments.lengths.cpu())
    row[responses] = torch.arange(len(segments.starts)).repeat_interleave(segments.lengths.cpu())
    group, row = group.to(device), row.to(device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = (group[query] == group[key]) & (query >= key)
        return same & ((row[key] == -1) | (row[query] == row[key]))

    blocks = -(-length // BLOCK)
    prompt_overlaps = _overlaps(segments.prompt_starts, segments.prompt_lengths, blocks)
    response_overlaps = _overlaps(segments.starts, segments.lengths, blocks)
    own = torch.cat([prompt_overlaps, response_overlaps])
    # How many keys of a block of `BLOCK` positions the queries of another see together, float64 [B, B].
    pairs = (own.T @ own).tril(-1) + torch.diag((own * (own + 1) / 2).sum(0))
    pairs = pairs + response_overlaps.T @ prompt_overlaps[segments.groups.cpu()]
    whole = pairs == BLOCK**2
    some_seen, all_seen = _in_order((pairs > 0) & ~whole), _in_order(whole)
    mask = BlockMask.from_kv_blocks(
        *some_seen, *all_seen, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length)
    )
    return mask.to(device)


def _overlaps(starts: Tensor, lengths: Tensor, blocks: int) -> Tensor:
    """float64 [spans, blocks]: positions of each span in each block."""
    starts, lengths = starts.cpu()[:, None], lengths.cpu()[:, None]
    begins = torch.arange(blocks) * BLOCK
    ends = torch.minimum(starts + lengths, begins + BLOCK)
    return (ends - torch.maximum(starts, begins)).clamp(min=0).double()


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """int32 [1, 1, B] and [1, 1, B, B]: how many blocks of each row are set, and which ones, these first."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int()[None, None], order.int()[None, None]


def _spans(starts: Tensor, lengths: Tensor) -> Tensor:
    """int64 [sum of lengths]: the positions of all spans, one span after the other."""
    starts, lengths = starts.cpu(), lengths.cpu()
    begins = starts - (lengths.cumsum(0) - lengths)
    return begins.repeat_interleave(lengths) + torch.arange(int(lengths.sum()))


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
