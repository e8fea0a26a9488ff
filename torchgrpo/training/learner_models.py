"""Builds a learner process's policy, scorer and reference, and a scorer rank's frozen scorer."""

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
from torchgrpo.plan.model_shape import can_compile_layers
from torchgrpo.plan.plan import LearnerPlan, Plan, ReferencePlan
from torchgrpo.training.adapters import add_lora, peft_model_of
from torchgrpo.training.context_parallel import ContextGroup
from torchgrpo.training.layer_compilation import compile_layers
from torchgrpo.training.model_loading import (
    load_frozen,
    load_in_4bit,
    load_model,
    make_skeleton,
    name_reference_in_errors,
)
from torchgrpo.training.recomputation import recompute_activations
from torchgrpo.training.reference_model import HostWeights, ReferenceModel
from torchgrpo.training.response_scorer import ResponseScorer
from torchgrpo.training.shard_files import ADAPTER_NAME, find_shard_files, load_shards
from torchgrpo.training.sharding import (
    DEFAULT_SCHEDULE,
    GatherSchedule,
    ShardedModel,
    UnshardedContext,
    distribute_weights,
    keep_float32_gradients,
    no_sharding,
    shard_model,
)


@dataclass(frozen=True)
class LearnerModels:
    """The models of one process of a learner.

    policy: the trained model, wrapped by peft where it is an adapter. scorer: computes the policy's
    log-probs. reference: None where no objective reads it. unsharded_context: runs a computation while the
    policy's full parameters are gathered.
    """

    policy: nn.Module
    scorer: ResponseScorer
    reference: ReferenceModel | None
    unsharded_context: UnshardedContext = no_sharding


def load_base_model(config: Config, plan: Plan) -> PreTrainedModel:
    """Loads `model.name` for a learner of one rank, in 4 bits if so configured."""
    device = torch.device(plan.devices.train_device)
    if not config.train_model.lora.quantized:
        return load_model(config.model, device)
    compute = getattr(torch, plan.learner.autocast or config.model.dtype)
    return load_in_4bit(config.model, device, compute)


def make_models(config: Config, model: PreTrainedModel, plan: Plan) -> LearnerModels:
    """Builds the models of a learner of one rank from the loaded base model.

    The reference is the model that the run started from, whatever the policy becomes or a checkpoint holds.
    The base under a LoRA policy is that model: it serves as the reference without a second copy of the
    weights, and never at the same time as the policy.
    """
    reference = _make_local_reference(config, plan, model.device)
    policy = _prepare_policy(config, plan.learner, model)
    scorer = make_scorer(config, policy, plan.learner, _torch_dtype(plan.learner.autocast))
    if plan.reference.home == "base of the LoRA policy":
        peft_model = peft_model_of(policy)
        assert peft_model is not None
        reference = ReferenceModel(scorer, scoring_context=peft_model.disable_adapter)
    return LearnerModels(policy, scorer, reference)


def make_sharded_models(
    config: Config, plan: Plan, mesh: DeviceMesh, device: torch.device, context: ContextGroup | None
) -> LearnerModels:
    """Builds the models of a rank as shards over `mesh`.

    Every rank calls this at once, and reads its part of the files, or all of them for a base in 4 bits.
    """
    gathered_dtype, offload = plan.learner.gathered_dtype, config.train_model.offload == "all"
    ahead = config.train_model.prefetch_layers
    schedule = GatherSchedule(ahead, config.train_model.reshard_after_forward)
    if config.train_model.lora.quantized:
        root = _shard_4bit_policy(config, plan, mesh, device, schedule)
    else:
        prepare_model = partial(_prepare_policy, config, plan.learner)
        root = _load_and_shard(config.model, prepare_model, gathered_dtype, mesh, device, offload, schedule)
    # FSDP2 records the trained parameters at the first pass. A pass with disabled adapters would show none.
    with torch.no_grad():
        root(lambda: None)
    keep_float32_gradients(root)
    policy = root.model
    scorer = make_scorer(config, policy, plan.learner, unsharded_context=root, context=context)
    reference = None
    if plan.reference.home == "base of the LoRA policy":
        peft_model = peft_model_of(policy)
        assert peft_model is not None
        reference = ReferenceModel(scorer, scoring_context=peft_model.disable_adapter)
    elif plan.reference.home == "learner ranks":
        half, schedule = plan.reference.half_dtype, GatherSchedule(ahead)
        frozen = _shard_frozen_model(config, plan.reference, half, mesh, device, offload, schedule)
        scorer_of_frozen = make_scorer(config, frozen.model, plan.reference, unsharded_context=frozen, context=context)
        reference = ReferenceModel(scorer_of_frozen)
    return LearnerModels(policy, scorer, reference, root)


