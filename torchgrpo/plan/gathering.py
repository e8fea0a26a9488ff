"""What FSDP2 holds of whole parameters and gradients beside the shards of a learner rank. No torch here.

    layer i       gathered in half precision, one more layer on its way ──▶ its whole gradient ──▶ float32 ──▶ shards
    outside       embedding, head, last norm: gathered from the forward's begin to the backward's end, reduced last

A unit is gathered into one buffer and copied out of it. The buffer of the unit before is freed after that. With copies
of the parameters (HSDP) the float32 shards are summed over those, and stay until the backward pass has ended.
"""

from dataclasses import dataclass

from config.schema.config import Config
from torchgrpo.plan.activations import FLOAT, Arithmetic
from torchgrpo.plan.model_shape import ModelShape


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


def kept_of_sums(config: Config, several: bool) -> float:
    """The part of a unit's float32 gradient that is kept until the backward pass has ended: with copies of the
    parameters a rank's shard of the sum over them, where that is not the gradient itself.

    several: whether the rank has gradients of an earlier microbatch.
    """
    model = config.train_model
    is_gradient = not several and config.model.dtype == "float32" and model.offload != "all"
    return 0.0 if model.shards == model.ranks or is_gradient else 1 / model.shards


def last_sum_bytes(config: Config, whole: Gathered, kept: float) -> float:
    """What the sum of the gradients outside the layers takes, which is the last; `kept` as `kept_of_sums` has it.

    With copies of the parameters the layer before and the gathered parameters are still there; one rank's shard is
    the whole, and is copied once more.
    """
    begun = whole.outside_gradient + whole.outside_sum
    if not kept:
        return begun
    copied = whole.outside_sum if config.train_model.shards == 1 else 0.0
    return max(begun + whole.layer_sum + whole.outside, (1 + kept) * whole.outside_sum + copied)
