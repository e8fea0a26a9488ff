"""Log-probs and entropies of sampled tokens from hidden states, with logits computed in chunks.

Rows go through the output head in chunks of logits. The forward pass keeps only [M] numbers and the log-probs
of the last chunk. The backward pass begins with this chunk and recomputes the logits of all others: it needs
one more matrix product than with stored logits, but no memory that grows with M times V.

A GPU has a function of its own, `training/fused_log_probs.py`. The function below runs on a CPU.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchgrpo.plan.microbatch_sizes import automatic_chunk_size
from torchgrpo.training.fused_log_probs import FusedLogProbs
from torchgrpo.training.sampling_distribution import SamplingDistribution, row_chunks


def selected_log_probs(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    chunk_size: int | None = None,
    with_entropy: bool = False,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Computes the log-prob of each target and, if requested, the entropy of each distribution.

    hidden_states: [M, D]. weight: [V, D] and bias: [V] or None, of the output head. targets: [M] int64.
    temperature (a number, or [M]), top_k (0: all), top_p (1: all), min_p (0: all): of the distribution that the
        targets were sampled from.
    chunk_size: rows whose logits exist at one time; None: `automatic_chunk_size`.
    with_entropy: also return the entropy in nats.

    Returns log_prob [M] and entropy [M] or None, float32 (float64 for float64 inputs), both differentiable in
    hidden_states, weight and bias. Logits, softmax and sums are float32 whatever the inputs' dtype; the
    gradient of the head is summed over chunks in float32.

    Raises:
        ValueError: a number as temperature that is not above 0.
    """
    if not isinstance(temperature, Tensor):  # to check a tensor on a GPU, the host would wait for it
        check_temperature(temperature)
    sampling = SamplingDistribution(temperature, top_k, top_p, min_p)
    fuses = fuses_logits(hidden_states.device)
    rows = chunk_size or automatic_chunk_size(weight.shape[0], weight.shape[1], on_cpu=not fuses)
    needs_backward = torch.is_grad_enabled() and (hidden_states.requires_grad or weight.requires_grad)
    inputs = (hidden_states, weight, bias, targets, sampling, rows, needs_backward)
    with torch.autocast(hidden_states.device.type, enabled=False):
        if fuses:
            log_prob, entropy = FusedLogProbs.apply(*inputs)  # type: ignore[no-untyped-call]
        else:
            log_prob, entropy = _SelectedLogProbs.apply(*inputs, with_entropy)  # type: ignore[no-untyped-call]
    return log_prob, entropy if with_entropy else None


def check_temperature(temperature: float | Tensor) -> None:
    """Refuses temperatures that are not above 0.

    Raises:
        ValueError: a temperature is not above 0.
    """
    if not (temperature.gt(0).all() if isinstance(temperature, Tensor) else temperature > 0):
        raise ValueError(f"temperature={temperature}: log-probs need a temperature above 0")


def fuses_logits(device: torch.device) -> bool:
    """Whether the passes over logits are fused, and half-precision factors are summed in float32."""
    return device.type == "cuda"


def _rounds_gradients(hidden_states: Tensor) -> bool:
    """Whether gradients of `hidden_states` come from bfloat16 products on a CPU.

    This holds for CPUs with fast bfloat16 products. These gradients are rounded to bfloat16 anyway; a product
    on a CPU has the dtype of its factors.
    """
    features = torch.cpu.get_capabilities() if hidden_states.device.type == "cpu" else {}
    return hidden_states.dtype == torch.bfloat16 and bool(features.get("amx_bf16") or features.get("avx512_bf16"))


