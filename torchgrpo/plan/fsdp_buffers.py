"""Estimates FSDP2's buffers of unsharded parameters and gradients on a learner rank.

    layer i       gathered in half precision, the next layer in flight ──▶ its whole gradient ──▶ float32 ──▶ shards
    outside       embedding, head, last norm: gathered from the forward's start to the backward's end, reduced last

FSDP2 gathers a unit into one buffer, copies the parameters out of it, and then frees the buffer of the unit before.
With copies of the parameters (HSDP) the float32 shards are summed over the copies, and stay until the backward pass
has ended. The module imports no torch.
"""

from dataclasses import dataclass

from config.schema.config import Config
from torchgrpo.plan.activations import FLOAT, ElementWidths
from torchgrpo.plan.model_shape import ModelShape


@dataclass(frozen=True)
class GatheredBytes:
    """Bytes of unsharded tensors on a learner rank; 0 for a single rank.

    layer, outside: parameters of one decoder layer, and of everything outside the layers. layer_gradient,
    outside_gradient: their gradients in the gathered dtype. layer_sum, outside_sum: their float32 gradients for the
    sum over the ranks.
    """

    layer: float
    outside: float
    layer_gradient: float
    outside_gradient: float
    layer_sum: float
    outside_sum: float


def gathered_bytes(shape: ModelShape, widths: ElementWidths, ranks: int) -> GatheredBytes:
    """Returns the bytes that one of `ranks` ranks gathers.

    Gradients of adapters are too small to count.
    """
    if ranks == 1:
        return GatheredBytes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    outside = shape.head_parameters * (1 if shape.tied else 2)
    layer = (shape.parameters - outside) / shape.num_layers
    width = widths.factor
    gradient, total = (width, FLOAT) if widths.trains_weights else (0, 0)
    return GatheredBytes(
        layer * widths.gathered_width,
        outside * width,
        layer * gradient,
        outside * gradient,
        layer * total,
        outside * total,
    )


def layers_of_scoring(prefetch_layers: int, num_layers: int) -> int:
    """Returns the layers whose bytes a rank holds in a pass without gradients.

    They are the parameters of the layer that computes, the buffer that they were copied from, and the layers gathered
    ahead. With one layer ahead, its buffer replaces the one before.
    """
    return 2 if prefetch_layers == 1 else 2 + min(prefetch_layers, num_layers - 1)


@dataclass(frozen=True)
class GatheredLayers:
    """Layers whose bytes a rank holds in a forward and backward pass.

    head_forward, head_backward: in the passes of the output head. last, first: in the backward pass of the last and of
    the first layer.
    """

    head_forward: int
    head_backward: int
    last: int
    first: int


def layers_of_training(config: Config, shape: ModelShape) -> GatheredLayers:
    """Returns the layers whose bytes a rank holds in a microbatch.

    In the forward pass of the head the buffer of the last layer still exists. In its backward pass the last layer is
    gathered again, unless it was kept. A buffer of the backward pass is freed after its copy.
    """
    model = config.train_model
    if not model.reshard_after_forward:
        return GatheredLayers(shape.num_layers + 1, shape.num_layers, shape.num_layers, 1)
    computing = min(1 + model.prefetch_layers, shape.num_layers)
    return GatheredLayers(1, 1, computing, 2)


def kept_sum_share(config: Config, has_earlier_gradients: bool) -> float:
    """Share of a unit's float32 gradient that stays until the backward pass has ended.

    With copies of the parameters the share is a rank's shard of the sum over the copies. Without copies, or where that
    shard is the gradient itself, the share is 0.
    has_earlier_gradients: whether the rank has gradients of an earlier microbatch.
    """
    model = config.train_model
    is_gradient = not has_earlier_gradients and model.offload != "all"
    return 0.0 if model.shards == model.ranks or is_gradient else 1 / model.shards


def last_sum_bytes(config: Config, buffers: GatheredBytes, kept_share: float) -> float:
    """Bytes of the last sum over ranks: the gradients of parameters outside the layers.

    With copies of the parameters, the gradient of the layer before and the gathered parameters still exist. A shard
    that is the whole parameter is copied one more time.
    kept_share: the result of `kept_sum_share`.
    """
    total = buffers.outside_gradient + buffers.outside_sum
    if not kept_share:
        return total
    copied = buffers.outside_sum if config.train_model.shards == 1 else 0.0
    return max(total + buffers.layer_sum + buffers.outside, (1 + kept_share) * buffers.outside_sum + copied)
