"""Estimates of disk space: checkpoints, and the models that are made of them. No torch here."""

from config.schema.config import Config
from torchgrpo.plan.activations import FLOAT
from torchgrpo.plan.memory import optimizer_state_bytes, trained_parameters
from torchgrpo.plan.model_shape import DTYPE_BYTES, ModelShape


def checkpoint_bytes(config: Config, shape: ModelShape) -> float:
    """One checkpoint: the trained weights (adapters under LoRA) with all their bits, and the optimizer's state."""
    return trained_parameters(config, shape) * FLOAT + optimizer_state_bytes(config, shape)


def model_bytes(config: Config, shape: ModelShape) -> float:
    """The folder in Hugging Face format of one checkpoint (`train.export`): merged weights, an adapter beside them."""
    if not config.train.export:
        return 0.0
    lora = config.train_model.lora
    adapter = shape.lora_parameters(lora.r) * FLOAT if lora.enabled else 0
    return shape.parameters * DTYPE_BYTES[config.model.dtype] + adapter


def checkpoints_kept(config: Config) -> int:
    """How many checkpoints, and models of them, lie on disk at most: the newest, the best where it is kept, and one
    more while it is written."""
    train = config.train
    frequencies = (train.checkpoint_frequency, config.eval.frequency if train.keep_best else 0)
    written = 1 + sum(config.total_iterations // frequency for frequency in frequencies if frequency)
    kept = train.keep_checkpoints + (train.keep_best is not None)
    return min(written, kept + 1) if train.keep_checkpoints else written
