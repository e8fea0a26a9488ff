"""Pretended GPUs: tensors that lie on cuda:N for every Python eye, compute on the CPU, and fail where CUDA would.

    with pretend_gpus(2):
        hidden = torch.randn(4, 5, 8, device="cuda:1")
        hidden @ torch.randn(8, 3)                  # RuntimeError: ... two devices, cuda:1 and cpu!
        hidden[torch.ones(4, 5, dtype=torch.bool, device="cuda:0")]    # RuntimeError: indices should be ...

A tensor stays the CPU tensor that it is; a table says which device its *storage* lies on. Views, parameters, autograd,
optimizers and whole models therefore work unchanged, backward included. Three layers keep the table and the rules:

    calls from Python       `.device`, `.to`, factories with `device=`, `.numpy()`             _Calls
    operations of ATen      one device for all operands (pretend_rules.py), and the results   _Operations
    torch.cuda and others   counts, current device, streams, memory, autocast                 pretend_cuda.py

Where it is not the real thing: kernels are the CPU's, `torch.autocast("cuda")` is the CPU's autocast, memory has no
end, and nothing runs asynchronously (`PretendedGPUs.synchronized` notes who waited). A tensor that a C++ formula of
the backward pass makes out of nothing belongs to whichever device meets it first. A gradient on the wrong device
raises with the first operation that mixes it, not where it was made.
"""

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pretend_cuda import patches
from tests.pretend_rules import ANYWHERE, CPU, check_generator, common_device

aten = torch.ops.aten
_true_device = torch._C.TensorBase.device.__get__

CUDA_ONLY: dict[Any, Callable[..., Tensor]] = {
    aten.mm.dtype: lambda left, right, dtype: torch.mm(left.to(dtype), right.to(dtype)),
    aten.mm.dtype_out: lambda left, right, dtype, out: torch.mm(left.to(dtype), right.to(dtype), out=out),
}
"""Operations without a kernel for the CPU, and the same in others."""


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among arguments or results: torch's calls nest lists, tuples and dictionaries only."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    found = []
    for item in value:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            found += tensors_in(item)
    return found