class _SelectedLogProbs(torch.autograd.Function):
    """Autograd function of `selected_log_probs` on a CPU."""

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
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(hidden_states, weight, bias, sampling, rows)
        log_prob = hidden_states.new_empty(len(hidden_states), dtype=head.dtype)
        log_normaliser = torch.empty_like(log_prob)
        entropy = torch.empty_like(log_prob)
        last_chunk = None
        for chunk in head.chunks:
            logits = head.logits(chunk, targets)
            chosen = logits.gather(1, targets[chunk, None])[:, 0]
            largest = logits.amax(dim=1)
            keeps_logits = needs_backward and not sampling.restricts and chunk is head.chunks[-1]
            log_total, entropy[chunk] = head.log_total_and_entropy(
                logits.sub_(largest[:, None]), with_entropy, keeps_logits
            )
            log_normaliser[chunk] = log_total + largest
            log_prob[chunk] = chosen - log_normaliser[chunk]
            if keeps_logits:
                logits.sub_(log_total[:, None])
                last_chunk = head.buffer
        ctx.save_for_backward(hidden_states, weight, bias, targets, log_normaliser, entropy)
        ctx.sampling, ctx.rows, ctx.last_chunk = sampling, rows, last_chunk
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden_states, weight, bias, targets, log_normaliser, entropy = ctx.saved_tensors
        if grad_log_prob is None:
            grad_log_prob = torch.zeros_like(log_normaliser)
        slope = grad_log_prob / ctx.sampling.temperature
        entropy_slope = None if grad_entropy is None else grad_entropy / ctx.sampling.temperature
        last_chunk, ctx.last_chunk = (ctx.last_chunk, None)  # overwritten below: a second backward pass recomputes it
        head = _Head(hidden_states, weight, bias, ctx.sampling, ctx.rows, last_chunk)
        gradients = _HeadGradients(head, ctx.needs_input_grad)
        for chunk in reversed(head.chunks):
            if last_chunk is None:
                log_probs = head.logits(chunk, targets).sub_(log_normaliser[chunk, None])
            else:
                log_probs, last_chunk = last_chunk[: len(hidden_states[chunk])], None
            if entropy_slope is None:
                gradients.add(chunk, targets[chunk], slope[chunk], log_probs.exp_(), slope[chunk])
            else:
                # p (slope + entropy_slope (log p + H)) is minus the gradient of all logits but the targets':
                # d log p_t / d z_j = [j = t] - p_j and d H / d z_j = -p_j (log p_j + H).
                probabilities = torch.exp(log_probs, out=head.spare_logits(log_probs))
                if ctx.sampling.restricts:
                    log_probs.masked_fill_(log_probs == -torch.inf, 0.0)
                constant = slope[chunk] + entropy_slope[chunk] * entropy[chunk]
                log_probs.mul_(entropy_slope[chunk, None]).add_(constant[:, None])
                gradients.add(chunk, targets[chunk], slope[chunk], log_probs.mul_(probabilities))
        return (gradients.hidden_states, gradients.weight, gradients.bias, None, None, None, None, None)


