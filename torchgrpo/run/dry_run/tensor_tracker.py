"""Dispatch modes that count live bytes by kind, bytes moved, and bytes sent by collectives.

The trackers are modes of PyTorch's dispatcher, which receive every operation with its inputs and outputs. A tracker
keeps no tensor alive.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BytesByKind = Counter[str]
"""Bytes by kind of tensor."""
HOST_KIND = "in host memory"
"""Kind of tensors in host memory, which are not counted as memory of the rank's device."""


def is_device_query(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation only queries the device of a fake tensor.

    These are half of all calls, and slow unless a mode returns the device directly.
    """
    return func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor)


class OperationObserver(TorchDispatchMode):
    """Receives every operation on plain tensors; operations on a sharded tensor arrive for its shards."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outside: object = None

    def __enter__(self) -> Any:
        self._outside = active_fake_mode()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented
        if is_device_query(func, args):
            return args[0].fake_device
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # the fake implementation makes a new tensor, unlike the real one
        out = func(*args, **(kwargs or {}))
        if active_fake_mode() is self._outside:  # otherwise DTensor is deriving shapes of shards
            self.on_operation(func, (args, kwargs), out)
        return out

    def on_operation(self, func: Any, arguments: Any, out: Any) -> None:
        """Handles an operation with its arguments and its result."""
        raise NotImplementedError


class MemoryTracker(OperationObserver):
    """Tracks the bytes of all live storages by kind, without those of `HOST_KIND`.

    kind: kind of new tensors. peaks: peak bytes by phase and kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind = "activations"
        self.peaks: dict[str, BytesByKind] = {}
        self._phase = ""
        self._live_bytes: BytesByKind = Counter()
        self._storages: dict[int, tuple[int, str, weakref.ref[Any]]] = {}

    def add(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Tracks existing tensors, which get this kind."""
        for tensor in tensors:
            self._track(tensor, kind, relabel=True)

    @contextmanager
    def track_phase(self, name: str, kind: str) -> Iterator[None]:
        """Tracks the operations inside the context as one phase.

        New tensors have this kind, unless `label_new_tensors` sets another kind.
        """
        self._phase = name
        self.peaks.setdefault(name, Counter())
        with self, self.label_new_tensors(kind):
            yield

    @contextmanager
    def label_new_tensors(self, kind: str) -> Iterator[None]:
        """Sets the kind of tensors that are made inside the context."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def on_operation(self, func: Any, arguments: Any, out: Any) -> None:
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._track(leaf, self.kind)
        if self._live_bytes.total() > self.peaks[self._phase].total():
            self.peaks[self._phase] = self._live_bytes.copy()

    def _track(self, tensor: Tensor, kind: str, relabel: bool = False) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = (0, kind, weakref.ref(storage, lambda _: self._forget(key)))
        _, known_kind, _ = self._storages[key]
        self._resize(key, storage.size(), kind if relabel else known_kind)

    def _resize(self, key: int, size: int, kind: str) -> None:
        before, known_kind, reference = self._storages[key]
        self._count(known_kind, -before)
        self._count(kind, size)
        self._storages[key] = (size, kind, reference)

    def _forget(self, key: int) -> None:
        size, kind, _ = self._storages.pop(key)
        self._count(kind, -size)

    def _count(self, kind: str, change: int) -> None:
        if kind != HOST_KIND:
            self._live_bytes[kind] += change

    def __enter__(self) -> Any:
        """Enters the mode, and patches `resize_` of storages.

        FSDP2 frees parameters by resizing their storages, which is not an operation.
        """
        resize = self._resize_of_torch = torch.UntypedStorage.resize_

        def tracked_resize(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage._cdata in self._storages:
                self._resize(storage._cdata, size, self._storages[storage._cdata][1])

        torch.UntypedStorage.resize_ = tracked_resize  # type: ignore[method-assign,assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize_of_torch  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]


COLLECTIVES = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
}


class TrafficTracker(OperationObserver):
    """Tracks the bytes that operations read and write, and the bytes and calls of collectives.

    moved_bytes: bytes of all operations except views, each counted separately. sent_bytes: bytes by collective of the
    whole tensor that a group of ranks gathers or sums, or of the tensor that a rank exchanges with others. A rank's
    link carries (n - 1) / n of these bytes among n ranks, twice as many for an all-reduce. collective_calls: calls by
    collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved_bytes = 0
        self.sent_bytes: Counter[str] = Counter()
        self.collective_calls: Counter[str] = Counter()

    def on_operation(self, func: Any, arguments: Any, out: Any) -> None:
        name = func.name().partition("::")[2].partition(".")[0]
        if func.namespace in ("c10d", "_c10d_functional"):
            if name in COLLECTIVES:
                largest = max((_bytes(leaf) for leaf in tree_leaves((arguments, out))), default=0)
                self.sent_bytes[COLLECTIVES[name]] += largest
                self.collective_calls[COLLECTIVES[name]] += 1
        elif not func.is_view:
            self.moved_bytes += sum(_bytes(leaf) for leaf in tree_leaves((arguments, out)))


def _bytes(leaf: object) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 0
