"""Estimates sizes of one checkpoint and exported model, and how many are stored at once.

The module imports no torch.
"""

from config.schema.config import Config
from torchgrpo.plan.activations import FLOAT
from torchgrpo.plan.memory import optimizer_state_bytes, trained_parameters
from torchgrpo.plan.model_shape import DTYPE_BYTES, ModelShape


def checkpoint_bytes(config: Config, shape: ModelShape) -> float:
    """Bytes of one checkpoint: trained weights (or adapters) in float32, and optimizer state."""
    return trained_parameters(config, shape) * FLOAT + optimizer_state_bytes(config, shape)


def exported_model_bytes(config: Config, shape: ModelShape) -> float:
    """Bytes of one exported model folder in Hugging Face format (`train.export`).

    The folder contains merged weights, and under LoRA the adapter.
    """
    if not config.train.export:
        return 0.0
    lora = config.train_model.lora
    adapter = shape.lora_parameters(lora.r) * DTYPE_BYTES[config.model.dtype] if lora.enabled else 0
    return shape.parameters * DTYPE_BYTES[config.model.dtype] + adapter


def max_stored_checkpoints(config: Config) -> int:
    """Maximum number of checkpoints, and of their exported models, on disk at one time.

    The maximum is the newest ones, the best one under `train.keep_best`, and one that is being written.
    """
    train = config.train
    frequencies = (train.checkpoint_frequency, config.eval.frequency if train.keep_best else 0)
    written = 1 + sum(config.total_iterations // frequency for frequency in frequencies if frequency)
    kept = train.keep_checkpoints + (train.keep_best is not None)
    return min(written, kept + 1) if train.keep_checkpoints else written