def make_frozen_scorer(config: Config, plan: Plan, mesh: DeviceMesh | None, device: torch.device) -> ResponseScorer:
    """Builds the frozen scorer of a scorer rank, sharded over `mesh` if there is one."""
    half_dtype = plan.reference.half_dtype
    if mesh is not None:
        with name_reference_in_errors(config):
            root = _shard_frozen_model(config, plan.reference, half_dtype, mesh, device, False, DEFAULT_SCHEDULE)
        return make_scorer(config, root.model, plan.reference, unsharded_context=root)
    autocast = _torch_dtype(half_dtype)
    with name_reference_in_errors(config):
        frozen = load_frozen(config.reference_model, device, autocast)
    return make_scorer(config, _prepare_frozen(config, plan.reference, frozen), plan.reference, autocast)


def _shard_frozen_model(
    config: Config,
    plan: ReferencePlan,
    gathered_dtype: str | None,
    mesh: DeviceMesh,
    device: torch.device,
    offload: bool,
    schedule: GatherSchedule,
) -> ShardedModel:
    """Returns the frozen model's shards, stored in the dtype in which they are gathered.

    Results are the same as with wider shards, in less memory.
    """
    files = config.reference_model
    if gathered_dtype is not None:
        files = replace(files, dtype=gathered_dtype)
    prepare_model = partial(_prepare_frozen, config, plan)
    return _load_and_shard(files, prepare_model, gathered_dtype, mesh, device, offload, schedule)


def _load_and_shard(
    files: ModelConfig,
    prepare_model: Callable[[PreTrainedModel], nn.Module],
    gathered_dtype: str | None,
    mesh: DeviceMesh,
    device: torch.device,
    offload: bool,
    schedule: GatherSchedule,
) -> ShardedModel:
    """Returns this rank's shards of a model.

    Every rank reads its shards from the files where possible; otherwise rank 0 reads all of them. prepare_model: wraps
    or freezes the model. gathered_dtype: dtype in which layers are gathered and computed; None: the model's own.
    """
    shard_files, is_first_rank = find_shard_files(files), dist.get_rank() == 0
    full = load_model(files, torch.device("cpu")) if is_first_rank and shard_files is None else None
    if full is not None:
        check_tied_head(files.name, full, make_skeleton(files))
    with torch.device("meta"):
        empty = prepare_model(make_skeleton(files))
    root = shard_model(empty, mesh, _torch_dtype(gathered_dtype), offload, schedule)
    root.to_empty(device="cpu" if offload else device)
    if shard_files is None:
        distribute_weights(root.model, None if full is None else prepare_model(full))
        return root
    load_shards(root, files, shard_files)
    if peft_model_of(root.model) is not None:
        # Rank 0 makes the adapters. The weights beside them have no values, and nothing touches their memory.
        full = make_skeleton(files).to_empty(device="cpu") if is_first_rank else None
        distribute_weights(root.model, None if full is None else prepare_model(full), ADAPTER_NAME)
    return root


