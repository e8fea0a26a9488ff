"""Pretended GPUs: tensors that lie on cuda:N for every Python eye, compute on the CPU, and fail where CUDA would.

    with pretend_gpus(2):
        hidden = torch.randn(4, 5, 8, device="cuda:1")
        hidden @ torch.randn(8, 3)                  # RuntimeError: ... two devices, cuda:1 and cpu!
        hidden[torch.ones(4, 5, dtype=torch.bool, device="cuda:0")]    # RuntimeError: indices should be ...

A tensor stays the CPU tensor that it is; a table says which device its *storage* lies on. Views, parameters, autograd,
optimizers and whole models therefore work unchanged, backward included. Three layers keep the table and the rules:

    calls from Python       `.device`, `.to`, factories with `device=`, `.numpy()`             _Calls
    operations of ATen      one device for all operands; new storages get it                  _Operations
    torch.cuda and others   counts, current device, streams, memory; autocast; new threads    _patches

Where it is not the real thing: kernels are the CPU's, `torch.autocast("cuda")` is the CPU's autocast, memory has no
end, and nothing runs asynchronously (`PretendedGPUs.synchronized` notes who waited). A tensor that a C++ formula of
the backward pass makes out of nothing belongs to whichever device meets it first. A gradient on the wrong device
raises with the first operation that mixes it, not where it was made.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
CPU = torch.device("cpu")
ANYWHERE = torch.device("meta", 99)
"""Of a tensor that the backward pass made out of nothing: it joins the first device that it meets."""

COPIES = {aten.copy_, aten._foreach_copy_, aten._to_copy, aten._local_scalar_dense, aten.set_}
"""They read one device and write another, or need none."""

INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._index_put_impl_}
SCALAR_OPERANDS = {aten.masked_fill, aten.masked_fill_, aten.fill_, aten.where, aten.index_put, aten.index_put_}
"""Beside the pointwise operations, those that take a 0-dimensional CPU tensor among CUDA tensors."""

TERNARY = {aten.addcmul, aten.addcdiv, aten.addcmul_, aten.addcdiv_, aten.clamp, aten.clamp_}
"""Pointwise operations that do not."""


class PretendedGPUs:
    """Which storages lie where, and what was asked of torch.cuda.

    A storage's entry holds a weak reference, which keeps its address from being given to another one.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.synchronized: list[torch.device] = []
        self._places: dict[int, tuple[StorageWeakRef, torch.device]] = {}
        self._pinned: set[int] = set()
        self._current = threading.local()
        self._purge_at = 10_000

    @property
    def current(self) -> int:
        """The current device of this thread; 0 in a new one, as in CUDA."""
        return int(vars(self._current).get("index", 0))

    @current.setter
    def current(self, index: int) -> None:
        self._current.index = self.device(f"cuda:{index}").index

    def device(self, named: Any) -> torch.device:
        """A device as a tensor reports it, with its index.

        Raises:
            RuntimeError: no such GPU.
        """
        device = torch.device("cuda", named) if isinstance(named, int) else torch.device(named)
        if device.type != "cuda":
            return device
        device = torch.device("cuda", self.current) if device.index is None else device
        if device.index >= self.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal ({device}; there are {self.count} GPUs)")
        return device

    def place(self, tensor: Tensor) -> torch.device:
        """The device that `tensor` pretends to be on."""
        with torch._C.DisableTorchFunction():
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                return tensor.device
            found = self._places.get(tensor.untyped_storage()._cdata)
        return CPU if found is None else found[1]

    def put(self, tensor: Tensor, device: torch.device) -> None:
        """From now on the storage of `tensor`, and with it all of its views, lies on `device`."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            if device.type == "cpu":
                self._places.pop(storage._cdata, None)
            else:
                self._places[storage._cdata] = (StorageWeakRef(storage), device)
        if len(self._places) > self._purge_at:
            self._places = {key: kept for key, kept in self._places.items() if not kept[0].expired()}
            self._purge_at = 2 * len(self._places) + 10_000

    def knows(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage()._cdata in self._places


class _Move(torch.autograd.Function):
    """A copy on another device; its gradient goes back to the first one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device, gpus: PretendedGPUs) -> Tensor:
        ctx.source, ctx.gpus = gpus.place(tensor), gpus
        moved = tensor.clone()
        gpus.put(moved, device)
        return moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _Move.apply(gradient, ctx.source, ctx.gpus), None, None


