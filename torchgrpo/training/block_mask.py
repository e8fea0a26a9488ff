"""Builds block masks of flex attention for packed sequences."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from torchgrpo.plan.microbatch_sizes import BLOCK_SIZE


@dataclass(frozen=True)
class BlockMaskTensors:
    """Tensors of the block mask of a packed sequence.

    groups, rows: int64 [L], number of the prompt and of the response of each position; row -1 is a prompt.
    blocks: the tensors of `BlockMask` by name, int32 [1, 1, B] and [1, 1, B, B] for B blocks.
    """

    groups: Tensor
    rows: Tensor
    blocks: dict[str, Tensor]


def block_mask_tensors(
    prompt_starts: Tensor, prompt_lengths: Tensor, starts: Tensor, lengths: Tensor, groups: Tensor
) -> BlockMaskTensors:
    """Builds the tensors of the block mask of flex attention on the host.

    The arguments are those of `Segments`, on the host (`training/packed_attention.py`).

    PyTorch's `create_block_mask` builds the same mask, but evaluates each pair of positions. On a GPU it must
    be compiled for that, and compiled again for other lengths.
    """
    length = int(prompt_lengths.sum() + lengths.sum())
    position_groups, rows = torch.empty(length, dtype=torch.int64), torch.full((length,), -1)
    prompts, responses = _span_positions(prompt_starts, prompt_lengths), _span_positions(starts, lengths)
    position_groups[prompts] = torch.arange(len(prompt_starts)).repeat_interleave(prompt_lengths)
    position_groups[responses] = groups.repeat_interleave(lengths)
    rows[responses] = torch.arange(len(starts)).repeat_interleave(lengths)

    count = -(-length // BLOCK_SIZE)
    prompt_overlaps = _block_overlaps(prompt_starts, prompt_lengths, count)
    response_overlaps = _block_overlaps(starts, lengths, count)
    own = torch.cat([prompt_overlaps, response_overlaps])
    # Visible (query, key) pairs of each pair of blocks, float64 [B, B].
    pairs = (own.T @ own).tril(-1) + torch.diag((own * (own + 1) / 2).sum(0))
    pairs = pairs + response_overlaps.T @ prompt_overlaps[groups]
    fully_visible = pairs == BLOCK_SIZE**2
    blocks = {"": (pairs > 0) & ~fully_visible, "full_": fully_visible}
    tensors: dict[str, Tensor] = {}
    for kind, visible in blocks.items():
        for side, ordered in (("kv", _ordered_blocks(visible)), ("q", _ordered_blocks(visible.T.contiguous()))):
            tensors[f"{kind}{side}_num_blocks"], tensors[f"{kind}{side}_indices"] = ordered
    return BlockMaskTensors(position_groups, rows, tensors)


def make_block_mask(tensors: BlockMaskTensors) -> BlockMask:
    """Builds the block mask of flex attention from its tensors."""
    groups, rows = tensors.groups, tensors.rows

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = (groups[query] == groups[key]) & (query >= key)
        return same & ((rows[key] == -1) | (rows[query] == rows[key]))

    block_size = (BLOCK_SIZE, BLOCK_SIZE)
    blocks: dict[str, Any] = {**tensors.blocks}
    return BlockMask((len(groups), len(groups)), **blocks, BLOCK_SIZE=block_size, mask_mod=sees)


def _block_overlaps(starts: Tensor, lengths: Tensor, blocks: int) -> Tensor:
    """Counts the positions of each span in each block, float64 [spans, blocks]."""
    starts, lengths = starts[:, None], lengths[:, None]
    begins = torch.arange(blocks) * BLOCK_SIZE
    ends = torch.minimum(starts + lengths, begins + BLOCK_SIZE)
    return (ends - torch.maximum(starts, begins)).clamp(min=0).double()


def _ordered_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the count of set blocks of each row, and the sorted block indices.

    Set blocks come first. Shapes: int32 [1, 1, B] and [1, 1, B, B].
    """
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int()[None, None], order.int()[None, None]


def _span_positions(starts: Tensor, lengths: Tensor) -> Tensor:
    """Returns the concatenated positions of all spans, int64 [sum of lengths]."""
    begins = starts - (lengths.cumsum(0) - lengths)
    return begins.repeat_interleave(lengths) + torch.arange(int(lengths.sum()))
