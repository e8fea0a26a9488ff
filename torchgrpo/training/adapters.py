"""Low-rank adapters around a model (arXiv 2106.09685): put on with peft, found again, and looked through.

Whoever only reads checkpoints imports neither peft nor transformers here.
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
    """Freeze the model and put trainable low-rank adapters on every linear layer but the head; experts that lie in one
    tensor are none, and stay as they are."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    settings = PeftLoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(linear_names(model)),
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, settings)
    except ValueError as error:
        first = str(error).splitlines()[0]
        raise ConfigError(
            f"train_model.lora.enabled=true: peft has no adapter for a layer of {type(model).__name__} ({first}); "
            "train all weights"
        ) from error


def linear_names(model: "PreTrainedModel") -> tuple[str, ...]:
    """Last names of the layers that `add_lora` adapts: every linear one but the head."""
    head = model.get_output_embeddings()
    layers = model.named_modules()
    adapted = [name for name, layer in layers if isinstance(layer, nn.Linear) and layer is not head]
    return tuple(sorted({name.rsplit(".", 1)[-1] for name in adapted}))


def adapted(model: nn.Module) -> "PeftModel | None":
    """The model as peft has wrapped it; None where it has not."""
    if "peft" not in sys.modules:  # its import takes most of a second, and it has wrapped nothing before
        return None
    from peft import PeftModel

    return model if isinstance(model, PeftModel) else None


def causal_model(model: nn.Module) -> "PreTrainedModel":
    """The transformers model inside a peft wrapper, or the model itself."""
    wrapped = adapted(model)
    return cast("PreTrainedModel", model if wrapped is None else wrapped.get_base_model())
