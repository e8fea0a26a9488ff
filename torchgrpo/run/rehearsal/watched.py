"""The learner's worker, unchanged but that its phases are watched; and what its tensors are, told by who makes them.

score ──▶ forward ──▶ backward ──▶ forward ──▶ backward ... ──▶ clip ──▶ optimizer step
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from torchgrpo.plan.plan import Plan
from torchgrpo.run.rehearsal.tracking import HOST, Memory
from torchgrpo.training.host_states import HostStates
from torchgrpo.training.learner_models import Models
from torchgrpo.training.learner_state import optimizer_tensors
from torchgrpo.training.published_weights import pushed_tensors
from torchgrpo.training.worker import Worker


class WatchedWorker(Worker):
    """The worker of a learner rank. watch: entered for each phase, by its name."""

    watch: Callable[[str], AbstractContextManager[Any]]

    def __init__(self, plan: Plan, models: Models) -> None:
        super().__init__(plan.config, models, pushed_tensors(plan.config, plan))
        self.watch = lambda phase: nullcontext()

    def optimizer_states(self) -> list[Tensor]:
        return list(optimizer_tensors(self.model, self.optimizer).values())

    def make_gradients(self) -> list[Tensor]:
        """Of every parameter that is trained."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        gradients = [torch.zeros_like(parameter) for parameter in trained]
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
        return gradients

    def phase(self, name: str) -> AbstractContextManager[Any]:
        return self.watch(name)


_MAKES = {
    "score": "activations",
    "forward": "activations",
    "backward": "temporary",
    "clip": "temporary",
    "optimizer step": "temporary",
}
"""The kind of what a phase makes, where nothing else is known of it."""
_AWAY = {
    "none": (),
    "optimizer": ("optimizer",),
    "all": ("parameters", "gradients", "optimizer", "reference", "clip", "optimizer step"),
}
"""Kinds, and phases with what they make, that are in host memory by `train_model.offload`."""


@contextmanager
def kinds_told(worker: WatchedWorker, memory: Memory, microbatches: int) -> Iterator[None]:
    """`memory` sees the phases of the worker inside, and learns of what kind its tensors are.

    Where a step has several microbatches, the one that it sees meets the gradients of others.
    """
    away = _AWAY[worker.config.train_model.offload]

    def home(name: str, kind: str) -> str:
        return HOST if name in away else kind

    def add(kind: str, tensors: Sequence[Tensor | None]) -> None:
        memory.add(home(kind, kind), [tensor for tensor in tensors if tensor is not None])

    add("parameters", list(worker.model.parameters()))
    add("optimizer", worker.optimizer_states())
    if worker.reference is not None and worker.reference.scorer.model is not worker.model:
        add("reference", list(worker.reference.scorer.model.parameters()))
    watch = patch.object(worker, "watch", lambda name: memory.phase(name, home(name, _MAKES[name])))
    with watch, ExitStack() as inside:
        for name, kind in _MADE_BY.items():
            method = getattr(FSDPParamGroup, name)
            inside.enter_context(patch.object(FSDPParamGroup, name, _making(memory, kind, method, add)))
        for parameter in worker.model.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(lambda one: add("gradients", [one.grad]))
                inside.callback(hook.remove)
        inside.enter_context(_visits(worker, memory, add))
        if microbatches > 1:
            learn = worker._learn

            def after_others(*given: Any) -> Any:
                add("gradients", worker.make_gradients())
                return learn(*given)

            inside.enter_context(patch.object(worker, "_learn", after_others))
        yield


Add = Callable[[str, Sequence[Tensor | None]], None]
_MADE_BY = {
    "unshard": "gathered parameters",
    "wait_for_unshard": "gathered parameters",
    "post_backward": "gradients on their way",
}
"""What FSDP2 makes where; its own memory tracker looks at these methods too."""


def _making(memory: Memory, kind: str, method: Callable[..., Any], add: Add) -> Callable[..., Any]:
    def labelled(group: FSDPParamGroup, *given: Any, **named: Any) -> Any:
        with memory.making(kind):
            out = method(group, *given, **named)
        add("gradients", [parameter.sharded_param.grad for parameter in group.fsdp_params])
        return out

    return labelled


@contextmanager
def _visits(worker: WatchedWorker, memory: Memory, add: Add) -> Iterator[None]:
    """What visits the device from host memory: a reference to score, optimizer states for the step. Fake tensors are
    all on one device, so a visit is told by its name."""
    visit_of_states = HostStates.visit

    @contextmanager
    def states_visit(states: HostStates) -> Iterator[None]:
        with visit_of_states(states):
            memory.add("optimizer", worker.optimizer_states())
            yield
        add("optimizer", worker.optimizer_states())

    with ExitStack() as inside:
        inside.enter_context(patch.object(HostStates, "visit", states_visit))
        if worker.reference is not None:
            visit = worker.reference.visit

            @contextmanager
            def reference_visits() -> Iterator[None]:
                with ExitStack() as there:
                    with memory.making("reference"):
                        there.enter_context(visit())
                    yield

            inside.enter_context(patch.object(worker.reference, "visit", reference_visits))
        yield
