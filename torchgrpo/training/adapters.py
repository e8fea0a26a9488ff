"""Adds peft's LoRA adapters to a model, and finds the model inside peft's wrapper.

LoRA: arXiv 2106.09685. peft is imported inside the functions, so that a process that only reads checkpoints
imports neither peft nor transformers here.
"""

import sys
from typing import TYPE_CHECKING, cast

from torch import nn

from config.schema.errors import ConfigError
from config.schema.models import LoraConfig

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def add_lora(model: "PreTrainedModel", lora: LoraConfig) -> nn.Module:
    """Freezes the model and puts trainable low-rank adapters on its linear layers.

    The output head gets no adapter. Experts that lie in one tensor get none either, and stay frozen. Adapters have
    the dtype of the model: wider ones would widen the input of every layer.

    Raises:
        ConfigError: peft has no adapter for a layer of the model.
    """
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    settings = PeftLoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(linear_layer_names(model)),
        task_type="CAUSAL_LM",
    )
    try:
        policy = get_peft_model(model, settings, autocast_adapter_dtype=False)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"train_model.lora.enabled=true: peft has no adapter for a layer of {type(model).__name__} ({reason}); "
            "train all weights"
        ) from error
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype)  # adapters of 4-bit layers begin in float32
    return policy


def linear_layer_names(model: "PreTrainedModel") -> tuple[str, ...]:
    """Returns the last name components of the layers that `add_lora` adapts.

    These are all linear layers but the head.
    """
    head = model.get_output_embeddings()
    layers = model.named_modules()
    names = [name for name, layer in layers if isinstance(layer, nn.Linear) and layer is not head]
    return tuple(sorted({name.rsplit(".", 1)[-1] for name in names}))


def peft_model_of(model: nn.Module) -> "PeftModel | None":
    """Returns the model as a `PeftModel`, or None where peft has not wrapped the model."""
    if "peft" not in sys.modules:  # a peft that is not imported has wrapped nothing, and its import is slow
        return None
    from peft import PeftModel

    return model if isinstance(model, PeftModel) else None


def causal_model(model: nn.Module) -> "PreTrainedModel":
    """Returns the transformers model inside a peft wrapper, or the model itself."""
    peft_model = peft_model_of(model)
    return cast("PreTrainedModel", model if peft_model is None else peft_model.get_base_model())
