"""Map of pushed names to views of a vLLM model's live parameters.

    once    model.load_weights(meta tensors) ──recorded copies──▶ name: views of parameters
    push    check names and shapes ─▶ make the tensors ─▶ one foreach copy, casts included

The model's own loading code decides where a tensor belongs, also in the stacked matrices `qkv_proj` and
`gate_up_proj`. The map is used only if its copies write every element of every parameter exactly once.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchgrpo.rollout.weights.weight_update import PublishedTensor, WeightUpdate, nbytes

aten = torch.ops.aten
_MAX_COPY_BYTES = 1 << 30
"""Bytes of pushed tensors that wait for one foreach copy; cast or merged tensors need that memory."""


class UnmappableModelError(Exception):
    """Loading code of a model does more than copy pushed tensors."""


@dataclass(frozen=True)
class _Copy:
    """Copy of a part of a pushed tensor into a part of a parameter.

    view: part of the parameter. begin: its first element. size, stride, offset: of the part of the pushed tensor.
    """

    parameter: str
    view: Tensor
    begin: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def source(self, tensor: Tensor) -> Tensor:
        """Returns the part of a pushed tensor that this copy reads."""
        tensor = tensor.contiguous()
        if (self.size, self.stride, self.offset) == (tensor.shape, tensor.stride(), 0):
            return tensor
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class LiveWeights:
    """Map of pushed names to live parameters.

    layout: addresses, shapes and dtypes of the parameters that the map was made for. copies: by pushed name; empty for
    a name that the model ignores. shapes: by pushed name. parts: first elements of the copies, by parameter.
    padding: views that loading fills with zeros.
    """

    layout: tuple[tuple[int, torch.Size, torch.dtype], ...]
    copies: dict[str, list[_Copy]]
    shapes: dict[str, tuple[int, ...]]
    parts: dict[str, set[int]]
    padding: list[Tensor]

    @classmethod
    def from_model(cls, model: Any, tensors: Sequence[PublishedTensor]) -> "LiveWeights":
        """Maps the tensors of a complete push; writes nothing.

        Raises:
            UnmappableModelError: only the model's own loading code can load the push.
            RuntimeError: the model does not accept a name or a shape.
        """
        _check_tensor_layout(model)
        recorder = _CopyRecorder(dict(model.named_parameters()))
        recorder.load(model, tensors)
        parts = _check_coverage(recorder, {tensor.name: tensor.identity for tensor in tensors})
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        return cls(_layout(model), recorder.copies, shapes, parts, [view for _, _, view in recorder.padding])

    def is_for(self, model: nn.Module, names: frozenset[str]) -> bool:
        """Whether the map holds for these names and for the model's present tensors."""
        return names <= self.copies.keys() and self.layout == _layout(model)

    @torch.no_grad()
    def copy(self, update: WeightUpdate) -> None:
        """Copies a push into the parameters.

        Parameters of which no tensor arrives keep their values.

        Raises:
            RuntimeError: a shape does not fit, or a stacked matrix lacks some of its tensors; nothing was written.
        """
        self._check_update(update)
        if self.padding:
            torch._foreach_zero_(self.padding)
        done: set[tuple[str, int]] = set()
        views: list[Tensor] = []
        sources: list[Tensor] = []
        waiting_bytes = 0
        for tensor in update.tensors:
            copies = [one for one in self.copies[tensor.name] if (one.parameter, one.begin) not in done]
            if not copies:
                continue  # the second name of a tied tensor, or a tensor that the model ignores
            made_tensor = update.make(tensor)
            for one in copies:
                done.add((one.parameter, one.begin))
                views.append(one.view)
                sources.append(one.source(made_tensor))
            waiting_bytes += nbytes(tensor)
            if waiting_bytes >= _MAX_COPY_BYTES:
                torch._foreach_copy_(views, sources)
                views, sources, waiting_bytes = [], [], 0
        if views:
            torch._foreach_copy_(views, sources)

    def _check_update(self, update: WeightUpdate) -> None:
        arriving: dict[str, set[int]] = defaultdict(set)
        for tensor in update.tensors:
            if tensor.shape != self.shapes[tensor.name]:
                raise RuntimeError(
                    f"the push delivered {tensor.name} with shape {tuple(tensor.shape)}; the engine's model has "
                    f"{self.shapes[tensor.name]}. Push the model that the engine was started with"
                )
            for one in self.copies[tensor.name]:
                arriving[one.parameter].add(one.begin)
        incomplete = [name for name, begins in arriving.items() if begins != self.parts[name]]
        if incomplete:
            raise RuntimeError(f"the push delivered only some shards of {len(incomplete)} matrices: {incomplete[:3]}")


