"""Dispatch mode that prices the kernels of a step, with the fusion of compiled layers.

    seconds of a kernel = max(FLOPs / rate of its kind, bytes / memory rate, launch)

An eager operation is a kernel that reads its inputs and writes its results. In a compiled layer all operations between
two matrix products or attentions are one kernel. The kernel reads each tensor from outside once, and writes each
result that a later kernel reads or that outlives the phase. A priced time is not a measurement.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from config.schema.machine import MachineConfig
from torchgrpo.plan.model_shape import GIB, TERA
from torchgrpo.run.dry_run.flops import PRODUCT_FLOPS, FlopFormulas
from torchgrpo.run.dry_run.tensor_tracker import OperationObserver
from torchgrpo.training.logit_operations import NAMESPACE

PRODUCT_SHARE, WIDE_PRODUCT_SHARE = 0.708, 0.05
"""Reachable share of `machine.gpu_tflops` in matrix products of half-precision factors, and of float32 factors."""
ATTENTION_SHARE, ATTENTION_BACKWARD_SHARE = 0.404, 0.283
"""Reachable share of `machine.gpu_tflops` in packed attention."""
BANDWIDTH_SHARE = 0.81
"""Reachable share of `machine.gpu_bandwidth_gib_s`."""
LAUNCH_SECONDS = 3e-6
"""Minimum seconds of a kernel."""
_FREE_OPERATIONS = frozenset(
    {
        *("detach", "alias", "lift_fresh", "_local_scalar_dense", "set_", "_unsafe_view"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    }
)
"""Operations that read and write nothing."""
_LOOKUPS = frozenset({"gather", "embedding", "index_select", "scatter_add_", "index"})
"""Operations that touch only some elements of their first tensor."""
_REREADING_OPERATIONS = frozenset({"token_statistics"})
"""Operations that read their first tensor twice."""


@dataclass
class Kernel:
    """FLOPs and bytes of one kernel. share: reachable share of `machine.gpu_tflops`."""

    flops: int = 0
    share: float = PRODUCT_SHARE
    bytes: int = 0
    read_bytes: "dict[_Storage, int]" = field(default_factory=dict, repr=False)

    def seconds(self, rates: MachineConfig) -> float:
        """Prices the kernel."""
        arithmetic = self.flops / (self.share * rates.gpu_tflops * TERA)
        return max(arithmetic, self.bytes / (BANDWIDTH_SHARE * rates.gpu_bandwidth_gib_s * GIB), LAUNCH_SECONDS)


@dataclass(eq=False)
class _Storage:
    """A tensor's storage. maker: kernel that made the contents and has not written them."""

    bytes: int
    maker: Kernel | None
    reference: weakref.ref[Any]


class PriceTracker(OperationObserver):
    """Collects the kernels of a step.

    is_compiled: whether the current operations belong to a compiled layer.
    """

    def __init__(self, formulas: FlopFormulas) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.is_compiled = False
        self._flop_formulas = FlopCounterMode(display=False, custom_mapping={**PRODUCT_FLOPS, **formulas}).flop_registry
        self._open_kernel: Kernel | None = None
        self._storages: dict[int, _Storage] = {}

    def __exit__(self, *error: Any) -> None:
        """Ends a phase: a fused kernel has written each result that still exists."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.end_kernel()
        for storage in [*self._storages.values()]:
            self._write(storage)

    def end_kernel(self) -> None:
        """Ends the fused kernel: later operations belong to another one."""
        self._open_kernel = None

    def on_operation(self, func: Any, arguments: Any, out: Any) -> None:
        name = func.name().partition("::")[2].partition(".")[0]
        inputs, results = _tensors(arguments), _tensors(out)
        if func.is_view or func.namespace not in ("aten", NAMESPACE):
            return
        if name in _FREE_OPERATIONS or not (inputs or results):
            return
        flops = self._count_flops(func, arguments, out)
        fuses = self.is_compiled and not flops
        kernel = self._fused_kernel() if fuses else self._new_kernel()
        if flops:
            kernel.flops, kernel.share = flops, _product_share(name, inputs)
        table = self._storage(inputs[0]) if name in _LOOKUPS else None
        for tensor in inputs:
            storage = self._storage(tensor)
            if storage.maker is not kernel:
                self._read(kernel, storage, 0 if storage is table else _size(tensor))
        if name in _REREADING_OPERATIONS:
            kernel.bytes += _size(inputs[0])
        for tensor in results:
            storage = self._storage(tensor)
            if storage is table:
                continue
            if fuses and storage not in kernel.read_bytes:
                storage.maker = kernel
            else:
                kernel.bytes += _size(tensor)

    def _count_flops(self, func: Any, arguments: Any, out: Any) -> int:
        formula = self._flop_formulas.get(func._overloadpacket)
        args, kwargs = arguments
        return 0 if formula is None else int(formula(*args, **(kwargs or {}), out_val=out))

    def _new_kernel(self) -> Kernel:
        self.kernels.append(Kernel())
        return self.kernels[-1]

    def _fused_kernel(self) -> Kernel:
        self._open_kernel = self._open_kernel or self._new_kernel()
        return self._open_kernel

    def _read(self, kernel: Kernel, storage: _Storage, size: int) -> None:
        """Counts a read of a kernel; views of one storage count at most the storage."""
        if storage.maker is not None and storage.maker is self._open_kernel:
            self.end_kernel()
        self._write(storage)
        before = kernel.read_bytes.get(storage, 0)
        kernel.read_bytes[storage] = min(before + size, max(before, storage.bytes))
        kernel.bytes += kernel.read_bytes[storage] - before

    def _write(self, storage: _Storage) -> None:
        """Counts the write of contents that a fused kernel made."""
        if storage.maker is not None:
            storage.maker.bytes += storage.bytes
            storage.maker = None

    def _storage(self, tensor: Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            reference = weakref.ref(storage, lambda _: self._storages.pop(key, None))
            self._storages[key] = _Storage(storage.nbytes(), None, reference)
        return self._storages[key]


@contextmanager
def fuse_layers(tracker: PriceTracker, layers: Iterable[nn.Module]) -> Iterator[None]:
    """Prices calls of `layers` inside the context, and later their backward pass, as compiled code.

    Compiled code of the backward pass begins at the gradient of a layer's result.
    """

    def begin(*_: object) -> None:
        tracker.end_kernel()
        tracker.is_compiled = True

    def end(layer: nn.Module, arguments: object, out: Any) -> None:
        tracker.end_kernel()
        tracker.is_compiled = False
        for tensor in _tensors(out):
            if tensor.requires_grad:
                tensor.register_hook(begin)

    hooks: tuple[Callable[[nn.Module], Any], ...] = (
        lambda layer: layer.register_forward_pre_hook(begin),
        lambda layer: layer.register_forward_hook(end),
    )
    with ExitStack() as exit_stack:
        for layer in layers:
            for register in hooks:
                exit_stack.callback(register(layer).remove)
        yield


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _size(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's distinct elements: an expanded dimension counts once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


def _product_share(name: str, inputs: list[Tensor]) -> float:
    if "attention" in name:
        return ATTENTION_BACKWARD_SHARE if "backward" in name else ATTENTION_SHARE
    factor = inputs[1]  # the first tensor of `addmm` is the sum
    return PRODUCT_SHARE if factor.element_size() <= 2 else WIDE_PRODUCT_SHARE
