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


def test_nothing_stays_behind() -> None:
    with pretend_gpus(2):
        pass
    assert not torch.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda:0")
