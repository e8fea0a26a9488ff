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
        return _flops(packed_pairs, query, value, 1, 1)

    def packed_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
        return _flops(packed_pairs, query, value, 3, 2)

    def rows(
        query: Shape, key: Shape, value: Shape, dropout_p: float = 0.0, is_causal: bool = False, **_: object
    ) -> int:
        return _flops(_pairs(query, key, is_causal), query, value, 1, 1)

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
        return _flops(_pairs(query, key, is_causal), query, value, 3, 2)

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


def _flops(pairs: int, query: Shape, value: Shape, of_keys: int, of_values: int) -> int:
    """of_keys, of_values: products over the features of keys and of values."""
    rows, heads, _, width = query
    return 2 * rows * heads * pairs * (of_keys * width + of_values * value[-1])