class _Head:
    """Output head applied to chunks of rows, in float32 (float64 for float64 inputs).

    For half-precision rows the head is rounded to their dtype, and the factors of products are converted to float32.
    Two buffers of one chunk's logits are reused for all chunks, because allocating new ones is slow on a CPU.

    weight_in_row_dtype: the head [V, D] in the dtype of the rows, if these are half precision.
    half_weight: the same tensor, for gradients of rows, where `_rounds_gradients`.
    """

    def __init__(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sampling: SamplingDistribution,
        rows: int,
        buffer: Tensor | None = None,
    ) -> None:
        self.dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        half = hidden_states.dtype in (torch.float16, torch.bfloat16)
        self.hidden_states = hidden_states
        self.weight_in_row_dtype = weight.to(hidden_states.dtype) if half else weight
        self.half_weight = self.weight_in_row_dtype if _rounds_gradients(hidden_states) else None
        self.bias = None if bias is None else bias.to(self.dtype)
        self.sampling = sampling
        self.chunks = row_chunks(len(hidden_states), rows)
        self._rows = min(rows, len(hidden_states))
        self.buffer = buffer
        self._spare_buffer: Tensor | None = None

    @cached_property
    def weight(self) -> Tensor:
        """Head [V, D] in `dtype`, created lazily.

        A backward pass over a single chunk needs only `half_weight`.
        """
        return self.weight_in_row_dtype.to(self.dtype)

    def logits(self, chunk: slice, targets: Tensor) -> Tensor:
        """Computes the logits [C, V] of the rows `chunk`.

        The caller may overwrite the result; the next call reuses its memory.
        """
        inputs = self.hidden_states[chunk]
        if self.buffer is None:
            self.buffer = self._new_buffer()
        logits = self.product(inputs, self.weight.T, out=self.buffer[: len(inputs)])
        if self.bias is not None:
            logits.add_(self.bias)
        return self.sampling.apply(logits, targets, chunk)

    def product(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiplies two matrices in `dtype`."""
        return torch.mm(left.to(self.dtype), right.to(self.dtype), out=out)

    def row_gradients(self, logit_gradient: Tensor) -> Tensor:
        """Computes gradients [C, D] of rows from gradients [C, V] of their logits."""
        if self.half_weight is None:
            return self.product(logit_gradient, self.weight)
        return torch.mm(logit_gradient.to(self.half_weight.dtype), self.half_weight).to(self.dtype)

    def spare_logits(self, like: Tensor) -> Tensor:
        """Returns the second buffer, cut to the rows of `like`."""
        if self._spare_buffer is None:
            self._spare_buffer = self._new_buffer()
        return self._spare_buffer[: len(like)]

    def _new_buffer(self) -> Tensor:
        shape = (self._rows, self.weight_in_row_dtype.shape[0])
        return torch.empty(shape, dtype=self.dtype, device=self.hidden_states.device)

    def log_total_and_entropy(self, logits: Tensor, with_entropy: bool, keep: bool) -> tuple[Tensor, Tensor | float]:
        """Computes log-sum-exp and entropy, [C] each, of rows of logits whose maximum is 0.

        Overwrites the logits unless `keep`; a restricted distribution does not support `keep`.
        """
        if not (with_entropy or keep):
            return logits.exp_().sum(dim=1).log(), 0.0
        weights = torch.exp(logits, out=self.spare_logits(logits))
        total = weights.sum(dim=1)
        if not with_entropy:
            return total.log(), 0.0
        if self.sampling.restricts:
            logits.masked_fill_(logits == -torch.inf, 0.0)
        expected = weights.mul_(logits).sum(dim=1) / total
        return total.log(), total.log() - expected


class _HeadGradients:
    """Gradients of the head's inputs, collected chunk by chunk.

    Gradients of `hidden_states` are written per chunk; those of the head are summed over chunks in float32. The
    slope of a row multiplies the [D] side of the products where possible, never the [V] side.
    """

    def __init__(self, head: _Head, needs_grad: tuple[bool, ...]) -> None:
        self.head = head
        hidden_states, weight, bias = head.hidden_states, head.weight_in_row_dtype, head.bias
        self.hidden_states = torch.zeros_like(hidden_states, dtype=head.dtype) if needs_grad[0] else None
        self.weight = torch.zeros_like(weight, dtype=head.dtype) if needs_grad[1] else None
        self.bias = torch.zeros_like(bias) if bias is not None and needs_grad[2] else None

    def add(
        self, chunk: slice, targets: Tensor, slope: Tensor, logit_gradient: Tensor, logit_slope: Tensor | None = None
    ) -> None:
        """Adds the gradients of the rows `chunk`.

        The gradient of the logits is `slope` [C] at the targets minus `logit_gradient` [C, V], which is multiplied
        by `logit_slope` [C] if set. Overwrites `logit_gradient` where it is rounded: both terms nearly cancel at a
        likely target, so they are summed before the rounding, which is coarser than their difference.
        """
        head = self.head
        inputs = head.hidden_states[chunk].to(head.dtype)
        if head.half_weight is not None:
            own = slope if logit_slope is None else torch.ones_like(slope)
            logit_gradient.scatter_add_(1, targets[:, None], -own[:, None])
        else:
            if self.hidden_states is not None:
                torch.mul(head.weight[targets].to(head.dtype), slope[:, None], out=self.hidden_states[chunk])
            if self.weight is not None:
                self.weight.index_add_(0, targets, inputs * slope[:, None])
            if self.bias is not None:
                self.bias.index_add_(0, targets, slope)
        if logit_slope is not None:
            inputs = inputs * logit_slope[:, None]
        if self.bias is not None:
            slopes = torch.ones_like(logit_gradient[:, 0]) if logit_slope is None else logit_slope
            self.bias.addmv_(logit_gradient.T, slopes, alpha=-1)
        if self.hidden_states is not None:
            back = head.row_gradients(logit_gradient)
            self.hidden_states[chunk] -= back if logit_slope is None else back.mul_(logit_slope[:, None])
        if self.weight is not None:
            self.weight.addmm_(logit_gradient.T, inputs, alpha=-1)
