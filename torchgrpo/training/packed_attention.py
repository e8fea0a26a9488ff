"""Attention function for transformers in which packed responses see only their prompt and themselves.

A prompt attends to itself alone; a response attends to its prompt and to itself. The code of the model does not
change: its attention implementation is set once to the function `attend` registered here. The segments of a
packed sequence reach `attend` as a keyword of the model's forward pass; without segments, `attend` is the plain
attention of transformers. On a GPU a single kernel (flex attention) skips blocks that no token may attend to; a
compiled layer contains it, with the tensors of the block mask as inputs.
On other devices, rows of similar length go through scaled dot-product attention together, and no other module
of the model sees their padding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from config.schema.errors import RunError
from torchgrpo.plan.model_shape import plain_attention
from torchgrpo.training.block_mask import BlockMaskTensors, block_mask_tensors, make_block_mask
from torchgrpo.training.context_parallel import ContextGroup
from torchgrpo.training.device_copy import copy_to_device

ATTENTION_NAME = "by_segments"
PADDING_SHARE = 0.25
"""Largest share of padding in the attention elements of a call, relative to the elements needed."""
SMALL_CALL = 1 << 13
"""Attention elements of padding that cost no more than another call."""
FLEX_DEVICE_TYPES = ("cuda",)
"""Device types for which flex attention has a kernel with a backward pass."""
NEUTRAL_KEYWORDS = frozenset({"position_ids", "cache_position", "use_cache"})
"""Attention keywords that do not change which tokens are visible; a packed sequence allows no others."""


def supports_packing(model: PreTrainedModel) -> bool:
    """Whether the model supports packed sequences; other models get padded rows."""
    return plain_attention(model.config.to_dict())


def attends_in_blocks(device: torch.device) -> bool:
    """Whether flex attention computes packed sequences on `device`, in whole blocks of positions."""
    return device.type in FLEX_DEVICE_TYPES


class Segments:
    """Positions of P prompts and N responses in a packed sequence, int64, in order.

    This class is no dataclass, because FSDP2 would pass a copy of a dataclass to each layer, and each copy
    would plan its calls again.

    prompt_starts, prompt_lengths: [P]. starts, lengths: [N], of the responses; a length may be 0.
    groups: [N], index of the prompt of each response.
    context: ranks that compute the sequence together, each a slice of the positions; None: this process alone.
    """

    def __init__(
        self,
        prompt_starts: Tensor,
        prompt_lengths: Tensor,
        starts: Tensor,
        lengths: Tensor,
        groups: Tensor,
        context: ContextGroup | None = None,
    ) -> None:
        self.prompt_starts = prompt_starts
        self.prompt_lengths = prompt_lengths
        self.starts = starts
        self.lengths = lengths
        self.groups = groups
        self.context = context
        self._attention_calls: dict[torch.device, AttentionCalls] = {}
        self._block_masks: dict[torch.device, BlockMask] = {}

    @property
    def total(self) -> int:
        """Number of positions of the packed sequence."""
        return int(self.prompt_lengths.sum() + self.lengths.sum())

    def attention_calls(self, device: torch.device) -> "AttentionCalls":
        """Returns the attention calls for `device`, planned once for all layers."""
        if device not in self._attention_calls:
            self._attention_calls[device] = AttentionCalls.from_segments(self, device)
        return self._attention_calls[device]

    def block_mask(self, device: torch.device) -> BlockMask:
        """Returns the block mask for `device`, built once for all layers."""
        if device not in self._block_masks:
            self.set_block_mask(copy_to_device(self.block_mask_tensors(), device))
        return self._block_masks[device]

    def block_mask_tensors(self) -> BlockMaskTensors:
        """Builds the tensors of the block mask on the host."""
        spans = (self.prompt_starts, self.prompt_lengths, self.starts, self.lengths, self.groups)
        return block_mask_tensors(*(each.cpu() for each in spans))

    def set_block_mask(self, tensors: BlockMaskTensors) -> None:
        """Sets the block mask for the device of `tensors`."""
        self._block_masks[tensors.groups.device] = make_block_mask(tensors)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: Segments | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes attention under the interface of transformers, by segments if there are any.

    query: [1, heads, L, D]; key, value: [1, heads of keys, L, D]. Returns [1, L, heads, D]. Without `segments`
    the scaled dot-product attention of transformers computes the result. `count_attending_modules` counts the
    modules that attended by segments.

    Raises:
        RunError: the attention of a packed sequence has further inputs.
    """
    if segments is None:
        plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return plain(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **arguments
        )
    unknown = [name for name, value in arguments.items() if value is not None and name not in NEUTRAL_KEYWORDS]
    if unknown:
        raise RunError(
            f"{type(module).__name__} attends with {', '.join(unknown)}, which a packed sequence does not have: set "
            "train.packing=false"
        )
    # A compiled layer may write an attribute; a number that it reads would be part of the compiled code.
    setattr(module, _SEGMENTS_OF_LAST_CALL, segments)
    context = segments.context
    if context is not None:
        query, key, value = (context.exchange(each) for each in (query, key, value))
    if attends_in_blocks(query.device) and dropout == 0.0:
        out = _attend_with_flex(query, key, value, segments, scaling)
    else:
        out = _attend_in_rows(query, key, value, segments, scaling, dropout)
    return out if context is None else context.exchange(out), None


