"""Attention in two parts: to the prompt that a group shares, and to what each of its rows has drawn.

The softmax over both is the mean of the two, each weighted by the sum of its exponentials (log-sum-exp).
"""

from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "by_groups"


class Running(Protocol):
    """A `RunningCache` as attention sees it."""

    def attend(self, query: Tensor, scale: float) -> Tensor:
        """To all that a row sees. query: [rows, heads, Q, D]; so is what it returns."""
        ...


def attend_partly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to a part of what a query sees, and the weight of that part.

    query: [rows, heads, Q, D]. key, value: [rows, heads, K, D]. mask: is added to the scores [rows, 1, 1, K].

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


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Attention to both parts, [rows, heads, Q, D]; each as `attend_partly` returns it."""
    share = (one[1] - other[1]).sigmoid()[..., None]
    return torch.lerp(other[0].float(), one[0].float(), share).to(one[0].dtype)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    running: Running | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function. query: [rows, heads, Q, D]. Returns [rows, Q, heads, D].

    Without `running` it is transformers' own scaled dot-product attention.
    """
    if running is None:
        plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return plain(module, query, key, value, attention_mask, scaling=scaling, **others)  # type: ignore[no-any-return]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return running.attend(query, scale).transpose(1, 2), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
