"""What FSDP2 holds of whole parameters and gradients beside the shards of a learner rank. No torch here.

    layer i       gathered in half precision, one more layer on its way ──▶ its whole gradient ──▶ float32 ──▶ shards
    outside       embedding, head, last norm: gathered from the forward's begin to the backward's end, reduced last

A unit is gathered into one buffer and copied out of it. The buffer of the unit before is freed after that.
"""

from dataclasses import dataclass

from plan.activations import FLOAT, Arithmetic
from plan.model_shape import ModelShape


@dataclass(frozen=True)
class Gathered:
    """Bytes of whole tensors; all 0 for a learner of one rank.

    layer, outside: parameters of one decoder layer, and of all that is in none. layer_gradient, outside_gradient: in
    the dtype that is gathered. layer_sum, outside_sum: what goes into the sum over the ranks, in float32.
    """

    layer: float
    outside: float
    layer_gradient: float
    outside_gradient: float
    layer_sum: float
    outside_sum: float


def gathered(shape: ModelShape, arithmetic: Arithmetic, ranks: int) -> Gathered:
    """What a rank of so many gathers. Gradients of adapters are too small to count."""
    if ranks == 1:
        return Gathered(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    outside = shape.head_parameters * (1 if shape.tied else 2)
    layer = (shape.parameters - outside) / shape.num_layers
    width = arithmetic.factor
    gradient, total = (width, FLOAT) if arithmetic.trains_weights else (0, 0)
    return Gathered(
        layer * arithmetic.gathered,
        outside * width,
        layer * gradient,
        outside * gradient,
        layer * total,
        outside * total,
    )
