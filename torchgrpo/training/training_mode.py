"""Training mode of a policy: adapters' dropout and recomputed layers, nothing else.

A config.json may name dropout, router noise or skipped layers. The log-probs of such a forward pass are not those of
the model that engines sample from, so ratio and KL would measure the noise.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def set_training_mode(policy: nn.Module) -> None:
    """Put all modules in evaluation mode but adapters' dropout and layers that recompute.

    Such a layer has to be in training mode by itself; what it would do with that of its own is set to 0.
    """
    policy.eval()
    for name, module in policy.named_modules():
        if ".lora_dropout." in name:
            module.training = True
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            module.training = True
            _silence(module)
            if "config" in vars(module):  # its own copy: what is saved is the model's
                module.config = deepcopy(module.config)
                _silence(module.config)


def _silence(holder: Any) -> None:
    for field, value in vars(holder).items():
        if isinstance(value, float) and any(word in field for word in ("drop", "jitter", "noise")):
            setattr(holder, field, 0.0)


@contextmanager
def evaluation_mode(policy: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode for the block."""
    in_training = [module for module in policy.modules() if module.training]
    policy.eval()
    try:
        yield
    finally:
        for module in in_training:
            module.training = True