def check_tied_head(name: str, full: nn.Module, skeleton: nn.Module) -> None:
    """Refuses a head of its own that the ranks of a model would drop.

    name: value of `model.name`. full: the loaded model. skeleton: the model by its config, as ranks have it. Raises
    ConfigError.
    """
    names = dict(skeleton.named_parameters())
    unknown = next((tensor for tensor, _ in full.named_parameters() if tensor not in names), None)
    if unknown is not None:
        raise ConfigError(
            f"model.name={name}: config.json ties the output head to the embedding, but the files hold other values "
            f"for {unknown}; set tie_word_embeddings=false in config.json"
        )


def _shard_4bit_policy(
    config: Config, plan: Plan, mesh: DeviceMesh, device: torch.device, schedule: GatherSchedule
) -> ShardedModel:
    """Returns the sharded policy over a base in 4 bits.

    Every rank reads the whole base and keeps its shard of the weights. The scales are no parameters, so every
    rank keeps all of them.
    """
    gathered_dtype = plan.learner.gathered_dtype
    base = load_in_4bit(config.model, device, getattr(torch, gathered_dtype or config.model.dtype))
    policy = _prepare_policy(config, plan.learner, base)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.detach(), 0)
    return shard_model(policy, mesh, _torch_dtype(gathered_dtype), schedule=schedule)


def _prepare_frozen(config: Config, plan: ReferencePlan, model: PreTrainedModel) -> nn.Module:
    """Prepares a loaded model as a reference or a teacher."""
    _compile_if_planned(config, plan, model)
    model.requires_grad_(False).eval()
    return model


def _prepare_policy(config: Config, plan: LearnerPlan, model: PreTrainedModel) -> nn.Module:
    """Prepares a loaded model as the policy."""
    is_compiled = _compile_if_planned(config, plan, model)
    recompute_activations(model, plan.recomputation, is_compiled)
    if config.train_model.lora.enabled:
        return add_lora(model, config.train_model.lora)
    return model


def _compile_if_planned(config: Config, plan: LearnerPlan | ReferencePlan, model: PreTrainedModel) -> bool:
    """Compiles the layers of a model as planned; returns whether they are compiled.

    A plan without the model's config.json does not know whether its layers compile.
    """
    is_compiled = plan.compiles and bool(config.train.compile or can_compile_layers(model.config.to_dict()))
    if is_compiled:
        compile_layers(model)
    return is_compiled


def make_scorer(
    config: Config,
    model: nn.Module,
    plan: LearnerPlan | ReferencePlan,
    autocast: torch.dtype | None = None,
    unsharded_context: UnshardedContext = no_sharding,
    context: ContextGroup | None = None,
) -> ResponseScorer:
    """Builds the scorer of a model for the distribution that the engines sample from.

    The other arguments are as in `ResponseScorer`.
    """
    inference = config.inference_model
    return ResponseScorer(
        model,
        plan.packs,
        chunk_size=plan.chunk_size,
        temperature=inference.temperature if inference.temperature_end is None else None,
        top_p=inference.top_p,
        top_k=inference.top_k,
        min_p=inference.min_p,
        autocast_dtype=autocast,
        unsharded_context=unsharded_context,
        context=context,
    )


def _make_local_reference(config: Config, plan: Plan, learner: torch.device) -> ReferenceModel | None:
    """Builds the frozen reference in this process, or returns None where it is elsewhere.

    learner: the policy's device.
    """
    home, autocast = plan.reference.home, _torch_dtype(plan.reference.half_dtype)
    if home not in ("training GPU", "host memory"):
        return None
    is_on_host = home == "host memory" and not plan.devices.on_cpu
    device = torch.device("cpu") if is_on_host else learner
    with name_reference_in_errors(config):
        frozen = load_frozen(config.reference_model, device, autocast)
    prepared = _prepare_frozen(config, plan.reference, frozen)
    reference = ReferenceModel(make_scorer(config, prepared, plan.reference, autocast))
    if is_on_host:
        reference.scoring_context = HostWeights(frozen, learner).on_device
    return reference


def _torch_dtype(name: str | None) -> torch.dtype | None:
    """Returns the dtype of a name, or None."""
    return None if name is None else getattr(torch, name)
