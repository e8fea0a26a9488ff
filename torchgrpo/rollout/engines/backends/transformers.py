"""Engine backend `transformers`: factory of a `TransformersEngine` with its own copy of the model."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from config.schema.config import Config
from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.engines.interface import Engine
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.rollout.engines.vllm_settings import AdapterShape
from torchgrpo.training.model_loading import load_model, saved_eos_token_ids


def engine_factory(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    run_dir: Path | None = None,
    adapter: AdapterShape | None = None,
) -> Callable[[], Engine]:
    """Returns a picklable function that builds one engine; see `build_engine`."""
    eos = tuple(saved_eos_token_ids(config.model.name, tokenizer))
    return partial(_build_engine, config, eos, plan, tokenizer)


def _build_engine(config: Config, eos: tuple[int, ...], plan: Plan, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """Builds the engine in the learner's process or inside an actor.

    In an actor it uses `ray.num_cpus_per_engine` threads, so that engines of one machine do not slow each other down,
    or the first GPU that the actor sees.
    """
    device = torch.device(plan.devices.train_device)
    if not plan.devices.in_process:
        device = torch.device("cpu" if plan.devices.on_cpu else "cuda")
        if plan.devices.on_cpu:
            torch.set_num_threads(config.ray.num_cpus_per_engine)
    model = load_model(config.model, device)
    return TransformersEngine(model, eos, plan.engine.max_num_seqs, config.inference_model.update, tokenizer)
