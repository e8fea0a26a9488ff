"""The frozen model on the learner's own devices, scoring in turns with the policy.

One with devices of its own is in `training/scorers.py`.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchgrpo.batches.batch import Batch, Tokens
from torchgrpo.training.adapters import causal_model
from torchgrpo.training.forward import ResponseScorer

ALIGNMENT = 256
"""Bytes: weights begin at multiples of it, as those of separate tensors on a GPU do."""


class HostMemory:
    """Weights of a frozen model that live in host memory and visit a device to work.

    One buffer holds them all, so a visit is one copy and what it takes of the device one block. Where the device is
    a GPU the buffer is pinned, which lets the copy run at the bus's full rate; registered and not allocated as
    pinned, for torch rounds such allocations up to a power of two. Between visits the parameters are empty: nothing
    can compute with them on the CPU by mistake.

    Args:
        model: on the CPU; its parameters are taken over. Its buffers, which are small, go to the device for good.
        device: the one that it visits.
    Raises:
        RuntimeError: the buffer cannot be pinned.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self._places: list[tuple[nn.Parameter, slice, torch.Size]] = []
        end = 0
        for parameter in model.parameters():
            place = slice(end, end + parameter.nbytes)
            self._places.append((parameter, place, parameter.shape))
            end = -(-place.stop // ALIGNMENT) * ALIGNMENT
        self._host = torch.empty(end, dtype=torch.uint8)
        for parameter, place, shape in self._places:
            _view(self._host, parameter, place, shape).copy_(parameter.data)
            self._leave(parameter)
        if device.type == "cuda":
            runtime, address = torch.cuda.cudart(), self._host.data_ptr()
            portable = 1  # pinned for every GPU, not only for the current one
            error = int(runtime.cudaHostRegister(address, self._host.nbytes, portable))
            if error:
                raise RuntimeError(
                    f"{end / 2**30:.1f} GiB of host memory for the reference model could not be pinned (CUDA error "
                    f"{error}): the machine or its container allows less. Give the reference a GPU "
                    "(ref_model.devices), train a LoRA adapter (train_model.lora.enabled=true), or set policy.kl_coef=0"
                )
            weakref.finalize(self, runtime.cudaHostUnregister, address)
        model.to(device)

    @contextmanager
    def visit(self) -> Iterator[None]:
        """The weights are on the device inside, and their memory there is free again afterwards."""
        there = self._host.to(self.device, non_blocking=True, copy=True)
        for parameter, place, shape in self._places:
            parameter.data = _view(there, parameter, place, shape)
        try:
            yield
        finally:
            for parameter, *_ in self._places:
                self._leave(parameter)

    def _leave(self, parameter: nn.Parameter) -> None:
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)


def _view(buffer: Tensor, parameter: nn.Parameter, place: slice, shape: torch.Size) -> Tensor:
    return buffer[place].view(parameter.dtype).view(shape)


@dataclass(eq=False)
class Reference:
    """Scores batches with weights that never change.

    scorer: over these weights, with the sampling distribution's temperature.
    visit: entered for every batch, such as `HostMemory.visit`.
    """

    scorer: ResponseScorer
    visit: Callable[[], AbstractContextManager[None]] = nullcontext

    def log_prob(self, parts: Iterable[Batch]) -> list[Tensor]:
        """Of each part [n, R] float32, zeros outside the loss mask."""
        with self.visit():
            return [frozen_log_prob(self.scorer, part.reference_tokens, part.temperature) for part in parts]


@torch.no_grad()
def frozen_log_prob(scorer: ResponseScorer, tokens: Tokens, temperature: Tensor) -> Tensor:
    """Log-probs [n, R] of tokens that another model may have drawn.

    That model's embedding may have more rows, of ids that are no token.
    """
    rows = causal_model(scorer.model).get_input_embeddings().num_embeddings
    assert isinstance(rows, int)
    return scorer(tokens.below(rows), temperature).log_prob
