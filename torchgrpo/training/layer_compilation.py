"""Marks a model's decoder layers for torch.compile, which compiles them at their first call.

All layers share one compiled code. Compiling the whole model would take as many times longer as the model has
layers, and would enclose FSDP2 and activation checkpointing, which work layer by layer. The attention of a
packed sequence is not compiled (`training/packed_attention.py`).
"""

from torch import nn

from config.schema.errors import ConfigError
from torchgrpo.training.adapters import causal_model
from torchgrpo.training.sharding import decoder_layers


def compile_layers(model: nn.Module) -> None:
    """Marks each decoder layer for compilation for sequences of any length.

    The first calls compile. Parameters and their names do not change.

    Raises:
        ConfigError: the layers of the model are not at `model.layers`.
    """
    try:
        layers = decoder_layers(model)
    except AttributeError:
        raise ConfigError(
            f"train.compile=true: {type(causal_model(model)).__name__} has no layers at `model.layers`, "
            "which compilation needs: set train.compile=false"
        ) from None
    for layer in layers:
        layer.compile(dynamic=True)
