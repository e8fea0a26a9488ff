"""Attention over one segment, its merge over two, and the attention function registered with transformers.

The segments are the prompt that a group shares, and each row's own completion. `group_kv_cache.py` calls these
functions for the rows of its cohorts. The softmax over both segments is the mean of their outputs, weighted by
their sums of exponentials (log-sum-exp).
"""

from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "by_groups"


class AttendingCache(Protocol):
    """Cache that computes attention itself: the interface of `GroupKVCache` to the attention function."""

    def attend(self, query: Tensor, scale: float) -> Tensor:
        """Computes attention of each row to its prompt and completion.

        query and output: [rows, heads, Q, D].
        """
        ...


def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes attention to one segment of the visible positions, and the weight of that segment.

    query: [rows, heads, Q, D]. key, value: [rows, heads, K, D]. mask: added to the scores, [rows, 1, 1, K].

    Returns:
        outputs [rows, heads, Q, D] and the log-sum-exps of the scores, float32 [rows, heads, Q].
    """
    if query.device.type == "cpu" and key.shape == value.shape:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return cast(tuple[Tensor, Tensor], flash(query, key, value, attn_mask=mask, scale=scale))
    scores = torch.matmul(query.float(), key.float().transpose(2, 3)) * scale
    if mask is not None:
        scores = scores + mask
    return torch.matmul(scores.softmax(-1), value.float()).to(value.dtype), scores.logsumexp(-1)


def merge_partial_attention(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """Merges the attention to two segments into the attention to both, [rows, heads, Q, D].

    first, second: results of `partial_attention`.
    """
    share = (first[1] - second[1]).sigmoid()[..., None]
    return torch.lerp(second[0].float(), first[0].float(), share).to(first[0].dtype)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    group_cache: AttendingCache | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function in the interface of transformers.

    query: [rows, heads, Q, D]. Returns [rows, Q, heads, D]. Without `group_cache`, transformers' own scaled
    dot-product attention runs.
    """
    if group_cache is None:
        plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return plain(module, query, key, value, attention_mask, scaling=scaling, **arguments)  # type: ignore[no-any-return]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return group_cache.attend(query, scale).transpose(1, 2), None


AttentionInterface.register(ATTENTION_NAME, attend)
AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
