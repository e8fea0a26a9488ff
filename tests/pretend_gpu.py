"""Simulated GPUs: CPU tensors that report cuda:N and fail where CUDA would.

    with pretend_gpus(2):
        hidden = torch.randn(4, 5, 8, device="cuda:1")
        hidden @ torch.randn(8, 3)                  # RuntimeError: ... two devices, cuda:1 and cpu!
        hidden[torch.ones(4, 5, dtype=torch.bool, device="cuda:0")]    # RuntimeError: indices should be ...

Tensors stay on the CPU; a table has the simulated device of each *storage*. Views, parameters,
autograd, optimizers and whole models therefore work unchanged, backward included. Three layers keep the table
and the rules:

    calls from Python       `.device`, `.to`, factories with `device=`, `.numpy()`             _Calls
    operations of ATen      one device for all operands (pretend_device_rules.py), results    _Operations
    torch.cuda and others   counts, current device, streams, memory, autocast                 pretend_cuda.py

Differences from real GPUs: kernels are the CPU's, `torch.autocast("cuda")` is the CPU's autocast, memory has
no limit, and nothing runs asynchronously. `SimulatedGPUs.waits` records every place where CUDA makes the host wait
(pretend_host_waits.py). A tensor that a C++ formula of the backward pass creates from nothing belongs to the first
device that it meets. A gradient on the wrong device raises in the first operation that mixes it, not where it was
created.
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

from tests.pretend_cuda import cuda_patches
from tests.pretend_device_rules import ANYWHERE, CPU, check_generator, common_device
from tests.pretend_host_waits import HostWaits, tensors_in

aten = torch.ops.aten
_true_device = torch._C.TensorBase.device.__get__

CUDA_ONLY: dict[Any, Callable[..., Tensor]] = {
    aten.mm.dtype: lambda left, right, dtype: torch.mm(left.to(dtype), right.to(dtype)),
    aten.mm.dtype_out: lambda left, right, dtype, out: torch.mm(left.to(dtype), right.to(dtype), out=out),
    aten.addmm.dtype_out: lambda total, left, right, dtype, out: torch.addmm(
        total, left.to(dtype), right.to(dtype), out=out
    ),
}
"""Operations without a kernel for the CPU, each expressed by others."""

FROM_HOST_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)
"""Factories that copy values of the host to the device."""


class SimulatedGPUs(HostWaits):
    """Devices of all storages, and recorded calls of torch.cuda.

    A storage's entry holds a weak reference, so that no other storage gets its address.
    """

    def __init__(self, count: int, free_bytes: int) -> None:
        super().__init__()
        self.count = count
        self.free_bytes = free_bytes
        self.synchronized_devices: list[torch.device] = []
        self._devices: dict[int, tuple[StorageWeakRef, torch.device]] = {}
        self.thread = threading.local()
        self._purge_at = 10_000

    @property
    def current(self) -> int:
        """The current device of this thread; 0 in a new one, as in CUDA."""
        return int(vars(self.thread).get("device", 0))

    @current.setter
    def current(self, index: int) -> None:
        self.thread.device = self.parse_device(f"cuda:{index}").index

    def parse_device(self, name: Any) -> torch.device:
        """Returns a device as a tensor reports it, with its index.

        Raises:
            RuntimeError: no such GPU.
        """
        device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
        if device.type != "cuda":
            return device
        device = torch.device("cuda", self.current) if device.index is None else device
        if device.index >= self.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal ({device}; there are {self.count} GPUs)")
        return device

    def device_of(self, tensor: Tensor) -> torch.device:
        """Returns the simulated device of `tensor`."""
        with torch._C.DisableTorchFunction():
            real_device = _true_device(tensor)
            if real_device.type != "cpu" or tensor.layout != torch.strided:
                return real_device
            entry = self._devices.get(tensor.untyped_storage()._cdata)
        return CPU if entry is None else entry[1]

    def set_device(self, tensor: Tensor, device: torch.device) -> None:
        """Sets the device of the storage of `tensor`, and thereby of all its views."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            if device.type == "cpu":
                self._devices.pop(storage._cdata, None)
            else:
                self._devices[storage._cdata] = (StorageWeakRef(storage), device)
        if len(self._devices) > self._purge_at:
            self._devices = {key: entry for key, entry in self._devices.items() if not entry[0].expired()}
            self._purge_at = 2 * len(self._devices) + 10_000

    def has_device(self, tensor: Tensor) -> bool:
        """Whether the storage of `tensor` is on a simulated GPU."""
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage()._cdata in self._devices


