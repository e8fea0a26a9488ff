"""FLOP formulas for `FlopCounterMode`: attention counts only visible pairs of tokens.

PyTorch's own counter assumes that every query attends to every key. In a packed sequence a query attends to its prompt
and to earlier tokens of its response; in whole rows it attends to earlier tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
Shape = Sequence[int]
FlopFormulas = dict[Any, Callable[..., int]]
"""FLOP formulas by operation; a formula takes the shapes of the tensors and the other arguments."""


def attention_flops(packed_pairs: int) -> FlopFormulas:
    """Returns the FLOP formulas of attention for `FlopCounterMode`.

    A product has two operations for each pair and feature. The forward pass has two products (scores and weighted
    values), the backward pass five, including the scores a second time.
    packed_pairs: visible pairs of the packed sequence, which one kernel computes on a GPU.
    """

    def packed_flops(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
        return _flops(packed_pairs, query, value, 1, 1)

    def packed_backward_flops(grad: Shape, query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
        return _flops(packed_pairs, query, value, 3, 2)

    def row_flops(
        query: Shape, key: Shape, value: Shape, dropout_p: float = 0.0, is_causal: bool = False, **_: object
    ) -> int:
        return _flops(_pairs(query, key, is_causal), query, value, 1, 1)

    def row_backward_flops(
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
        aten._scaled_dot_product_flash_attention: packed_flops,
        aten._scaled_dot_product_flash_attention_backward: packed_backward_flops,
        aten._scaled_dot_product_flash_attention_for_cpu: row_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: row_backward_flops,
    }


def _added_product_flops(total: Shape, left: Shape, right: Shape, *_: object, **__: object) -> int:
    """Counts a product that is added to `total`.

    PyTorch's own formula raises an error if the dtype of the sum is given.
    """
    return 2 * left[0] * left[1] * right[1]


PRODUCT_FLOPS: FlopFormulas = {aten.addmm: _added_product_flops}


def _pairs(query: Shape, key: Shape, is_causal: bool) -> int:
    """Returns the computed pairs of one row; without `is_causal` all pairs are computed."""
    queries = query[-2]
    return queries * (queries + 1) // 2 if is_causal else queries * key[-2]


def _flops(pairs: int, query: Shape, value: Shape, key_products: int, value_products: int) -> int:
    """Returns the operations of attention products.

    key_products, value_products: numbers of products over the features of keys and of values.
    """
    rows, heads, _, width = query
    return 2 * rows * heads * pairs * (key_products * width + value_products * value[-1])