class PretendedGPUs:
    """Which storages lie where, and what was asked of torch.cuda.

    A storage's entry holds a weak reference, which keeps its address from being given to another one.
    """

    def __init__(self, count: int, free_bytes: int) -> None:
        self.count = count
        self.free_bytes = free_bytes
        self.synchronized: list[torch.device] = []
        self._places: dict[int, tuple[StorageWeakRef, torch.device]] = {}
        self.thread = threading.local()
        self._purge_at = 10_000

    @property
    def current(self) -> int:
        """The current device of this thread; 0 in a new one, as in CUDA."""
        return int(vars(self.thread).get("device", 0))

    @current.setter
    def current(self, index: int) -> None:
        self.thread.device = self.device(f"cuda:{index}").index

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
            true = _true_device(tensor)
            if true.type != "cpu" or tensor.layout != torch.strided:
                return true
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
            tensor.get_device: lambda _, own: -1 if gpus.place(own).index is None else gpus.place(own).index,
            tensor.grad.__set__: self._set_grad,
            tensor.to: self._to,
            tensor.cuda: lambda _, own, device="cuda", *rest, **more: self._move(own, gpus.device(device)),
            tensor.cpu: lambda _, own, *rest, **more: self._move(own, CPU),
            tensor.numpy: self._host_only,
            tensor.__array__: self._host_only,
            tensor.pin_memory: self._pin,
            tensor.record_stream: lambda _, own, stream: None,
            tensor.__deepcopy__: self._copy_deeply,
            torch.device: _named_device,
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
        own = tensors_in(args)
        with self.operations.making_tensors_on(self.gpus.place(own[0]) if own else CPU):
            return func(*args, **kwargs)

    def _on_device(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A factory: the tensor is made on the CPU and lies where it was asked for."""
        device = self.gpus.device(kwargs["device"])
        if device.type == "meta":
            return func(*args, **kwargs)
        check_generator(kwargs.get("generator"), device)
        others = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        made = func(*args, **others, device="cpu")
        if not isinstance(made, Tensor):
            return made
        given = {value.untyped_storage()._cdata for value in tensors_in(args)}
        if made.untyped_storage()._cdata in given:  # as_tensor
            return self._move(made, device)
        self.gpus.put(made, device)
        return self._pin(func, made) if kwargs.get("pin_memory") else made

    def _to(self, func: Any, own: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        if (args and isinstance(args[0], Tensor)) or "other" in kwargs:
            other = kwargs.pop("other", None) if "other" in kwargs else args[0]
            asked, dtype = self.gpus.place(other), other.dtype
        else:
            args = tuple(torch.device("cuda", one) if type(one) is int else one for one in args)
            if type(kwargs.get("device")) is int:
                kwargs["device"] = torch.device("cuda", kwargs["device"])
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
        return own.clone()

    def _set_grad(self, func: Any, own: Tensor, gradient: Tensor | None) -> None:
        if gradient is not None and self.gpus.place(gradient) != self.gpus.place(own):
            raise RuntimeError("assigned grad has data located on a different device")
        func(own, gradient)

    def _copy_deeply(self, func: Any, own: Tensor, memo: Any) -> Tensor:
        copied: Tensor = func(own, memo)
        self.gpus.put(copied, self.gpus.place(own))
        return copied


def _named_device(made: Any, *names: Any, **more: Any) -> Any:
    """`torch.device`, which asks for an accelerator where it is given a number alone."""
    return made("cuda", names[0]) if names and isinstance(names[0], int) else made(*names, **more)


class _Operations(TorchDispatchMode):
    """Every operation of ATen, those of the backward pass too: one device, and its results lie there."""

    def __init__(self, gpus: PretendedGPUs) -> None:
        super().__init__()
        self.gpus = gpus
        self.makes_on = CPU

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would wrap the handler for a compiler that nobody uses here: a tenth of all time."""
        return False

    def making_tensors_on(self, device: torch.device) -> "_MakingOn":
        """Where a tensor lies that C++ makes from the options of another one."""
        return _MakingOn(self, device)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            operands = tensors_in(args) + tensors_in(kwargs)
            device = common_device(self.gpus.place, func, args, operands) if operands else self.makes_on
            check_generator(kwargs.get("generator"), device)
            result = (CUDA_ONLY.get(func, func) if device.type == "cuda" else func)(*args, **kwargs)
            if device.type == "cpu":
                return result
            given = {tensor.untyped_storage()._cdata for tensor in operands}
            for made in tensors_in(result):
                if made.untyped_storage()._cdata not in given:
                    self.gpus.put(made, device)
            self._settle(operands, device)
            return result

    def _settle(self, operands: Iterable[Tensor], device: torch.device) -> None:
        for tensor in operands:
            if self.gpus.place(tensor) is ANYWHERE:
                self.gpus.put(tensor, device)


class _MakingOn:
    """A block with another `makes_on`; a class, since every call from Python goes through it."""

    def __init__(self, operations: _Operations, device: torch.device) -> None:
        self.operations, self.device = operations, device

    def __enter__(self) -> None:
        self.before, self.operations.makes_on = self.operations.makes_on, self.device

    def __exit__(self, *error: object) -> None:
        self.operations.makes_on = self.before


PIN_MEMORY = torch.Tensor.pin_memory
"""torch's own, which vLLM's CPU build replaces once an engine of it has started in this process."""


@contextmanager
def pretend_gpus(count: int, free_bytes: int = 80 << 30) -> Iterator[PretendedGPUs]:
    """A machine with `count` GPUs for the code inside, and for the threads that it starts.

    free_bytes: what each GPU says is free; nothing is ever counted against it.
    """
    gpus = PretendedGPUs(count, free_bytes)
    run = threading.Thread.run
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @contextmanager
    def rules() -> Iterator[None]:
        operations = _Operations(gpus)
        gpus.thread.calls = _Calls(gpus, operations)
        with operations, gpus.thread.calls:
            yield

    def run_by_the_rules(thread: threading.Thread) -> None:
        with rules():
            run(thread)

    def run_backward_by_the_rules(*args: Any, **kwargs: Any) -> Any:
        """torch leaves the mode that handles a call while it runs; Python code runs in the backward pass too
        (checkpointing, functions with a backward of their own)."""
        with gpus.thread.calls as calls, calls.operations.making_tensors_on(ANYWHERE):
            return run_backward(*args, **kwargs)

    told = {
        "device": property(gpus.place),
        "is_cuda": property(lambda tensor: gpus.place(tensor).type == "cuda"),
        "is_cpu": property(lambda tensor: gpus.place(tensor).type == "cpu"),
        "pin_memory": PIN_MEMORY,
    }
    # Before the pretence: bitsandbytes, which peft brings, would believe in the GPUs.
    importlib.import_module("peft")
    with ExitStack() as pretence:
        for patch in patches(gpus):
            pretence.enter_context(patch)
        for name, answer in told.items():  # hooks of saved tensors ask where the mode does not hear it
            pretence.enter_context(mock.patch.object(Tensor, name, answer))
        pretence.enter_context(mock.patch.object(threading.Thread, "run", run_by_the_rules))
        backward = mock.patch.object(torch.autograd, "_engine_run_backward", run_backward_by_the_rules)
        pretence.enter_context(backward)
        pretence.enter_context(rules())
        yield gpus