@dataclass(eq=False)
class _CopyRecorder(TorchDispatchMode):
    """Dispatch mode that records copies into parameters and executes none.

    copies, padding (parameter, first element, view): see `LiveWeights`.
    """

    parameters: dict[str, nn.Parameter]
    copies: dict[str, list[_Copy]] = field(default_factory=dict)
    padding: list[tuple[str, int, Tensor]] = field(default_factory=list)
    _names: dict[int, str] = field(default_factory=dict)
    _probes: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owners = {_storage_key(parameter): name for name, parameter in self.parameters.items()}

    def load(self, model: Any, tensors: Iterable[PublishedTensor]) -> None:
        """Runs the model's loading code on meta tensors; raises as `LiveWeights.from_model`."""
        try:
            with torch.no_grad(), self:
                model.load_weights(self._meta_tensors(tensors))
        except (KeyError, ValueError, AssertionError) as error:
            shape = tuple(self._probes[-1].shape)
            raise RuntimeError(
                f"the engine's model does not accept the pushed tensor {list(self.copies)[-1]} of shape {shape}: "
                f"{type(error).__name__}: {error}. Push the model that the engine was started with"
            ) from error
        except (RuntimeError, IndexError) as error:  # such as a read of a value that a meta tensor does not have
            raise UnmappableModelError(f"{type(error).__name__} at {list(self.copies)[-1]}: {error}") from error

    def _meta_tensors(self, tensors: Iterable[PublishedTensor]) -> Iterator[tuple[str, Tensor]]:
        for tensor in tensors:
            probe = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            self.copies[tensor.name] = []
            self._names[_storage_key(probe)] = tensor.name
            self._probes.append(probe)  # keeps the storage, which identifies the tensor
            yield tensor.name, probe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        target = args[0]
        parameter = self._owners.get(_storage_key(target)) if isinstance(target, Tensor) else None
        if parameter is None or not target.is_contiguous():
            raise UnmappableModelError(f"loading calls {func} on other memory than consecutive elements of a parameter")
        begin = target.storage_offset() - self.parameters[parameter].storage_offset()
        if func is aten.copy_.default and (name := self._names.get(_storage_key(args[1]))) is not None:
            source = args[1]
            if source.shape != target.shape:
                raise AssertionError(f"the model's shape is {tuple(target.shape)}")
            place = tuple(source.shape), source.stride(), source.storage_offset()
            self.copies[name].append(_Copy(parameter, target, begin, *place))
        elif func is aten.zero_.default or (func is aten.fill_.Scalar and args[1] == 0):
            self.padding += [(parameter, begin, target)] if target.numel() else []
        else:
            raise UnmappableModelError(f"loading calls {func} on {parameter}")
        return target


def _storage_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _layout(model: nn.Module) -> tuple[tuple[int, torch.Size, torch.dtype], ...]:
    return tuple((parameter.data_ptr(), parameter.shape, parameter.dtype) for parameter in model.parameters())


def _check_tensor_layout(model: nn.Module) -> None:
    """Raises UnmappableModelError if processing after loading changed the layout of a parameter."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for prefix, layer in model.named_modules():
        loaded = get_layerwise_info(layer).restore_metadata[0]
        for name, parameter in layer.named_parameters(recurse=False):
            before = loaded.get(name, parameter)  # vLLM has no record of biases, which it never processes
            if (before.shape, before.dtype, before.stride()) != (parameter.shape, parameter.dtype, parameter.stride()):
                raise UnmappableModelError(f"vLLM changed the layout of {prefix}.{name} after loading")


def _check_coverage(recorder: _CopyRecorder, identities: dict[str, Any]) -> dict[str, set[int]]:
    """Returns the first elements of all copies, by parameter.

    Tied names count once.

    Raises:
        UnmappableModelError: the copies of a parameter overlap or leave a gap, or a pushed tensor is read in part.
    """
    spans: dict[str, set[tuple[int, int, Any]]] = defaultdict(set)
    for name, probe in zip(recorder.copies, recorder._probes, strict=True):
        copies = recorder.copies[name]
        if copies and sum(one.view.numel() for one in copies) != probe.numel():
            raise UnmappableModelError(f"loading reads a part of {name}")
        for one in copies:
            spans[one.parameter].add((one.begin, one.begin + one.view.numel(), identities[name]))
    parts = {name: {begin for begin, _, _ in found} for name, found in spans.items()}
    for name, begin, view in recorder.padding:
        spans[name].add((begin, begin + view.numel(), None))
    for name, parameter in recorder.parameters.items():
        edges = [(0, 0), *sorted(span[:2] for span in spans[name]), (parameter.numel(), parameter.numel())]
        if any(before[1] != after[0] for before, after in pairwise(edges)):
            raise UnmappableModelError(f"the push does not write every element of {name} exactly once")
    return parts
