"""Decoder layers compiled by torch.compile, one code for all layers of a model.

Not the whole model: it would take as many times longer to compile as it has layers, and FSDP2 and checkpointing, which
work layer by layer, would lie inside. The attention of a packed sequence is left out (`training/attention.py`).
"""

from torch import nn

from config.schema.errors import ConfigError
from torchgrpo.training.adapters import causal_model
from torchgrpo.training.sharding import decoder_layers


def compile_layers(model: nn.Module) -> None:
    """Compiles at the first calls, for sequences of any length; parameters and their names stay as they are.

    Raises:
        ConfigError: the model keeps its layers under another name than `layers`.
    """
    try:
        layers = decoder_layers(model)
    except AttributeError:
        raise ConfigError(
            f"train.compile=true: the layers of {type(causal_model(model)).__name__} are not where those of the models "
            "that it is made for are (`model.layers`): set train.compile=false"
        ) from None
    for layer in layers:
        layer.compile(dynamic=True)