_SEGMENTS_OF_LAST_CALL = "segments_of_last_call"


def count_attending_modules(model: nn.Module, segments: Segments) -> int:
    """Counts the attention modules that used `segments` in their last call, and removes that record."""
    return sum(vars(module).pop(_SEGMENTS_OF_LAST_CALL, None) is segments for module in model.modules())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_in_rows(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, dropout: float
) -> Tensor:
    """Computes the attention [1, L, heads, D] by rows of similar length.

    A compiled layer breaks its graph here, because the calls depend on the positions of the segments.
    """
    return segments.attention_calls(query.device).attend(query, key, value, scaling, dropout)


def _attend_with_flex(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    """Computes the attention [1, L, heads, D] with flex attention.

    Flex attention needs operands of one dtype and ignores autocast. In a compiled layer it is part of the
    layer's graph; otherwise it is compiled alone.
    """
    device = query.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else value.dtype
    is_compiled_alone = device.type == "cuda" and not torch.compiler.is_compiling()
    kernel: Any = _flex_attention_alone if is_compiled_alone else flex_attention
    out: Tensor = kernel(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        block_mask=segments.block_mask(device),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)


AttentionInterface.register(ATTENTION_NAME, attend)
AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@dataclass(frozen=True)
class AttentionCall:
    """One call of scaled dot-product attention for n rows of similar length.

    queries: int64 [n, Q] and keys: int64 [n, K], positions in the packed sequence. A shorter row repeats its
    last position. mask: bool [Q, K]; None for causal attention where the queries are the keys.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float) -> Tensor:
        """Computes the outputs [n * Q, heads, D] of the call.

        query: [n * Q, heads, D]. key, value: [n * K, heads of keys, D].
        """
        out = scaled_dot_product_attention(
            _padded_rows(query, self.queries),
            _padded_rows(key, self.keys),
            _padded_rows(value, self.keys),
            attn_mask=self.mask,
            dropout_p=dropout,
            is_causal=self.mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        flat: Tensor = out.transpose(1, 2).flatten(0, 1)
        return flat


def _padded_rows(values: Tensor, positions: Tensor) -> Tensor:
    """Reshapes values [n * W, heads, D] to [n, heads, W, D]. positions: [n, W]."""
    rows: Tensor = values.unflatten(0, positions.shape).transpose(1, 2)
    return rows


@dataclass(frozen=True)
class AttentionCalls:
    """Attention calls of a packed sequence, with the output index of each position.

    queries, keys: int64, concatenated positions of all calls, so that a layer gathers once.
    output_indices: int64 [L], index of each position in the concatenated outputs of the calls.
    """

    calls: tuple[AttentionCall, ...]
    queries: Tensor
    keys: Tensor
    output_indices: Tensor

    @classmethod
    def from_segments(cls, segments: Segments, device: torch.device) -> "AttentionCalls":
        """Plans the calls for the segments on `device`."""
        planned_calls = list(_plan_calls(segments, device))
        calls = tuple(call for call, _ in planned_calls)
        start, index_pairs = 0, []
        for call, (rows, columns, positions) in planned_calls:
            index_pairs.append(np.stack([positions, start + rows * call.queries.shape[1] + columns]))
            start += call.queries.numel()
        positions, outputs = np.concatenate(index_pairs, axis=1)
        output_indices = np.empty_like(outputs)
        output_indices[positions] = outputs
        queries = torch.cat([call.queries.flatten() for call in calls])
        keys = torch.cat([call.keys.flatten() for call in calls])
        return cls(calls, queries, keys, torch.from_numpy(output_indices).to(device))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float) -> Tensor:
        """Computes the attention [1, L, heads, D] of the packed sequence.

        Narrower operands are computed in float32, with which the backward pass is faster on a CPU.
        """
        dtype = query.dtype
        query, key, value = (
            each[0].transpose(0, 1).to(torch.promote_types(dtype, torch.float32)) for each in (query, key, value)
        )
        query_counts = [call.queries.numel() for call in self.calls]
        key_counts = [call.keys.numel() for call in self.calls]
        queries = query.index_select(0, self.queries).split(query_counts)
        keys, values = (each.index_select(0, self.keys).split(key_counts) for each in (key, value))
        with torch.autocast(query.device.type, enabled=False):
            outputs = [
                call.attend(call_query, call_key, call_value, scaling, dropout)
                for call, call_query, call_key, call_value in zip(self.calls, queries, keys, values, strict=True)
            ]
        return torch.cat(outputs).index_select(0, self.output_indices)[None].to(dtype)


CallOutputs = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Row, query column and packed position of each output of a call that is not padding, [count] each."""


def _plan_calls(segments: Segments, device: torch.device) -> Iterator[tuple[AttentionCall, CallOutputs]]:
    """Yields attention calls that together compute each position once.

    Prompts attend to themselves; responses attend to the keys of their prompt and their own.
    """
    spans = (segments.prompt_starts, segments.prompt_lengths, segments.starts, segments.lengths)
    prompts, prompt_lengths, starts, lengths = (each.cpu().numpy() for each in spans)
    groups = segments.groups.cpu().numpy()
    for chosen in _rows_of_like_width(prompt_lengths):
        positions, outputs = _row_positions(prompts[chosen], prompt_lengths[chosen])
        prompt_positions = torch.from_numpy(positions).to(device)
        yield AttentionCall(prompt_positions, prompt_positions, None), outputs
    has_response = lengths > 0
    for prompt_length in np.unique(prompt_lengths[groups[has_response]]):
        rows = np.flatnonzero(has_response & (prompt_lengths[groups] == prompt_length))
        prefix_length = int(prompt_length)
        for chosen in _rows_of_like_width(lengths[rows], prefix_length):
            call_rows = rows[chosen]
            queries, outputs = _row_positions(starts[call_rows], lengths[call_rows])
            prefix = prompts[groups[call_rows], None] + np.arange(prefix_length)
            mask = torch.ones(queries.shape[1], prefix_length + queries.shape[1], dtype=torch.bool)
            keys = torch.from_numpy(np.concatenate([prefix, queries], axis=1)).to(device)
            mask = mask.tril(prefix_length).to(device)
            yield AttentionCall(torch.from_numpy(queries).to(device), keys, mask), outputs


def _row_positions(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, CallOutputs]:
    """Returns the positions int64 [n, widest] of n spans, and their outputs without padding.

    A span shorter than the widest repeats its last position.
    """
    columns = np.arange(lengths.max())
    positions = starts[:, None] + np.minimum(columns, lengths[:, None] - 1)
    rows, row_columns = np.nonzero(columns < lengths[:, None])
    return positions, (rows, row_columns, positions[rows, row_columns])


def _rows_of_like_width(widths: np.ndarray, prompt_length: int = 0) -> Iterator[np.ndarray]:
    """Yields sets of row indices of similar width, the widest first.

    Padding each row of a set to the widest row wastes at most `PADDING_SHARE` or `SMALL_CALL`.
    """
    remaining = np.argsort(-widths, kind="stable")
    while len(remaining):
        sizes = widths[remaining] * (prompt_length + widths[remaining])
        needed = sizes.cumsum()
        wasted = sizes[0] * np.arange(1, len(remaining) + 1) - needed
        fits = wasted <= np.maximum(PADDING_SHARE * needed, SMALL_CALL)
        count = len(remaining) if fits.all() else int(fits.argmin())
        yield remaining[:count]
        remaining = remaining[count:]


def _flex_attention_alone(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Any:
    """Computes flex attention outside of a compiled layer, with code compiled for any length.

    Raises:
        RunError: the compiled variants reach PyTorch's limit, after which it would compute all scores [L, L].
    """
    for operand in (query, key, value):  # sizes that are equal by chance would count as one variable size
        torch._dynamo.mark_static(operand, 1)
        torch._dynamo.mark_static(operand, 3)
    try:
        return _compiled_flex_attention()(query, key, value, **arguments)
    except FailOnRecompileLimitHit as error:
        raise RunError(
            "train.packing=true: PyTorch has compiled flex attention as often as torch._dynamo.config.recompile_limit="
            f"{torch._dynamo.config.recompile_limit} allows; TORCH_LOGS=recompiles shows why; set train.packing=false"
        ) from error


@cache
def _compiled_flex_attention() -> Any:
    """Returns flex attention compiled for dynamic shapes, which fails at PyTorch's limit of variants."""
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)
