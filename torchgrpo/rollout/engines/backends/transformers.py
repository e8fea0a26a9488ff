"""The engine `transformers`: the learner's model once more, decoded by this project or by transformers."""

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
    """A function that makes one engine, which may be sent to an actor; see `build_engine`."""
    eos = tuple(saved_eos_token_ids(config.model.name, tokenizer))
    return partial(_make, config, eos, plan)


def _make(config: Config, eos: tuple[int, ...], plan: Plan) -> Engine:
    """In the learner's process, or inside an actor: there with one thread, so that several on one machine do not slow
    each other down, and on the first GPU that the actor sees."""
    device = torch.device(plan.devices.train_device)
    if not plan.devices.in_process:
        device = torch.device("cpu" if plan.devices.on_cpu else "cuda")
        if plan.devices.on_cpu:
            torch.set_num_threads(config.ray.num_cpus_per_engine)
    model = load_model(config.model, device)
    return TransformersEngine(model, eos, plan.engine.max_num_seqs, config.inference_model.update)
