"""Log-probs and entropies of tokens on a GPU, in few passes over the logits.

    forward     product with the head, one kernel for log-prob, log-sum-exp and entropy
    backward    product again (not for the last chunk), one kernel for the gradient of the logits in the dtype of the
                rows, two products for the gradients of rows and head

Products of half-precision factors are summed in float32. The gradient of the head is summed over chunks in float32 by
the products themselves, so no second [V, D] tensor exists.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchgrpo.training.logit_operations import logit_gradient, token_statistics
from torchgrpo.training.sampling_distribution import SamplingDistribution, row_chunks


class FusedLogProbs(torch.autograd.Function):
    """Autograd function of `selected_log_probs` on a GPU; entropies cost no further pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        sampling: SamplingDistribution,
        rows: int,
        needs_backward: bool,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(hidden_states, weight, bias, targets, sampling, rows)
        log_prob = hidden_states.new_empty(len(hidden_states), dtype=head.dtype)
        log_normaliser, entropy = torch.empty_like(log_prob), torch.empty_like(log_prob)
        for chunk in head.chunks:
            statistics = token_statistics(head.logits(chunk), targets[chunk], head.divisor[chunk])
            log_prob[chunk], log_normaliser[chunk], entropy[chunk] = statistics
        ctx.save_for_backward(hidden_states, weight, bias, targets, log_normaliser, entropy)
        ctx.sampling, ctx.rows, ctx.last_logits = sampling, rows, head.buffer if needs_backward else None
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden_states, weight, bias, targets, log_normaliser, entropy = ctx.saved_tensors
        slope, entropy_slope = (
            torch.zeros_like(entropy) if gradient is None else gradient / ctx.sampling.temperature
            for gradient in (grad_log_prob, grad_entropy)
        )
        last_logits, ctx.last_logits = ctx.last_logits, None  # overwritten: a second backward pass recomputes it
        head = _Head(hidden_states, weight, bias, targets, ctx.sampling, ctx.rows, last_logits)
        # A power of two per row keeps small slopes in the range of float16. Multiplication by it is exact.
        scale = torch.ldexp(torch.ones_like(slope), torch.frexp(slope.abs() + entropy_slope.abs()).exponent)
        slope, entropy_slope = slope / scale, entropy_slope / scale
        gradients = _HeadGradients(head, scale, ctx.needs_input_grad)
        tokens = torch.arange(len(weight), device=weight.device)
        for chunk in reversed(head.chunks):
            if last_logits is None:
                logits = head.logits(chunk)
            else:
                logits, last_logits = last_logits, None
            of_rows = (each[chunk] for each in (targets, head.divisor, log_normaliser, entropy, slope, entropy_slope))
            gradients.add(chunk, logit_gradient(logits, *of_rows, tokens, hidden_states.dtype))
        return (gradients.hidden_states, gradients.weight, gradients.bias, None, None, None, None)


class _Head:
    """Output head applied to chunks of rows; logits are float32 (float64 for float64 rows).

    weight: [V, D] in the dtype of the rows. divisor: [M] temperatures that the logits are not yet divided by. buffer:
    the logits [C, V] of the last call of `logits`. A chunk of as many rows reuses its memory.
    """

    def __init__(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        sampling: SamplingDistribution,
        rows: int,
        buffer: Tensor | None = None,
    ) -> None:
        self.dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        self.hidden_states, self.weight = hidden_states, weight.to(hidden_states.dtype)
        self.bias = None if bias is None else bias.to(self.dtype)
        self.targets, self.sampling, self.buffer = targets, sampling, buffer
        self.chunks = row_chunks(len(hidden_states), rows)
        divisor = 1.0 if sampling.restricts else sampling.temperature
        self.divisor = torch.ones(len(targets), dtype=self.dtype, device=targets.device).mul_(divisor)

    def logits(self, chunk: slice) -> Tensor:
        """Computes the logits [C, V] of the rows `chunk`.

        A restricted distribution is already applied to them.
        """
        inputs = self.hidden_states[chunk]
        if self.buffer is None or len(self.buffer) != len(inputs):
            self.buffer = None  # frees its memory first
            self.buffer = inputs.new_empty((len(inputs), len(self.weight)), dtype=self.dtype)
        logits = multiply_matrices(inputs, self.weight.T, self.buffer)
        if self.bias is not None:
            logits.add_(self.bias)
        return self.sampling.apply(logits, self.targets, chunk) if self.sampling.restricts else logits


class _HeadGradients:
    """Gradients of the head's inputs, collected chunk by chunk.

    hidden_states, weight, bias: the gradients; None for an input that needs none. scale: [M], by which the gradients
    of logits are divided.
    """

    def __init__(self, head: _Head, scale: Tensor, needs_grad: tuple[bool, ...]) -> None:
        self.head, self.scale = head, scale
        create = torch.empty_like if head.chunks else torch.zeros_like
        self.hidden_states = create(head.hidden_states) if needs_grad[0] else None
        self.weight = create(head.weight, dtype=head.dtype) if needs_grad[1] else None
        self.bias = torch.zeros_like(head.bias) if head.bias is not None and needs_grad[2] else None

    def add(self, chunk: slice, gradient: Tensor) -> None:
        """Adds the gradients of the rows `chunk`; the last chunk comes first.

        gradient: [C, V]; `scale` times `gradient` is the gradient of the logits.
        """
        head, scale = self.head, self.scale[chunk, None]
        if self.hidden_states is not None:
            back = gradient.new_empty((len(gradient), head.weight.shape[1]), dtype=head.dtype)
            self.hidden_states[chunk] = multiply_matrices(gradient, head.weight, back).mul_(scale)
        if self.weight is not None:
            inputs = (head.hidden_states[chunk] * scale).to(gradient.dtype)
            if chunk is head.chunks[-1]:
                multiply_matrices(gradient.T, inputs, self.weight)
            else:
                add_product(self.weight, gradient.T, inputs)
        if self.bias is not None:
            total = torch.empty_like(self.bias)[:, None]
            self.bias += multiply_matrices(gradient.T, scale.to(gradient.dtype), total)[:, 0]


def multiply_matrices(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Writes the product of two matrices to `out`, summed in its dtype."""
    if left.dtype == out.dtype:
        return torch.mm(left, right, out=out)
    return torch.mm(left, right, out_dtype=out.dtype, out=out)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the product of two matrices to `total` in place, summed in its dtype."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
