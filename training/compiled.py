"""Decoder layers compiled by torch.compile, one code for all layers of a model.

Not the whole model: it would take as many times longer to compile as it has layers, and FSDP2 and checkpointing, which
work layer by layer, would lie inside. The attention of a packed sequence is left out (`training.attention`).
"""

from torch import nn

from training.sharding import decoder_layers


def compile_layers(model: nn.Module) -> None:
    """Compiles at the first calls, for lengths of any size; parameters and their names stay as they are."""
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)
