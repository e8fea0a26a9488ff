"""Recomputes none, some or all activations of decoder layers in the backward pass.

Each decoder layer is a checkpoint of `torch.utils.checkpoint`. Selective recomputation keeps outputs of matrix
products and attention. Compiled layers need no checkpoint for that: the compiler keeps nearly the same outputs, and
recomputes the operations that it fuses.
"""

from functools import partial

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from config.schema.errors import ConfigError
from torchgrpo.plan.memory import Recomputation

aten = torch.ops.aten
SAVED_OPERATIONS = (
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
"""Operations whose outputs selective recomputation keeps."""


def recompute_activations(model: PreTrainedModel, recomputation: Recomputation, is_compiled: bool) -> None:
    """Makes the decoder layers recompute activations.

    is_compiled: the layers are compiled.

    Raises:
        ConfigError: the model does not support recomputation.
    """
    if recomputation == "none" or (recomputation == "selective" and is_compiled):
        return
    options: dict[str, object] = {"use_reentrant": False}
    if recomputation == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(SAVED_OPERATIONS))
    try:
        model.gradient_checkpointing_enable(options)
    except ValueError as error:
        raise ConfigError(
            f"train.gradient_checkpointing={recomputation}: {error}; set train.gradient_checkpointing=none"
        ) from error