class _Move(torch.autograd.Function):
    """A copy on another device; its gradient goes back to the first one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device, gpus: SimulatedGPUs) -> Tensor:
        ctx.source, ctx.gpus = gpus.device_of(tensor), gpus
        moved = tensor.clone()
        gpus.set_device(moved, device)
        return moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _Move.apply(gradient, ctx.source, ctx.gpus), None, None


class _Calls(TorchFunctionMode):
    """Handles calls from Python: device of a tensor, moves, new tensors."""

    def __init__(self, gpus: SimulatedGPUs, operations: "_Operations") -> None:
        super().__init__()
        self.gpus = gpus
        self.operations = operations
        tensor_class: Any = Tensor
        self.handlers: dict[Any, Callable[..., Any]] = {
            tensor_class.get_device: lambda _, tensor: (
                -1 if gpus.device_of(tensor).index is None else gpus.device_of(tensor).index
            ),
            tensor_class.grad.__set__: self._set_grad,
            tensor_class.to: self._to,
            tensor_class.cuda: lambda _, tensor, device="cuda", non_blocking=False, **more: self._move(
                tensor, gpus.parse_device(device), non_blocking
            ),
            tensor_class.cpu: lambda _, tensor, *rest, **more: self._move(tensor, CPU),
            tensor_class.tolist: self._read_list,
            tensor_class.numpy: self._refuse_gpu,
            tensor_class.__array__: self._refuse_gpu,
            tensor_class.pin_memory: self._pin,
            tensor_class.is_pinned: lambda _, tensor, *rest: gpus.is_pinned(tensor),
            tensor_class.record_stream: lambda _, tensor, stream: None,
            tensor_class.__deepcopy__: self._deepcopy,
            torch.device: _parse_torch_device,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = self.handlers.get(func)
        if handler is not None:
            return handler(func, *args, **kwargs)
        if kwargs.get("device") is not None:
            return self._create_on_device(func, args, kwargs)
        if kwargs.get("pin_memory"):
            return self._pin(func, func(*args, **kwargs | {"pin_memory": False}))
        tensors = tensors_in(args)
        with self.operations.tensors_created_on(self.gpus.device_of(tensors[0]) if tensors else CPU):
            return func(*args, **kwargs)

    def _create_on_device(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs a factory on the CPU and places its tensor on the requested device."""
        device = self.gpus.parse_device(kwargs["device"])
        if device.type == "meta":
            return func(*args, **kwargs)
        check_generator(kwargs.get("generator"), device)
        others = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        created = func(*args, **others, device="cpu")
        if not isinstance(created, Tensor):
            return created
        input_storages = {value.untyped_storage()._cdata for value in tensors_in(args)}
        if created.untyped_storage()._cdata in input_storages:  # as_tensor
            return self._move(created, device)
        if func in FROM_HOST_VALUES:
            self.gpus.record_copy(created, device, non_blocking=False)
        self.gpus.set_device(created, device)
        return self._pin(func, created) if kwargs.get("pin_memory") else created

    def _to(self, func: Any, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        if (args and isinstance(args[0], Tensor)) or "other" in kwargs:
            other = kwargs.pop("other", None) if "other" in kwargs else args[0]
            requested, dtype = self.gpus.device_of(other), other.dtype
            non_blocking = kwargs.get("non_blocking", False)
        else:
            args = tuple(torch.device("cuda", one) if type(one) is int else one for one in args)
            if type(kwargs.get("device")) is int:
                kwargs["device"] = torch.device("cuda", kwargs["device"])
            requested, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if requested is not None and requested.type == "meta":
            return tensor.to(*args, copy=copy, **kwargs)
        source = self.gpus.device_of(tensor)
        device = source if requested is None else self.gpus.parse_device(requested)
        with self.operations.tensors_created_on(source):
            cast = tensor if dtype is None else tensor.to(dtype)
            if device != source:
                return self._move(cast, device, non_blocking)
            return cast.clone() if copy and cast is tensor else cast

    def _move(self, tensor: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        if tensor.is_meta:
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        if self.gpus.device_of(tensor) == device:
            return tensor
        self.gpus.record_copy(tensor, device, non_blocking)
        moved: Tensor = _Move.apply(tensor, device, self.gpus)  # type: ignore[no-untyped-call]
        return moved

    def _read_list(self, func: Any, tensor: Tensor) -> Any:
        self.gpus.record_copy(tensor, CPU, non_blocking=False)
        return func(tensor)

    def _refuse_gpu(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = self.gpus.device_of(tensor)
        if device.type == "cuda":
            raise TypeError(
                f"can't convert {device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
                "memory first."
            )
        return func(tensor, *args, **kwargs)

    def _pin(self, func: Any, tensor: Tensor, *args: Any) -> Tensor:
        if self.gpus.device_of(tensor).type != "cpu":
            raise RuntimeError(f"cannot pin '{self.gpus.device_of(tensor)}': only dense CPU tensors can be pinned")
        return self.gpus.pin(tensor.clone())

    def _set_grad(self, func: Any, tensor: Tensor, gradient: Tensor | None) -> None:
        if gradient is not None and self.gpus.device_of(gradient) != self.gpus.device_of(tensor):
            raise RuntimeError("assigned grad has data located on a different device")
        func(tensor, gradient)

    def _deepcopy(self, func: Any, tensor: Tensor, memo: Any) -> Tensor:
        copy: Tensor = func(tensor, memo)
        self.gpus.set_device(copy, self.gpus.device_of(tensor))
        return copy


def _parse_torch_device(device_class: Any, *names: Any, **more: Any) -> Any:
    """Builds a `torch.device`, with a bare number as CUDA index.

    torch itself would query the accelerator.
    """
    return device_class("cuda", names[0]) if names and isinstance(names[0], int) else device_class(*names, **more)


class _Operations(TorchDispatchMode):
    """Handles every operation of ATen, backward pass included: one device for operands and results."""

    def __init__(self, gpus: SimulatedGPUs) -> None:
        super().__init__()
        self.gpus = gpus
        self.default_device = CPU

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: torch would else wrap the handler for a compiler, which is slow."""
        return False

    def tensors_created_on(self, device: torch.device) -> "_DefaultDevice":
        """Returns a context with the device of tensors that C++ creates.

        C++ creates such tensors from the options of another tensor.
        """
        return _DefaultDevice(self, device)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            operands = tensors_in(args) + tensors_in(kwargs)
            device = common_device(self.gpus.device_of, func, args, operands) if operands else self.default_device
            check_generator(kwargs.get("generator"), device)
            self.gpus.record_operation(func, args, kwargs)
            result = (CUDA_ONLY.get(func, func) if device.type == "cuda" else func)(*args, **kwargs)
            if device.type == "cpu":
                return result
            input_storages = {tensor.untyped_storage()._cdata for tensor in operands}
            for output in tensors_in(result):
                if output.untyped_storage()._cdata not in input_storages:
                    self.gpus.set_device(output, device)
            self._assign_devices(operands, device)
            return result

    def _assign_devices(self, operands: Iterable[Tensor], device: torch.device) -> None:
        """Puts operands without a device on the device of the operation."""
        for tensor in operands:
            if self.gpus.device_of(tensor) is ANYWHERE:
                self.gpus.set_device(tensor, device)


class _DefaultDevice:
    """Context with another `default_device`; a class for speed, since every call from Python enters it."""

    def __init__(self, operations: _Operations, device: torch.device) -> None:
        self.operations, self.device = operations, device

    def __enter__(self) -> None:
        self.before, self.operations.default_device = self.operations.default_device, self.device

    def __exit__(self, *error: object) -> None:
        self.operations.default_device = self.before


PIN_MEMORY = torch.Tensor.pin_memory
"""torch's own method, which vLLM's CPU build replaces once an engine has started in this process."""


@contextmanager
def pretend_gpus(count: int, free_bytes: int = 80 << 30) -> Iterator[SimulatedGPUs]:
    """Simulates a machine with `count` GPUs for a block and the threads that it starts.

    free_bytes: free memory that each GPU reports; no allocation is counted.
    """
    gpus = SimulatedGPUs(count, free_bytes)
    run = threading.Thread.run
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @contextmanager
    def rules() -> Iterator[None]:
        operations = _Operations(gpus)
        gpus.thread.calls = _Calls(gpus, operations)
        with operations, gpus.thread.calls:
            yield

    def run_with_rules(thread: threading.Thread) -> None:
        with rules():
            run(thread)

    def run_backward_with_rules(*args: Any, **kwargs: Any) -> Any:
        """Runs the backward pass with the rules on.

        torch leaves the mode that handles a call while the call runs. Python code runs in the backward pass
        too (checkpointing, functions with a backward of their own).
        """
        with gpus.thread.calls as calls, calls.operations.tensors_created_on(ANYWHERE):
            return run_backward(*args, **kwargs)

    attributes = {
        "device": property(gpus.device_of),
        "is_cuda": property(lambda tensor: gpus.device_of(tensor).type == "cuda"),
        "is_cpu": property(lambda tensor: gpus.device_of(tensor).type == "cpu"),
        "pin_memory": PIN_MEMORY,
    }
    # Imported before the patches, since bitsandbytes, which peft imports, would take the GPUs for real ones.
    importlib.import_module("peft")
    with ExitStack() as patching:
        for patch in cuda_patches(gpus):
            patching.enter_context(patch)
        for name, answer in attributes.items():  # hooks of saved tensors read these outside the mode
            patching.enter_context(mock.patch.object(Tensor, name, answer))
        patching.enter_context(mock.patch.object(threading.Thread, "run", run_with_rules))
        backward = mock.patch.object(torch.autograd, "_engine_run_backward", run_backward_with_rules)
        patching.enter_context(backward)
        patching.enter_context(rules())
        yield gpus
