"""Learner worker with a context around each phase, and labels of its tensors for `MemoryTracker`.

score ──▶ forward ──▶ backward ──▶ forward ──▶ backward ... ──▶ clip ──▶ optimizer step

The kind of a tensor depends on the code that makes it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from torchgrpo.plan.plan import Plan
from torchgrpo.run.dry_run.tensor_tracker import HOST_KIND, MemoryTracker
from torchgrpo.training.learner_models import LearnerModels
from torchgrpo.training.learner_state import optimizer_tensors
from torchgrpo.training.optimizer_offload import OffloadedStates
from torchgrpo.training.published_weights import push_tensor_source
from torchgrpo.training.worker import Worker


class MeasuredWorker(Worker):
    """The worker of a learner rank, with a context manager around each phase.

    measure_phase: makes the context manager of a phase from its name.
    """

    measure_phase: Callable[[str], AbstractContextManager[Any]]

    def __init__(self, plan: Plan, models: LearnerModels) -> None:
        super().__init__(plan.config, models, push_tensor_source(plan.config, plan))
        self.measure_phase = lambda phase: nullcontext()

    def optimizer_states(self) -> list[Tensor]:
        return list(optimizer_tensors(self.model, self.optimizer).values())

    def make_gradients(self) -> list[Tensor]:
        """Makes zero gradients for all trained parameters, and returns them."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        gradients = [torch.zeros_like(parameter, dtype=parameter.grad_dtype) for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return gradients

    def phase(self, name: str) -> AbstractContextManager[Any]:
        return self.measure_phase(name)


_KIND_BY_PHASE = {
    "score": "activations",
    "forward": "activations",
    "backward": "temporary",
    "clip": "temporary",
    "optimizer step": "temporary",
}
"""Kind of the tensors that a phase makes, unless another rule labels them."""
_HOST_KINDS = {
    "none": (),
    "optimizer": ("optimizer",),
    "all": ("parameters", "gradients", "optimizer", "reference", "clip", "optimizer step"),
}
"""Kinds in host memory, and phases whose new tensors are in host memory, by `train_model.offload`."""


@contextmanager
def label_tensors(worker: MeasuredWorker, memory: MemoryTracker, microbatches: int) -> Iterator[None]:
    """Tracks the worker's phases with `memory` inside the context, and labels the worker's tensors.

    If a step has several microbatches, the measured microbatch adds to gradients of earlier microbatches.
    """
    host_kinds = _HOST_KINDS[worker.config.train_model.offload]

    def kind_or_host(name: str, kind: str) -> str:
        return HOST_KIND if name in host_kinds else kind

    def add(kind: str, tensors: Sequence[Tensor | None]) -> None:
        memory.add(kind_or_host(kind, kind), [tensor for tensor in tensors if tensor is not None])

    add("parameters", list(worker.model.parameters()))
    add("optimizer", worker.optimizer_states())
    if worker.reference is not None and worker.reference.scorer.model is not worker.model:
        add("reference", list(worker.reference.scorer.model.parameters()))

    def measure_phase(name: str) -> AbstractContextManager[Any]:
        return memory.track_phase(name, kind_or_host(name, _KIND_BY_PHASE[name]))

    with patch.object(worker, "measure_phase", measure_phase), ExitStack() as exit_stack:
        for name, kind in _KIND_BY_FSDP_METHOD.items():
            method = getattr(FSDPParamGroup, name)
            exit_stack.enter_context(patch.object(FSDPParamGroup, name, _label_method(memory, kind, method, add)))
        for parameter in worker.model.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(
                    lambda updated_parameter: add("gradients", [updated_parameter.grad])
                )
                exit_stack.callback(hook.remove)
        exit_stack.enter_context(_label_copied_tensors(worker, memory, add))
        if microbatches > 1:
            accumulate_gradients = worker._accumulate_gradients

            def accumulate_after_others(*arguments: Any) -> Any:
                add("gradients", worker.make_gradients())
                return accumulate_gradients(*arguments)

            exit_stack.enter_context(patch.object(worker, "_accumulate_gradients", accumulate_after_others))
        yield


AddTensors = Callable[[str, Sequence[Tensor | None]], None]
_KIND_BY_FSDP_METHOD = {
    "unshard": "gathered parameters",
    "wait_for_unshard": "gathered parameters",
    "post_backward": "unsharded gradients",
}
"""Kind of the tensors that a method of FSDP2 makes; FSDP2's own memory tracker patches the same methods."""


def _label_method(memory: MemoryTracker, kind: str, method: Callable[..., Any], add: AddTensors) -> Callable[..., Any]:
    def labeled_method(group: FSDPParamGroup, *arguments: Any, **keywords: Any) -> Any:
        with memory.label_new_tensors(kind):
            out = method(group, *arguments, **keywords)
        add("gradients", [parameter.sharded_param.grad for parameter in group.fsdp_params])
        return out

    return labeled_method


@contextmanager
def _label_copied_tensors(worker: MeasuredWorker, memory: MemoryTracker, add: AddTensors) -> Iterator[None]:
    """Labels tensors that are copied to the device: reference and optimizer states.

    The reference is copied for scoring, optimizer states for the optimizer step. All fake tensors are on one device, so
    only the label shows that a tensor has been copied.
    """
    states_on_device = OffloadedStates.on_device

    @contextmanager
    def label_states(states: OffloadedStates) -> Iterator[None]:
        with states_on_device(states):
            memory.add("optimizer", worker.optimizer_states())
            yield
        add("optimizer", worker.optimizer_states())

    with ExitStack() as exit_stack:
        exit_stack.enter_context(patch.object(OffloadedStates, "on_device", label_states))
        if worker.reference is not None:
            scoring_context = worker.reference.scoring_context

            @contextmanager
            def label_reference() -> Iterator[None]:
                with ExitStack() as reference_stack:
                    with memory.label_new_tensors("reference"):
                        reference_stack.enter_context(scoring_context())
                    yield

            exit_stack.enter_context(patch.object(worker.reference, "scoring_context", label_reference))
        yield
