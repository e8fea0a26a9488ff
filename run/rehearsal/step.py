"""One optimizer step of one learner rank, with the learner's own code, on tensors without memory.

    score ──▶ forward ──▶ backward ──▶ clip ──▶ optimizer step      the fullest moment of each, in bytes by kind
              once more: FLOPs, bytes moved, bytes of each collective

The process group is PyTorch's `fake` one: a world of any size in this process, whose collectives do nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from plan.plan import Plan, reference_at
from run.rehearsal.fakes import longest_rows, make_fake, without_memory
from run.rehearsal.tracking import Held, Memory, Traffic
from training.aggregation import BatchTotals
from training.batch import Batch
from training.grpo_loss import GRPOLoss
from training.learner_models import make_scorer
from training.master_weights import MasterWeights
from training.model import add_lora, bare_model, outside_linear_layers
from training.optimizer import JointOptimizer, make_optimizer
from training.sharding import Sharded, learner_mesh, shard

T = TypeVar("T")


Peaks = dict[str, Held]
"""By phase, the bytes of each kind at its fullest moment."""


@dataclass(frozen=True)
class Rehearsal:
    """What one rank does in an optimizer step.

    flops, moved: of one microbatch, forward and backward; bytes that its operations read and write, each for itself.
    sent, calls: by collective, of one microbatch; bytes as `Traffic` counts them.
    moved_by_step: bytes that clipping and the optimizer read and write.
    """

    peaks: Peaks
    flops: int
    moved: int
    sent: Counter[str]
    calls: Counter[str]
    moved_by_step: int


def fullest(peaks: Peaks) -> str:
    """The phase with the peak."""
    return max(peaks, key=lambda phase: peaks[phase].total())


def peak(peaks: Peaks) -> int:
    """Bytes of the fullest moment of all."""
    return peaks[fullest(peaks)].total()


def rehearse(plan: Plan) -> Rehearsal:
    """plan: of a model whose config.json is known."""
    with _rehearsed(plan) as rank:
        traffic, step, flops = Traffic(), Traffic(), FlopCounterMode(display=False)
        with traffic, flops:
            rank.loss().backward()
        with step:
            rank.clip()
            rank.optimizer.step()
        peaks = _peaks(plan, rank)
    return Rehearsal(peaks, flops.get_total_flops(), traffic.moved, traffic.sent, traffic.calls, step.moved)


def rehearse_memory(plan: Plan) -> Peaks:
    """The peaks of `rehearse` alone, in half of its time."""
    with _rehearsed(plan) as rank:
        return _peaks(plan, rank)


@contextmanager
def _rehearsed(plan: Plan) -> Iterator["_Rank"]:
    batch = longest_rows(plan)
    with _world(plan) as mesh, without_memory(as_on_a_gpu=not plan.devices.on_cpu):
        yield _Rank(plan, mesh, batch)


def _peaks(plan: Plan, rank: "_Rank") -> Peaks:
    memory = Memory()
    _remember(rank, memory)
    _step(rank, memory)
    return {phase: _on_device(plan, phase, held) for phase, held in memory.peaks.items()}


def _on_device(plan: Plan, phase: str, held: Held) -> Held:
    """Without what is offloaded: fake tensors are all on one device. States alone visit the GPU for the step."""
    away = {
        "none": set(),
        "optimizer": {"optimizer"},
        "all": {"optimizer", "parameters", "gradients", "reference"},
    }
    offload = plan.config.train_model.offload
    if offload == "optimizer" and phase == "optimizer step":
        return held
    return Counter({kind: size for kind, size in held.items() if kind not in away[offload]})


@contextmanager
def _world(plan: Plan) -> Iterator[DeviceMesh | None]:
    """The mesh of all ranks, made outside the fake mode; None for one."""
    ranks = plan.devices.ranks
    if ranks == 1:
        yield None
        return
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield learner_mesh("cpu", ranks, plan.learner.shard_size)
    finally:
        dist.destroy_process_group()


class _Model:
    """A model without memory that scores the batch, in shards over a mesh if there is one. Inside `without_memory`."""

    def __init__(self, plan: Plan, mesh: DeviceMesh | None, model: nn.Module) -> None:
        make_fake(model)
        self.model = model
        if mesh is None:
            autocast = plan.learner.autocast
            half = None if autocast is None else getattr(torch, autocast)
            self.scorer = make_scorer(plan.config, model, plan, half)
        else:
            self.scorer = make_scorer(plan.config, model, plan, within=_sharded(plan, model, mesh))

    def score(self, batch: Batch) -> Tensor:
        return self.scorer(batch.tokens, batch.temperature).log_prob


class _Rank:
    """What a learner rank holds and does. The optimizer has made its first step. Inside `without_memory`.

    reference: None where it is not on the rank's device between steps, or the policy itself serves.
    """

    def __init__(self, plan: Plan, mesh: DeviceMesh | None, batch: Batch) -> None:
        config = plan.config
        self.batch = batch
        self.several = plan.learner.microbatches > 1
        self.policy = _Model(plan, mesh, _policy(plan))
        self.reference: _Model | None = None
        self.visitor: Callable[[], _Model] | None = None
        if reference_at(plan) in ("resident", "sharded"):
            self.reference = _Model(plan, mesh, _frozen(plan))
        if reference_at(plan) == "visiting":
            self.visitor = lambda: _Model(plan, mesh, _frozen(plan))
        self.objective = GRPOLoss(self.policy.scorer, config.policy)
        assert batch.mask is not None, "`longest_rows` fills it in"
        self.totals = BatchTotals.of(config.policy, batch.mask)
        self.optimizer = make_optimizer(self.policy.model, config.optimizer)
        self.limit = config.optimizer.clip_grad_norm or float("inf")
        self.policy.model.train()
        self.fill_gradients()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.policy.model.parameters() if parameter.requires_grad]

    def fill_gradients(self) -> None:
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)

    def loss(self) -> Tensor:
        return GRPOLoss.total(self.objective(self.batch, self.totals))

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.trained, self.limit)


def _policy(plan: Plan) -> nn.Module:
    config = plan.config
    model = bare_model(config.model)
    if config.train.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if not config.train_model.lora.enabled:
        return model
    with torch.device("meta"):
        adapted: nn.Module = add_lora(model, config.train_model.lora)
    return adapted


def _frozen(plan: Plan) -> nn.Module:
    """The reference: one rank keeps what autocast rounds rounded, several keep all in the dtype that they gather."""
    config = plan.config.model
    half = plan.learner.autocast or plan.learner.gathered_dtype or config.dtype
    model = bare_model(replace(config, dtype=half))
    model.requires_grad_(False).eval()
    if plan.learner.autocast is not None:
        kept = outside_linear_layers(model)
        for name, parameter in model.named_parameters():
            if name in kept:
                parameter.data = parameter.data.to(getattr(torch, config.dtype))
    return model


def _sharded(plan: Plan, model: nn.Module, mesh: DeviceMesh) -> Sharded:
    name = plan.learner.gathered_dtype
    return shard(model, mesh, None if name is None else getattr(torch, name))


def _remember(rank: _Rank, memory: Memory) -> None:
    """What is there between two steps."""
    rank.optimizer.zero_grad()
    memory.add("parameters", rank.policy.model.parameters())
    memory.add("optimizer", _states(rank.optimizer))
    if rank.reference is not None:
        memory.add("reference", rank.reference.model.parameters())


def _step(rank: _Rank, memory: Memory) -> None:
    with _kinds(memory, rank):
        with torch.no_grad(), memory.phase("score", "activations"):
            _score(rank, memory)
        if rank.several:  # the gradients of the microbatches before this one
            rank.fill_gradients()
        memory.add("gradients", [p.grad for p in rank.trained if p.grad is not None])
        with memory.phase("forward", "activations"):
            loss = rank.loss()
        with memory.phase("backward", "temporary"):
            loss.backward()
        del loss
        with memory.phase("clip", "temporary"):
            rank.clip()
        with memory.phase("optimizer step", "temporary"):
            rank.optimizer.step()
    rank.optimizer.zero_grad()


def _score(rank: _Rank, memory: Memory) -> None:
    """The reference's pass over the batch, or the policy's own before its first update."""
    scored = rank.reference or rank.policy
    if rank.visitor is not None:
        with memory.making("reference"):
            scored = rank.visitor()
    scored.score(rank.batch)


@contextmanager
def _kinds(memory: Memory, rank: _Rank) -> Iterator[None]:
    """Tells gathered parameters and gradients from other tensors, inside."""
    with ExitStack() as inside:
        for name, kind in _MADE_BY.items():
            method = getattr(FSDPParamGroup, name)
            inside.enter_context(patch.object(FSDPParamGroup, name, _making(memory, kind, method)))
        for parameter in rank.trained:
            hook = parameter.register_post_accumulate_grad_hook(lambda p: memory.add("gradients", [p.grad]))
            inside.callback(hook.remove)
        yield


_MADE_BY = {
    "unshard": "gathered parameters",
    "wait_for_unshard": "gathered parameters",
    "post_backward": "gradients on their way",
}
"""What FSDP2 makes where; its own memory tracker looks at these methods too."""


def _making(memory: Memory, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def labelled(group: FSDPParamGroup, *given: Any, **named: Any) -> Any:
        with memory.making(kind):
            out = method(group, *given, **named)
        grads = [parameter.sharded_param.grad for parameter in group.fsdp_params]
        memory.add("gradients", [grad for grad in grads if grad is not None])
        return out

    return labelled


def _states(optimizer: Optimizer) -> list[Tensor]:
    """All that an optimizer remembers."""
    if isinstance(optimizer, MasterWeights):
        return [*_states(optimizer.inner), *optimizer.remainders.values()]
    if isinstance(optimizer, JointOptimizer):
        return [tensor for member in optimizer.members for tensor in _states(member)]
    return [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]
