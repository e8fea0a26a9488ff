"""The models of a learner: the policy, what scores with it, and the reference model that the KL is measured against."""

from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from config.schema import Config
from plan.plan import Plan
from training.forward import ResponseScorer
from training.model import add_lora, load_frozen
from training.reference import HostMemory, Reference


@dataclass(frozen=True)
class Models:
    """policy: what is trained, wrapped by peft where it is an adapter. reference: None where nothing reads it."""

    policy: nn.Module
    scorer: ResponseScorer
    reference: Reference | None


def make_models(config: Config, model: PreTrainedModel, plan: Plan) -> Models:
    """The models of a run that trains `model`.

    The reference is the model that the run began from, whatever `model` becomes or a checkpoint holds. The base under a
    LoRA policy is that model: it serves without a second copy of the weights, and never beside the learner.
    """
    reference = _frozen_reference(config, plan)
    if config.train.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    policy: nn.Module = model
    if config.train_model.lora.enabled:
        policy = add_lora(model, config.train_model.lora)
    scorer = make_scorer(config, policy, plan)
    if plan.reference.home == "base of the LoRA policy":
        assert isinstance(policy, PeftModel)
        reference = Reference(scorer, plan.learner.microbatch_rows, visit=policy.disable_adapter)
    return Models(policy, scorer, reference)


def make_scorer(config: Config, scored: nn.Module, plan: Plan) -> ResponseScorer:
    """Log-probs under `scored`, of the distribution that the engines sample from."""
    inference = config.inference_model
    return ResponseScorer(
        scored,
        config.env.repeats,
        share_prompt=plan.learner.share_prompt,
        chunk_size=plan.learner.chunk_size,
        temperature=inference.temperature if inference.temperature_end is None else None,
        top_p=inference.top_p,
        top_k=inference.top_k,
        autocast_dtype=_autocast(plan),
    )


def _frozen_reference(config: Config, plan: Plan) -> Reference | None:
    """A copy of the weights that stay as they are; None where the policy's own base serves, or nothing does."""
    home = plan.reference.home
    if home not in ("own devices", "training GPU", "host memory"):
        return None
    learner = torch.device(plan.devices.train_device)
    visits = home == "host memory" and not plan.devices.on_cpu
    place = torch.device("cpu") if visits else learner
    if plan.reference.devices:
        place = torch.device("cuda", plan.reference.devices[0])
    frozen = load_frozen(config.model, place, _autocast(plan)).requires_grad_(False).eval()
    reference = Reference(
        make_scorer(config, frozen, plan), plan.learner.microbatch_rows, home == "own devices"
    )
    if visits:
        reference.visit = HostMemory(frozen, learner).visit
    return reference


def _autocast(plan: Plan) -> torch.dtype | None:
    name = plan.learner.autocast
    return None if name is None else getattr(torch, name)
