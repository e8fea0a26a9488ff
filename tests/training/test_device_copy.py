"""Copies of nested tensors to another device take one block and one copy."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pretend_gpu import pretend_gpus
from torchgrpo.training.device_copy import copy_to_device

GPU, HOST = torch.device("cuda", 1), torch.device("cpu")


@dataclass(frozen=True)
class Part:
    """Tensors of a test in a dataclass, with a member that is no tensor."""

    ids: Tensor
    mask: Tensor | None
    number: float


def make_values() -> tuple[Any, ...]:
    """Makes tensors of all dtypes in use, without elements, without dimensions, and not contiguous."""
    columns = torch.arange(12, dtype=torch.float64).view(3, 4)[:, 1:3]
    return (
        Part(torch.arange(5), torch.tensor([[True, False, True]]), 0.5),
        {"a": [columns, torch.tensor(3.0)], "b": torch.empty(0, 3, dtype=torch.int32)},
        Part(torch.full((2, 2), -1.5), None, 2.0),
        "text",
    )


def tensors_of(values: tuple[Any, ...]) -> list[Tensor]:
    first, members, last, _ = values
    return [first.ids, first.mask, *members["a"], members["b"], last.ids]


def test_one_pinned_copy_to_a_gpu_and_one_copy_back() -> None:
    values = make_values()
    with pretend_gpus(2) as gpus:
        copied = copy_to_device(values, GPU)
        assert not gpus.waits
        assert {tensor.device for tensor in tensors_of(copied)} == {GPU}
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors_of(copied)}) == 1
        returned = copy_to_device(copied, HOST)
        assert len(gpus.waits) == 1
        assert {tensor.device for tensor in tensors_of(returned)} == {HOST}
    for found, expected in zip(tensors_of(returned), tensors_of(values), strict=True):
        assert torch.equal(found, expected) and found.dtype == expected.dtype
    assert (returned[0].number, returned[2].mask, returned[3]) == (0.5, None, "text")


def test_tensors_of_the_device_are_not_copied() -> None:
    values = make_values()
    assert copy_to_device(values, HOST) is values
    with pretend_gpus(2):
        on_gpu = torch.ones(3, device=GPU)
        copied, host = copy_to_device((on_gpu, torch.ones(3)), GPU)
        assert copied is on_gpu and host.device == GPU


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float32])
def test_every_tensor_begins_at_an_aligned_byte(dtype: torch.dtype) -> None:
    with pretend_gpus(2):
        first, second = copy_to_device([torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=dtype)], GPU)
    assert second.data_ptr() - first.data_ptr() == 256
