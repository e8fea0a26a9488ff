"""Memory of a base in 4 bits (nf4, by bitsandbytes). No torch here."""

from plan.model_shape import ModelShape

NF4_BYTES, SCALE_BYTES = 1 / 2, 1 / 64 + 4 / (64 * 256)
"""Of a parameter: itself; an 8-bit scale for each 64, and a float32 scale for each 256 of those."""


def quantized_bytes(shape: ModelShape, width: int, shards: int = 1) -> float:
    """The linear layers but the head in 4 bits, all else in numbers of `width` bytes. Scales are in every shard."""
    others = (shape.parameters - shape.linear_parameters) * width
    return (shape.linear_parameters * NF4_BYTES + others) / shards + shape.linear_parameters * SCALE_BYTES


def largest_matrix_bytes(shape: ModelShape, width: int) -> int:
    """The largest weight as it multiplies: out of 4 bits, one layer at a time."""
    return shape.hidden_size * shape.intermediate_size * width