class _Calls(TorchFunctionMode):
    """What Python asks of tensors: their device, a move to another one, new tensors on one."""

    def __init__(self, gpus: PretendedGPUs, operations: "_Operations") -> None:
        super().__init__()
        self.gpus = gpus
        self.operations = operations
        tensor: Any = Tensor
        self.handlers: dict[Any, Callable[..., Any]] = {
            tensor.device.__get__: lambda _, own, *rest: gpus.place(own),
            tensor.is_cuda.__get__: lambda _, own, *rest: gpus.place(own).type == "cuda",
            tensor.is_cpu.__get__: lambda _, own, *rest: gpus.place(own).type == "cpu",
            tensor.get_device: lambda _, own: -1 if gpus.place(own).index is None else gpus.place(own).index,
            tensor.grad.__set__: self._set_grad,
            tensor.to: self._to,
            tensor.cuda: lambda _, own, device="cuda", *rest, **more: self._move(own, gpus.device(device)),
            tensor.cpu: lambda _, own, *rest, **more: self._move(own, CPU),
            tensor.numpy: self._host_only,
            tensor.__array__: self._host_only,
            tensor.pin_memory: self._pin,
            tensor.is_pinned: lambda _, own, *rest: own.untyped_storage()._cdata in gpus._pinned,
            tensor.record_stream: lambda _, own, stream: None,
            tensor.backward: self._backward,
            tensor.__deepcopy__: self._copy_deeply,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = self.handlers.get(func)
        if handler is not None:
            return handler(func, *args, **kwargs)
        if kwargs.get("device") is not None:
            return self._on_device(func, args, kwargs)
        if kwargs.get("pin_memory"):
            return self._pin(func, func(*args, **kwargs | {"pin_memory": False}))
        own = next((value for value in tree_leaves(args) if isinstance(value, Tensor)), None)
        with self.operations.making_tensors_on(CPU if own is None else self.gpus.place(own)):
            return func(*args, **kwargs)

    def _on_device(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A factory: the tensor is made on the CPU and lies where it was asked for."""
        device = self.gpus.device(kwargs["device"])
        if device.type == "meta":
            return func(*args, **kwargs)
        others = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        made = func(*args, **others)
        if not isinstance(made, Tensor):
            return made
        given = {value.untyped_storage()._cdata for value in tree_leaves(args) if isinstance(value, Tensor)}
        if made.untyped_storage()._cdata in given:  # as_tensor
            return self._move(made, device)
        self.gpus.put(made, device)
        return self._pin(func, made) if kwargs.get("pin_memory") else made

    def _to(self, func: Any, own: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor) or "other" in kwargs:
            other = kwargs.pop("other", None) if "other" in kwargs else args[0]
            asked, dtype = self.gpus.place(other), other.dtype
        else:
            asked, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if asked is not None and asked.type == "meta":
            return own.to(*args, copy=copy, **kwargs)
        here = self.gpus.place(own)
        device = here if asked is None else self.gpus.device(asked)
        with self.operations.making_tensors_on(here):
            cast = own if dtype is None else own.to(dtype)
            if device != here:
                return self._move(cast, device)
            return cast.clone() if copy and cast is own else cast

    def _move(self, own: Tensor, device: torch.device) -> Tensor:
        if own.is_meta:
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        if self.gpus.place(own) == device:
            return own
        moved: Tensor = _Move.apply(own, device, self.gpus)  # type: ignore[no-untyped-call]
        return moved

    def _host_only(self, func: Any, own: Tensor, *args: Any, **kwargs: Any) -> Any:
        place = self.gpus.place(own)
        if place.type == "cuda":
            raise TypeError(
                f"can't convert {place} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
                "memory first."
            )
        return func(own, *args, **kwargs)

    def _pin(self, func: Any, own: Tensor, *args: Any) -> Tensor:
        if self.gpus.place(own).type != "cpu":
            raise RuntimeError(f"cannot pin '{self.gpus.place(own)}': only dense CPU tensors can be pinned")
        pinned = own.clone()
        self.gpus._pinned.add(pinned.untyped_storage()._cdata)
        return pinned

    def _set_grad(self, func: Any, own: Tensor, gradient: Tensor | None) -> None:
        if gradient is not None and self.gpus.place(gradient) != self.gpus.place(own):
            raise RuntimeError("assigned grad has data located on a different device")
        func(own, gradient)

    def _backward(self, func: Any, own: Tensor, gradient: Tensor | None = None, **more: Any) -> None:
        """Python code runs in there too (checkpointing, functions with a backward of their own): under the same rules."""
        with self, self.operations.making_tensors_on(ANYWHERE):
            torch.autograd.backward(own, gradient, **more)

    def _copy_deeply(self, func: Any, own: Tensor, memo: Any) -> Tensor:
        copied: Tensor = func(own, memo)
        self.gpus.put(copied, self.gpus.place(own))
        return copied


class _Operations(TorchDispatchMode):
    """Every operation of ATen, those of the backward pass too: one device, and its results lie there."""

    def __init__(self, gpus: PretendedGPUs) -> None:
        super().__init__()
        self.gpus = gpus
        self._making_on = CPU

    @contextmanager
    def making_tensors_on(self, device: torch.device) -> Iterator[None]:
        """Where a tensor lies that C++ makes from the options of another one."""
        before, self._making_on = self._making_on, device
        try:
            yield
        finally:
            self._making_on = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            operands = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            device = self._common_device(func, args, operands)
            _check_generator(kwargs.get("generator"), device)
            result = func(*args, **kwargs)
            if device.type == "cpu":
                return result
            given = {tensor.untyped_storage()._cdata for tensor in operands}
            for made in tree_leaves(result):
                if isinstance(made, Tensor) and made.untyped_storage()._cdata not in given:
                    self.gpus.put(made, device)
            self._settle(operands, device)
            return result

    def _settle(self, operands: Iterable[Tensor], device: torch.device) -> None:
        for tensor in operands:
            if self.gpus.place(tensor) is ANYWHERE:
                self.gpus.put(tensor, device)

    def _common_device(self, func: Any, args: Sequence[Any], operands: list[Tensor]) -> torch.device:
        """Where an operation runs.

        Raises:
            RuntimeError: its operands lie where CUDA could not take them together.
        """
        packet = func.overloadpacket
        if not operands:
            return self._making_on
        if packet in COPIES:
            return self.gpus.place(operands[0])
        if packet in INDEXING:
            _check_indices(self.gpus, args)
            operands = [args[0], *args[2:3]]
        places = [self.gpus.place(tensor) for tensor in operands if isinstance(tensor, Tensor)]
        devices = {place for place in places if place is not ANYWHERE}
        if len(devices) < 2:
            return devices.pop() if devices else ANYWHERE
        if any(device.type == "meta" for device in devices):
            return CPU
        scalars = [tensor for tensor, place in zip(operands, places, strict=True) if place == CPU]
        gpus = devices - {CPU}
        if len(gpus) == 1 and len(scalars) == 1 and _may_be_on_the_host(func, scalars[0], args):
            return gpus.pop()
        first, second, *_ = dict.fromkeys(map(str, places))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}! "
            f"(pretended, in {func})"
        )


def _may_be_on_the_host(func: Any, scalar: Tensor, args: Sequence[Any]) -> bool:
    """One 0-dimensional CPU tensor that is only read may mix with CUDA tensors, in pointwise operations."""
    packet = func.overloadpacket
    pointwise = torch.Tag.pointwise in func.tags and packet not in TERNARY
    written = bool(func._schema.is_mutable) and args[0] is scalar
    chooses = packet is aten.where and args[0] is scalar
    return scalar.dim() == 0 and not written and not chooses and (pointwise or packet in SCALAR_OPERANDS)


def _check_indices(gpus: PretendedGPUs, args: Sequence[Any]) -> None:
    own = gpus.place(args[0])
    for index in args[1]:
        if index is not None and gpus.place(index) not in (CPU, own, ANYWHERE) and own is not ANYWHERE:
            raise RuntimeError(
                f"indices should be either on cpu or on the same device as the indexed tensor ({own}), "
                f"got {gpus.place(index)} (pretended)"
            )


def _check_generator(generator: torch.Generator | None, device: torch.device) -> None:
    if generator is not None and device.type == "cuda" and generator.device.type != "cuda":
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu' (pretended)")


def _group_by_device(gpus: PretendedGPUs) -> Callable[..., Any]:
    """torch's grouping for optimizers and gradient clipping, which reads devices in C++."""

    def group(lists: list[list[Any]], with_indices: bool = False) -> Any:
        groups: dict[Any, tuple[list[list[Any]], list[int]]] = {}
        for index, row in enumerate(zip(*[one or [None] * len(lists[0]) for one in lists], strict=True)):
            key = (gpus.place(row[0]), row[0].dtype)
            columns, indices = groups.setdefault(key, ([[] for _ in lists], []))
            for column, one, value in zip(columns, lists, row, strict=True):
                if one:
                    column.append(value)
            indices.append(index)
        return groups

    return group


class _Stream:
    """Everything on it has been done already."""

    cuda_stream = 0

    def __init__(self, device: Any = None, **more: Any) -> None:
        self.device = device

    def synchronize(self) -> None:
        pass

    wait_stream = wait_event = record_event = lambda self, *args: None  # noqa: E731


def _patches(gpus: PretendedGPUs) -> list[Any]:
    """What asks torch about GPUs without a tensor."""

    def set_device(device: Any) -> None:
        gpus.current = gpus.device(device).index

    def exchange(index: int) -> int:
        before = gpus.current
        if index >= 0:
            gpus.current = index
        return before

    def synchronize(device: Any = None) -> None:
        gpus.synchronized.append(gpus.device("cuda" if device is None else device))

    def properties(device: Any = None) -> Any:
        index = gpus.device("cuda" if device is None else device).index
        return SimpleNamespace(
            name="pretended", uuid=f"pretended-{index}", total_memory=80 << 30, major=9, minor=0
        )

    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: gpus.count,
        "current_device": lambda: gpus.current,
        "set_device": set_device,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "_lazy_init": lambda: None,
        "synchronize": synchronize,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (80 << 30, 80 << 30),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "pretended",
        "Stream": _Stream,
        "current_stream": lambda device=None: _Stream(device),
        "stream": lambda stream: nullcontext(),
        "Event": _Stream,
    }
    patched = [mock.patch.object(torch.cuda, name, new) for name, new in cuda.items()]
    patched.append(mock.patch.object(torch.accelerator, "current_device_index", lambda: gpus.current))
    patched.append(
        mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", _group_by_device(gpus))
    )
    return patched + _autocast_patches()


def _autocast_patches() -> list[Any]:
    """Autocast of pretended GPUs is the CPU's, since its tensors are."""
    init, enabled, dtype = torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    def on_host(kind: str) -> str:
        return "cpu" if kind == "cuda" else kind

    def init_on_host(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, on_host(device_type), *args, **kwargs)

    return [
        mock.patch.object(torch.autocast, "__init__", init_on_host),
        mock.patch.object(torch, "is_autocast_enabled", lambda kind="cuda": enabled(on_host(kind))),
        mock.patch.object(torch, "get_autocast_dtype", lambda kind: dtype(on_host(kind))),
    ]


@contextmanager
def pretend_gpus(count: int) -> Iterator[PretendedGPUs]:
    """A machine with `count` GPUs for the code inside, and for the threads that it starts."""
    gpus = PretendedGPUs(count)
    run = threading.Thread.run

    @contextmanager
    def rules() -> Iterator[None]:
        operations = _Operations(gpus)
        with operations, _Calls(gpus, operations):
            yield

    def run_by_the_rules(thread: threading.Thread) -> None:
        with rules():
            run(thread)

    with ExitStack() as pretence:
        for patch in _patches(gpus):
            pretence.enter_context(patch)
        pretence.enter_context(mock.patch.object(threading.Thread, "run", run_by_the_rules))
        pretence.enter_context(rules())
        yield gpus
