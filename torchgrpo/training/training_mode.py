"""Sets training mode without the base model's dropout and noise, and evaluation mode temporarily.

A config.json may enable dropout, router noise or skipped layers. The log-probs of such a forward pass differ
from those of the model that engines sample from, so ratio and KL would measure the noise. Only the dropout of
adapters and the recomputation of layers stay in training mode.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def set_training_mode(policy: nn.Module) -> None:
    """Puts all modules in evaluation mode except adapters' dropout and layers with checkpointing.

    A layer with activation checkpointing must itself be in training mode; its dropout and noise settings are
    set to 0.
    """
    policy.eval()
    for name, module in policy.named_modules():
        if ".lora_dropout." in name:
            module.training = True
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            module.training = True
            _zero_noise_settings(module)
            if "config" in vars(module):  # a copy, because checkpoints save the model's config
                module.config = deepcopy(module.config)
                _zero_noise_settings(module.config)


def _zero_noise_settings(holder: Any) -> None:
    """Sets all dropout, jitter and noise rates of a module or config to 0."""
    for field, value in vars(holder).items():
        if isinstance(value, float) and any(word in field for word in ("drop", "jitter", "noise")):
            setattr(holder, field, 0.0)


@contextmanager
def evaluation_mode(policy: nn.Module) -> Iterator[None]:
    """Puts all modules in evaluation mode for the block."""
    in_training = [module for module in policy.modules() if module.training]
    policy.eval()
    try:
        yield
    finally:
        for module in in_training:
            module.training = True
