"""Frozen reference or teacher in the learner's process, optionally kept in host memory.

A frozen model on separate devices is in `training/frozen_scorers.py`.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchgrpo.batches.batch import Batch, Tokens
from torchgrpo.training.adapters import causal_model
from torchgrpo.training.response_scorer import ResponseScorer

ALIGNMENT = 256
"""Alignment of each weight in the buffer in bytes, as for separate tensors on a GPU."""


class HostWeights:
    """Weights of a frozen model in host memory, copied to a device on use.

    A single buffer has all weights, so moving them is one copy into one block of device memory. For a GPU the
    buffer is pinned, so that the copy runs at full bus rate. It is registered as pinned instead of allocated as
    pinned, because torch rounds pinned allocations up to a power of two. While the weights are not on the
    device, the parameters are empty, so that nothing computes with them on the CPU by mistake.

    Args:
        model: on the CPU; this object takes over its parameters. Its (small) buffers stay on the device.
        device: device to compute on.
    Raises:
        RuntimeError: the buffer cannot be pinned.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self._layout: list[tuple[nn.Parameter, slice, torch.Size]] = []
        end = 0
        for parameter in model.parameters():
            byte_range = slice(end, end + parameter.nbytes)
            self._layout.append((parameter, byte_range, parameter.shape))
            end = -(-byte_range.stop // ALIGNMENT) * ALIGNMENT
        self._host = torch.empty(end, dtype=torch.uint8)
        for parameter, byte_range, shape in self._layout:
            _parameter_view(self._host, parameter, byte_range, shape).copy_(parameter.data)
            self._release_parameter(parameter)
        if device.type == "cuda":
            runtime, address = torch.cuda.cudart(), self._host.data_ptr()
            portable = 1  # pinned for all GPUs, not only for the current one
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
    def on_device(self) -> Iterator[None]:
        """Holds the weights on the device for the block, and frees their device memory afterwards."""
        device_buffer = self._host.to(self.device, non_blocking=True, copy=True)
        for parameter, byte_range, shape in self._layout:
            parameter.data = _parameter_view(device_buffer, parameter, byte_range, shape)
        try:
            yield
        finally:
            for parameter, *_ in self._layout:
                self._release_parameter(parameter)

    def _release_parameter(self, parameter: nn.Parameter) -> None:
        """Replaces the data of a parameter by an empty tensor on the device."""
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)


def _parameter_view(buffer: Tensor, parameter: nn.Parameter, byte_range: slice, shape: torch.Size) -> Tensor:
    """Views bytes of the buffer as a tensor with the parameter's dtype and shape."""
    return buffer[byte_range].view(parameter.dtype).view(shape)


@dataclass(eq=False)
class ReferenceModel:
    """Frozen model that scores batches in the learner's process.

    scorer: scorer with the frozen weights and the temperature of the sampling distribution.
    scoring_context: entered while batches are scored, for example `HostWeights.on_device`.
    """

    scorer: ResponseScorer
    scoring_context: Callable[[], AbstractContextManager[None]] = nullcontext

    def log_prob(self, batches: Iterable[Batch]) -> list[Tensor]:
        """Computes the log-probs of each batch, float32 [n, R], 0 outside the loss mask."""
        with self.scoring_context():
            return [frozen_log_prob(self.scorer, batch.reference_tokens, batch.temperature) for batch in batches]


@torch.no_grad()
def frozen_log_prob(scorer: ResponseScorer, tokens: Tokens, temperature: Tensor) -> Tensor:
    """Computes log-probs [n, R] of tokens that another model may have sampled.

    The embedding of that model may have more rows (for ids that are no token).
    """
    rows = causal_model(scorer.model).get_input_embeddings().num_embeddings
    assert isinstance(rows, int)
    return scorer(tokens.clamp_to_vocabulary(rows), temperature).log_prob
