"""Floating-point operations of attention, of the pairs of tokens that see each other alone.

PyTorch's own counter takes every query to see every key. In a packed sequence each sees its prompt and what comes
before it in its response, and in whole rows what comes before it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchgrpo.training.attention import Segments

aten = torch.ops.aten
Shape = Sequence[int]
Formulas = dict[Any, Callable[..., int]]
"""By operation, of the shapes of its tensors and of its other arguments."""


def pairs_seen(segments: Segments) -> int:
    """Pairs of a query and a key that it sees, in a packed sequence."""
    prompts, own = segments.prompt_lengths, segments.lengths
    shared = own * prompts[segments.groups]
    return int(_triangle(prompts).sum() + _triangle(own).sum() + shared.sum())


def attention_flops(packed_pairs: int) -> Formulas:
    """For `FlopCounterMode`: two operations for each pair, feature and product; forward has two products, scores and
    weighted values, and backward five, the scores once more among them.

    packed_pairs: of the packed sequence, which the one kernel of a GPU attends in.
    """

    def packed(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
        return _forward(packed_pairs, query, value)

    def packed_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
        return _backward(packed_pairs, query, value)

    def rows(
        query: Shape, key: Shape, value: Shape, dropout_p: float = 0.0, is_causal: bool = False, **_: object
    ) -> int:
        return _forward(_pairs(query, key, is_causal), query, value)

    def rows_backward(
        grad: Shape,
        query: Shape,
        key: Shape,
        value: Shape,
        out: Shape,
        logsumexp: Shape,
        dropout_p: float,
        is_causal: bool,
        **_: object,
    ) -> int:
        return _backward(_pairs(query, key, is_causal), query, value)

    return {
        aten._scaled_dot_product_flash_attention: packed,
        aten._scaled_dot_product_flash_attention_backward: packed_backward,
        aten._scaled_dot_product_flash_attention_for_cpu: rows,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: rows_backward,
    }


def _triangle(length: Any) -> Any:
    return length * (length + 1) // 2


def _pairs(query: Shape, key: Shape, is_causal: bool) -> int:
    """Of one row; with a mask of its own, all that are computed."""
    return int(_triangle(query[-2])) if is_causal else query[-2] * key[-2]


def _forward(pairs: int, query: Shape, value: Shape) -> int:
    rows, heads, _, width = query
    return 2 * rows * heads * pairs * (width + value[-1])


def _backward(pairs: int, query: Shape, value: Shape) -> int:
    rows, heads, _, width = query
    return 2 * rows * heads * pairs * (3 * width + 2 * value[-1])
