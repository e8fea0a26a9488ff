"""Builds scorer, learner and a sampled batch of the tiny model for tests."""

from pathlib import Path

import torch

from config.schema.config import Config
from config.schema.env import EnvConfig
from config.schema.models import ModelConfig
from config.schema.optimizer import OptimizerConfig
from config.schema.policy import PolicyConfig
from config.schema.train import TrainConfig
from tests.groups import sample_tiny_groups
from tests.tiny_models import tiny_llama
from torchgrpo.batches.batch import Batch, collate
from torchgrpo.training.learner import Learner
from torchgrpo.training.learner_models import LearnerModels
from torchgrpo.training.published_weights import named_weights
from torchgrpo.training.reference_model import ReferenceModel
from torchgrpo.training.response_scorer import ResponseScorer
from torchgrpo.training.worker import Worker
from torchgrpo.training.workers import LocalWorkers

REPEATS = 4


def sampled_batch(temperature: float = 1.0, num_groups: int = 6) -> Batch:
    """Returns a batch with prompts and responses of unequal length, sampled by the real engine."""
    return collate(sample_tiny_groups(temperature, num_groups, REPEATS))


def make_scorer(model: torch.nn.Module, packs: bool, temperature: float | None = 1.0) -> ResponseScorer:
    """Returns a scorer of the model with small chunks of logits."""
    return ResponseScorer(model, packs, chunk_size=7, temperature=temperature)


def make_learner(
    tmp_path: Path,
    policy: PolicyConfig | None = None,
    accumulation: int = 1,
    optimizer: OptimizerConfig | None = None,
    dtype: torch.dtype = torch.float32,
    packs: bool = True,
    **train: object,
) -> Learner:
    """Returns a learner of the tiny model in this process."""
    config = Config(
        env=EnvConfig(dataset="arithmetic", num_envs=8, repeats=REPEATS),
        model=ModelConfig(name="tiny"),
        train=TrainConfig(gradient_accumulation_steps=accumulation, **train),  # type: ignore[arg-type]
        policy=policy or PolicyConfig(),
        optimizer=optimizer or OptimizerConfig(lr=1e-3),
    )
    model, frozen = tiny_llama().to(dtype), tiny_llama().to(dtype)
    reference = ReferenceModel(make_scorer(frozen, packs)) if config.policy.uses_reference else None
    models = LearnerModels(model, make_scorer(model, packs), reference)
    return Learner(config, LocalWorkers(Worker(config, models, named_weights)), tmp_path)
