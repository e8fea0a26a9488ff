"""The models of a learner: the policy, what scores with it, and the reference model that the KL is measured against."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.models import ModelConfig
from torchgrpo.plan.plan import LearnerPlan, Plan, ReferencePlan
from torchgrpo.training.adapters import adapted, add_lora
from torchgrpo.training.compiled import compile_layers
from torchgrpo.training.forward import ResponseScorer
from torchgrpo.training.model_loading import (
    load_frozen,
    load_in_4bit,
    load_model,
    said_of_reference,
    skeleton,
)
from torchgrpo.training.reference import HostMemory, Reference
from torchgrpo.training.sharding import Sharded, Within, directly, fill, shard


@dataclass(frozen=True)
class Models:
    """policy: what is trained, wrapped by peft where it is an adapter. reference: None where nothing reads it. within:
    where the policy's parameters are whole."""

    policy: nn.Module
    scorer: ResponseScorer
    reference: Reference | None
    within: Within = directly


def load_base(config: Config, plan: Plan) -> PreTrainedModel:
    """The model of `model.name` as a learner of one rank trains it, or adapters on it."""
    device = torch.device(plan.devices.train_device)
    if not config.train_model.lora.quantized:
        return load_model(config.model, device)
    compute = getattr(torch, plan.learner.autocast or config.model.dtype)
    return load_in_4bit(config.model, device, compute)


def make_models(config: Config, model: PreTrainedModel, plan: Plan) -> Models:
    """The models of a run that trains `model`.

    The reference is the model that the run began from, whatever `model` becomes or a checkpoint holds. The base under a
    LoRA policy is that model: it serves without a second copy of the weights, and never beside the learner.
    """
    reference = _frozen_reference(config, plan, model.device)
    policy = _trained(config, model)
    scorer = make_scorer(config, policy, plan.learner, _dtype(plan.learner.autocast))
    if plan.reference.home == "base of the LoRA policy":
        wrapped = adapted(policy)
        assert wrapped is not None
        reference = Reference(scorer, visit=wrapped.disable_adapter)
    return Models(policy, scorer, reference)


def make_sharded_models(config: Config, plan: Plan, mesh: DeviceMesh, device: torch.device) -> Models:
    """The same models as shards over `mesh`, which every rank makes at once; rank 0 alone reads the files."""
    gathered, offload = plan.learner.gathered_dtype, config.train_model.offload == "all"
    if config.train_model.lora.quantized:
        root = _sharded_in_4_bits(config, gathered, mesh, device)
    else:
        root = _spread(config.model, partial(_trained, config), gathered, mesh, device, offload)
    # FSDP2 sees at the first pass what is trained; one with adapters off would show it nothing.
    with torch.no_grad():
        root(lambda: None)
    policy = root.model
    scorer = make_scorer(config, policy, plan.learner, within=root)
    reference = None
    if plan.reference.home == "base of the LoRA policy":
        wrapped = adapted(policy)
        assert wrapped is not None
        reference = Reference(scorer, visit=wrapped.disable_adapter)
    elif plan.reference.home == "learner ranks":
        frozen = _sharded_frozen(config, gathered, mesh, device, offload)
        reference = Reference(make_scorer(config, frozen.model, plan.reference, within=frozen))
    return Models(policy, scorer, reference, root)


def make_frozen_scorer(
    config: Config, plan: Plan, mesh: DeviceMesh | None, device: torch.device
) -> ResponseScorer:
    """The frozen model of a scorer rank, whole or a shard over `mesh`."""
    half = plan.learner.gathered_dtype or plan.learner.autocast
    if mesh is not None:
        with said_of_reference(config):
            root = _sharded_frozen(config, half, mesh, device, offload=False)
        return make_scorer(config, root.model, plan.reference, within=root)
    autocast = _dtype(half)
    with said_of_reference(config):
        frozen = load_frozen(config.reference_model, device, autocast)
    return make_scorer(config, _frozen(config, frozen), plan.reference, autocast)


def _sharded_frozen(
    config: Config, gathered: str | None, mesh: DeviceMesh, device: torch.device, offload: bool
) -> Sharded:
    """The frozen model's shards, in the dtype that they are gathered in.

    The numbers are the same, often in half the memory.
    """
    files = config.reference_model
    if gathered is not None:
        files = replace(files, dtype=gathered)
    return _spread(files, partial(_frozen, config), gathered, mesh, device, offload)


def _spread(
    files: ModelConfig,
    prepared: Callable[[PreTrainedModel], nn.Module],
    gathered: str | None,
    mesh: DeviceMesh,
    device: torch.device,
    offload: bool,
) -> Sharded:
    """This rank's shards of a model that rank 0 alone reads from its files.

    prepared: wraps or freezes it. gathered: dtype that its layers are gathered and computed in, None: its own.
    """
    full = load_model(files, torch.device("cpu")) if dist.get_rank() == 0 else None
    with torch.device("meta"):
        empty = prepared(skeleton(files))
    root = shard(empty, mesh, _dtype(gathered), offload)
    root.to_empty(device="cpu" if offload else device)
    fill(root.model, None if full is None else prepared(full))
    return root


def _sharded_in_4_bits(
    config: Config, gathered: str | None, mesh: DeviceMesh, device: torch.device
) -> Sharded:
    """Every rank reads the base, keeps its shard of the weights, and the scales of all, which are no parameters."""
    base = load_in_4bit(config.model, device, getattr(torch, gathered or config.model.dtype))
    policy = _trained(config, base)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.detach(), 0)
    return shard(policy, mesh, _dtype(gathered))


def _frozen(config: Config, model: PreTrainedModel) -> nn.Module:
    """The model of some files as a reference or a teacher."""
    if config.train.compile:
        compile_layers(model)
    model.requires_grad_(False).eval()
    return model


def _trained(config: Config, model: PreTrainedModel) -> nn.Module:
    """The model of some files as the policy."""
    if config.train.compile:
        compile_layers(model)
    if config.train.gradient_checkpointing:
        try:
            model.gradient_checkpointing_enable()
        except ValueError as error:
            raise ConfigError(f"train.gradient_checkpointing=true: {error}; set it to false") from error
    if config.train_model.lora.enabled:
        return add_lora(model, config.train_model.lora)
    return model


def make_scorer(
    config: Config,
    scored: nn.Module,
    plan: LearnerPlan | ReferencePlan,
    autocast: torch.dtype | None = None,
    within: Within = directly,
) -> ResponseScorer:
    """Log-probs under `scored`, of the distribution that the engines sample from. The rest as in `ResponseScorer`."""
    inference = config.inference_model
    return ResponseScorer(
        scored,
        plan.packs,
        chunk_size=plan.chunk_size,
        temperature=inference.temperature if inference.temperature_end is None else None,
        top_p=inference.top_p,
        top_k=inference.top_k,
        autocast_dtype=autocast,
        within=within,
    )


def _frozen_reference(config: Config, plan: Plan, learner: torch.device) -> Reference | None:
    """The frozen model in this process, or None. learner: the policy's device."""
    home, autocast = plan.reference.home, _dtype(plan.learner.autocast)
    if home not in ("training GPU", "host memory"):
        return None
    visits = home == "host memory" and not plan.devices.on_cpu
    place = torch.device("cpu") if visits else learner
    with said_of_reference(config):
        frozen = load_frozen(config.reference_model, place, autocast)
    reference = Reference(make_scorer(config, _frozen(config, frozen), plan.reference, autocast))
    if visits:
        reference.visit = HostMemory(frozen, learner).visit
    return reference


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
