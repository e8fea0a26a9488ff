"""What a step on fake tensors would take: bytes that are held, moved and sent, counted as the operations go by.

Modes of PyTorch's dispatcher, which see every operation with its inputs and outputs. They hold nothing.
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

Held = Counter[str]
"""Bytes by kind."""
HOST = "in host memory"
"""The kind of what is not on the rank's device, and not counted."""


def asks_device(func: Any, args: tuple[Any, ...]) -> bool:
    """Of a fake tensor: half of all calls, and what they cost unless a mode answers is most of the time."""
    return func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor)


class _Seen(TorchDispatchMode):
    """Sees every operation on plain tensors: a sharded tensor's come as those on its shards."""

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
        if asks_device(func, args):
            return args[0].fake_device
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # its fake makes another tensor, which the real one does not
        out = func(*args, **(kwargs or {}))
        if active_fake_mode() is self._outside:  # else shapes of shards are being worked out
            self.saw(func, (args, kwargs), out)
        return out

    def saw(self, func: Any, given: Any, out: Any) -> None:
        raise NotImplementedError


class Memory(_Seen):
    """Bytes of all storages that are alive, by the kind of what made them; those of `HOST` are left out.

    kind: of what is made next. peaks: by phase, what was held at its fullest moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind = "activations"
        self.peaks: dict[str, Held] = {}
        self._phase = ""
        self._held: Held = Counter()
        self._storages: dict[int, tuple[int, str, weakref.ref[Any]]] = {}

    def add(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """These are alive, and of this kind from now on."""
        for tensor in tensors:
            self._see(tensor, kind, relabel=True)

    @contextmanager
    def phase(self, name: str, kind: str) -> Iterator[None]:
        """What is done inside belongs to the phase; what it makes is of this kind, unless `making` says another."""
        self._phase = name
        self.peaks.setdefault(name, Counter())
        with self, self.making(kind):
            yield

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def saw(self, func: Any, given: Any, out: Any) -> None:
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf, self.kind)
        if self._held.total() > self.peaks[self._phase].total():
            self.peaks[self._phase] = self._held.copy()

    def _see(self, tensor: Tensor, kind: str, relabel: bool = False) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = (0, kind, weakref.ref(storage, lambda _: self._forget(key)))
        _, known, _ = self._storages[key]
        self._resize(key, storage.size(), kind if relabel else known)

    def _resize(self, key: int, size: int, kind: str) -> None:
        before, known, reference = self._storages[key]
        self._count(known, -before)
        self._count(kind, size)
        self._storages[key] = (size, kind, reference)

    def _forget(self, key: int) -> None:
        size, kind, _ = self._storages.pop(key)
        self._count(kind, -size)

    def _count(self, kind: str, more: int) -> None:
        if kind != HOST:
            self._held[kind] += more

    def __enter__(self) -> Any:
        """Sees storages that are resized too, which FSDP2 frees parameters by; no operation tells of it."""
        resize = self._resize_of_torch = torch.UntypedStorage.resize_

        def seen(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage._cdata in self._storages:
                self._resize(storage._cdata, size, self._storages[storage._cdata][1])

        torch.UntypedStorage.resize_ = seen  # type: ignore[method-assign,assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize_of_torch  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]


COLLECTIVES = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
}


class Traffic(_Seen):
    """Bytes that operations read and write, each for itself, and bytes of the tensors of each collective.

    moved: of all operations that are no views. sent: by collective, the whole tensor that a group of ranks makes or
    adds up together; what passes a rank's link is (n - 1) / n of it among n ranks, twice that for an all-reduce.
    calls: by collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def saw(self, func: Any, given: Any, out: Any) -> None:
        name = func.name().partition("::")[2].partition(".")[0]
        if func.namespace in ("c10d", "_c10d_functional"):
            if name in COLLECTIVES:
                largest = max((_bytes(leaf) for leaf in tree_leaves((given, out))), default=0)
                self.sent[COLLECTIVES[name]] += largest
                self.calls[COLLECTIVES[name]] += 1
        elif not func.is_view:
            self.moved += sum(_bytes(leaf) for leaf in tree_leaves((given, out)))


def _bytes(leaf: object) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 0
