"""Simulated GPUs refuse operations over two devices; on one device they compute as the CPU."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.pretend_gpu import SimulatedGPUs, pretend_gpus


@pytest.fixture
def gpus() -> Iterator[SimulatedGPUs]:
    with pretend_gpus(2) as machine:
        yield machine


def floats(device: str) -> Tensor:
    return torch.arange(24, device=device).float().reshape(4, 6)


def rows(device: str) -> Tensor:
    return torch.tensor([0, 2], device=device)


OPERATIONS: dict[str, Callable[[str, str], object]] = {
    "add": lambda a, b: floats(a) + floats(b),
    "matmul": lambda a, b: floats(a) @ floats(b).T,
    "linear": lambda a, b: nn.Linear(6, 2, device=a)(floats(b)),
    "embedding": lambda a, b: nn.Embedding(4, 6, device=a)(rows(b)),
    "cat": lambda a, b: torch.cat([floats(a), floats(b)]),
    "where": lambda a, b: torch.where(floats(a) > 1, floats(b), 0.0),
    "gather": lambda a, b: floats(a).gather(1, torch.zeros(4, 1, dtype=torch.long, device=b)),
    "index_add_": lambda a, b: floats(a).index_add_(0, rows(a), floats(b)[:2]),
    "masked_fill": lambda a, b: floats(a).masked_fill(floats(b) > 1, 0.0),
    "equal": lambda a, b: torch.equal(floats(a), floats(b)),
}


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:1"), ("cpu", "cuda:0"), ("cuda:1", "cpu")], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operands_on_two_devices_are_refused(name: str, devices: tuple[str, str], gpus: SimulatedGPUs) -> None:
    with pytest.raises(RuntimeError, match=r"at least two devices|on the same device"):
        OPERATIONS[name](*devices)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_same_on_one_device_is_allowed(name: str, gpus: SimulatedGPUs) -> None:
    OPERATIONS[name]("cuda:1", "cuda:1")


def test_a_step_on_a_simulated_gpu_equals_the_cpu_step(gpus: SimulatedGPUs) -> None:
    """Gradients, clipping and an optimizer step are compared."""
    ends = []
    for device in ("cpu", "cuda:1"):
        torch.manual_seed(0)
        model = nn.Linear(6, 3).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(floats(device)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ends.append([parameter.detach().cpu() for parameter in model.parameters()])
    for ours, theirs in zip(*ends, strict=True):
        assert torch.equal(ours, theirs)


def flags(device: str) -> Tensor:
    return torch.ones(4, device=device) > 0


def pinned_floats(device: str) -> Tensor:
    return floats("cpu").pin_memory()


WAITS: dict[str, tuple[Callable[[str], Tensor], Callable[[Tensor], object]]] = {
    "blocking copy from the host": (lambda device: floats("cpu"), lambda x: x.to("cuda:1")),
    "copy from pageable memory": (lambda device: floats("cpu"), lambda x: x.to("cuda:1", non_blocking=True)),
    "blocking copy of pinned memory": (pinned_floats, lambda x: x.cuda()),
    "copy_ from the host": (lambda device: floats("cpu"), lambda x: torch.empty(4, 6, device="cuda:1").copy_(x)),
    "values of the host": (floats, lambda x: torch.tensor([1, 2], device="cuda:1")),
    "copy to the host": (floats, lambda x: x.cpu()),
    "number": (floats, lambda x: x.sum().item()),
    "condition": (floats, lambda x: bool(x.sum() > 0)),
    "list": (floats, lambda x: x.tolist()),
    "nonzero": (flags, lambda x: x.nonzero()),
    "mask": (flags, lambda x: x[x]),
    "masked_select": (flags, lambda x: x.masked_select(x)),
    "repeat_interleave": (rows, lambda x: x.repeat_interleave(x)),
}
"""Tensor on a GPU or on the host and operation, by the name of the wait of the operation."""

ASYNCHRONOUS: dict[str, tuple[Callable[[str], Tensor], Callable[[Tensor], object]]] = {
    "pinned copy": (pinned_floats, lambda x: x.to("cuda:1", non_blocking=True)),
    "pinned copy_": (pinned_floats, lambda x: torch.empty(4, 6, device="cuda:1").copy_(x, non_blocking=True)),
    "view of pinned memory": (pinned_floats, lambda x: x[1:3].to("cuda:1", non_blocking=True)),
    "copy between GPUs": (floats, lambda x: x.to("cuda:0")),
    "index": (rows, lambda x: x[x // 2]),
    "index_put": (rows, lambda x: x.index_put((x // 2,), x)),
    "where": (floats, lambda x: torch.where(x > 1, x, 0.0)),
    "factory": (rows, lambda x: torch.ones(3, device=x.device)),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_recorded(name: str, gpus: SimulatedGPUs) -> None:
    make, operation = WAITS[name]
    tensor = make("cuda:1")
    gpus.waits.clear()
    operation(tensor)
    assert len(gpus.waits) == 1


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_operations_are_no_waits(name: str, gpus: SimulatedGPUs) -> None:
    make, operation = ASYNCHRONOUS[name]
    tensor = make("cuda:1")
    gpus.waits.clear()
    operation(tensor)
    assert not gpus.waits


def test_nothing_stays_behind() -> None:
    with pretend_gpus(2):
        pass
    assert not torch.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda:0")
