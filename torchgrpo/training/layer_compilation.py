"""Compiles a model's decoder layers with torch.compile, at their first call.

All layers share one compiled code. Compiling the whole model would take as many times longer as the model has
layers, and would enclose FSDP2 and activation checkpointing, which work layer by layer. On a GPU the attention of
a packed sequence is part of the layer's graph (`training/packed_attention.py`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.utils._pytree import tree_leaves

from config.schema.errors import ConfigError, RunError
from torchgrpo.training.adapters import causal_model
from torchgrpo.training.sharding import decoder_layers


def compile_layers(model: nn.Module) -> None:
    """Compiles the forward pass of each decoder layer for sequences of any length.

    The first calls compile. Hooks of a layer, such as those of FSDP2, run outside of the compiled code. Parameters
    and their names do not change.

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
        layer.forward = partial(_call_compiled, torch.compile(layer.forward, dynamic=True))


def _call_compiled(
    compiled_layer: Callable[..., Any],
    hidden_states: Tensor,
    *arguments: Any,
    position_embeddings: Any = None,
    **more: Any,
) -> Any:
    """Calls a compiled layer; only the number of rows and their length are variable.

    Other variable sizes that are equal by chance, such as length and width, would count as one.

    Raises:
        RunError: the compiled variants reach PyTorch's limit. Flex attention would compute all scores [L, L]
            without a kernel from then on.
    """
    for features in tree_leaves((hidden_states, position_embeddings)):
        if isinstance(features, Tensor):
            torch._dynamo.mark_static(features, features.ndim - 1)
    if position_embeddings is not None:
        more["position_embeddings"] = position_embeddings
    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            return compiled_layer(hidden_states, *arguments, **more)
    except FailOnRecompileLimitHit as error:
        raise RunError(
            "train.compile: PyTorch has compiled the decoder layers as often as "
            f"torch._dynamo.config.recompile_limit={torch._dynamo.config.recompile_limit} allows; "
            "TORCH_LOGS=recompiles shows why; set train.compile=false"
        ) from error
