"""Log-probs and entropies of sampled tokens from hidden states, without the [tokens, vocabulary] logits.

Rows go through the output head in chunks; only [M] numbers stay. The backward pass computes a chunk's logits
again: one matrix product more than keeping them, and no memory that grows with M times V.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 24
"""Logits in a chunk when no size is asked for: 64 MiB of float32."""


@dataclass(frozen=True)
class _Sampling:
    """The distribution: temperature first, then top-k, then top-p on what top-k left."""

    temperature: float
    top_k: int
    top_p: float

    @property
    def restricts(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0

    def apply(self, logits: Tensor, targets: Tensor) -> Tensor:
        """`logits` [C, V] in place: divided by the temperature, -inf outside the kept set.

        The target is always kept: it was drawn, and where rounding or newer weights would leave it out, its
        log-prob stays finite.
        """
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        if self.restricts:
            chosen = logits.gather(1, targets[:, None])
            self._restrict(logits)
            logits.scatter_(1, targets[:, None], chosen)
        return logits

    def _restrict(self, logits: Tensor) -> None:
        vocabulary = logits.shape[1]
        kept = min(self.top_k, vocabulary) if self.top_k > 0 else vocabulary
        ordered, order = (
            logits.topk(kept, dim=1) if kept < vocabulary else logits.sort(dim=1, descending=True)
        )
        if self.top_p < 1.0:
            probabilities = ordered.softmax(dim=1)
            before = probabilities.cumsum(dim=1) - probabilities
            ordered = ordered.masked_fill(before >= self.top_p, -torch.inf)
        logits.fill_(-torch.inf).scatter_(1, order, ordered)


def selected_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    with_entropy: bool = False,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target, and the entropy of each distribution.

    hidden: [M, D]. weight: [V, D] and bias: [V] or None, of the output head. targets: [M] int64.
    temperature, top_k (0: all), top_p (1: all): of the distribution that the targets were drawn from.
    chunk_size: rows whose logits exist at one time; None: as many as make 64 MiB.
    with_entropy: also return the entropy in nats.

    Returns log_prob [M] and entropy [M] or None, float32 (float64 for float64 inputs), both differentiable in
    hidden, weight and bias. Logits, softmax and sums are float32 whatever the inputs' dtype; the gradient of
    the head is summed over chunks in float32.

    Raises:
        ValueError: a temperature that is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: log-probs need a temperature above 0")
    sampling = _Sampling(temperature, top_k, top_p)
    rows = chunk_size or max(1, CHUNK_ELEMENTS // weight.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        log_prob, entropy = _SelectedLogProbs.apply(
            hidden, weight, bias, targets, sampling, rows, with_entropy
        )
    return log_prob, entropy if with_entropy else None


class _SelectedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        sampling: _Sampling,
        rows: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(hidden, weight, bias)
        log_prob = hidden.new_empty(len(hidden), dtype=head.dtype)
        log_normaliser = torch.empty_like(log_prob)
        entropy = torch.empty_like(log_prob)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = sampling.apply(head.logits(hidden[part]), targets[part])
            chosen = logits.gather(1, targets[part, None])[:, 0]
            normaliser, entropy[part] = _normaliser_and_entropy(logits, with_entropy)
            log_prob[part] = chosen - normaliser
            log_normaliser[part] = normaliser
        ctx.save_for_backward(hidden, weight, bias, targets, log_normaliser, entropy)
        ctx.sampling, ctx.rows = sampling, rows
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, targets, log_normaliser, entropy = ctx.saved_tensors
        if grad_log_prob is None:
            grad_log_prob = torch.zeros_like(log_normaliser)
        head = _Head(hidden, weight, bias)
        gradients = _HeadGradients(head, ctx.needs_input_grad)
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            logits = ctx.sampling.apply(head.logits(hidden[part]), targets[part])
            logits.sub_(log_normaliser[part, None])
            slope = None if grad_entropy is None else grad_entropy[part]
            grad = _grad_logits(logits, targets[part], grad_log_prob[part], slope, entropy[part])
            if ctx.sampling.temperature != 1.0:
                grad.div_(ctx.sampling.temperature)
            gradients.add(part, grad)
        return (*gradients.finished(), None, None, None, None)


def _normaliser_and_entropy(logits: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | float]:
    """log sum exp and entropy of the rows of `logits` [C, V], which is overwritten."""
    largest = logits.amax(dim=1, keepdim=True)
    logits.sub_(largest)
    if not with_entropy:
        total = logits.exp_().sum(dim=1)
        return total.log() + largest[:, 0], 0.0
    weights = logits.exp()
    total = weights.sum(dim=1)
    expected = torch.linalg.vecdot(weights, logits.masked_fill_(logits == -torch.inf, 0.0)) / total
    return total.log() + largest[:, 0], total.log() - expected


def _grad_logits(
    log_probs: Tensor, targets: Tensor, grad_log_prob: Tensor, grad_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    """Gradient at the logits, [C, V]; `log_probs` [C, V] is overwritten.

    d log p_t / d z_j = [j = t] - p_j;  d H / d z_j = -p_j (log p_j + H).
    """
    if grad_entropy is None:
        grad = log_probs.exp_().mul_(-grad_log_prob[:, None])
    else:
        probabilities = log_probs.exp()
        log_probs.masked_fill_(log_probs == -torch.inf, 0.0)
        log_probs.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_log_prob[:, None])
        grad = log_probs.mul_(probabilities).neg_()
    return grad.scatter_add_(1, targets[:, None], grad_log_prob[:, None])


class _Head:
    """The output head with float32 results (float64 for float64) whatever the dtype of its inputs.

    Half precision on a GPU multiplies as it is and sums in float32; on a CPU it is widened first.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        half = hidden.dtype in (torch.float16, torch.bfloat16)
        self.factor_dtype = hidden.dtype if half and hidden.is_cuda else self.dtype
        self.weight = weight.to(self.factor_dtype)
        self.bias = None if bias is None else bias.to(self.dtype)
        self.hidden = hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.product(hidden, self.weight.T)
        return logits if self.bias is None else logits.add_(self.bias)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        left, right = left.to(self.factor_dtype), right.to(self.factor_dtype)
        if self.factor_dtype == self.dtype:
            return left @ right
        return torch.mm(left, right, out_dtype=self.dtype)


class _HeadGradients:
    """Sums the gradients of the head's inputs over chunks."""

    def __init__(self, head: _Head, needed: tuple[bool, ...]) -> None:
        self.head = head
        hidden, weight, bias = head.hidden, head.weight, head.bias
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=head.dtype) if needed[1] else None
        self.bias = torch.zeros_like(bias) if bias is not None and needed[2] else None

    def add(self, part: slice, grad: Tensor) -> None:
        """grad: [C, V] at the logits of the rows `part`."""
        if self.hidden is not None:
            self.hidden[part] = self.head.product(grad, self.head.weight).to(self.hidden.dtype)
        if self.weight is not None:
            inputs = self.head.hidden[part]
            if self.head.factor_dtype == self.head.dtype:
                self.weight.addmm_(grad.T, inputs.to(self.head.dtype))
            else:
                self.weight.add_(self.head.product(grad.T, inputs))
        if self.bias is not None:
            self.bias.add_(grad.sum(dim=0))

    def finished(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.hidden, self.weight, self.bias
