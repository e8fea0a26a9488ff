"""Log-probs and entropies of sampled tokens from hidden states, without the [tokens, vocabulary] logits.

Rows go through the output head in chunks; only [M] numbers stay, and the last chunk's log-probs, with which the
backward pass begins. It computes the logits of all other chunks again: one matrix product more than keeping
them, and no memory that grows with M times V.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits in a chunk when no size is asked for: 64 MiB of float32 in a CPU's reach, 512 MiB on a GPU."""


@dataclass(frozen=True)
class _Sampling:
    """The distribution: temperature first, then top-k, then top-p on what top-k left."""

    temperature: float | Tensor
    top_k: int
    top_p: float

    @property
    def restricts(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0

    def apply(self, logits: Tensor, targets: Tensor, part: slice) -> Tensor:
        """`logits` [C, V] of the rows `part` in place: divided by the temperature, -inf outside the kept set.

        The target is always kept: it was drawn, and where rounding or newer weights would leave it out, its
        log-prob stays finite.
        """
        if isinstance(self.temperature, Tensor):
            logits.div_(self.temperature[part, None])
        elif self.temperature != 1.0:
            logits.div_(self.temperature)
        if self.restricts:
            aims = targets[part, None]
            chosen = logits.gather(1, aims)
            self._restrict(logits)
            logits.scatter_(1, aims, chosen)
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
    temperature: float | Tensor = 1.0,
    chunk_size: int | None = None,
    with_entropy: bool = False,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target, and the entropy of each distribution.

    hidden: [M, D]. weight: [V, D] and bias: [V] or None, of the output head. targets: [M] int64.
    temperature (a number, or [M]), top_k (0: all), top_p (1: all): of the distribution that the targets were
    drawn from.
    chunk_size: rows whose logits exist at one time; None: `automatic_chunk_size`.
    with_entropy: also return the entropy in nats.

    Returns log_prob [M] and entropy [M] or None, float32 (float64 for float64 inputs), both differentiable in
    hidden, weight and bias. Logits, softmax and sums are float32 whatever the inputs' dtype; the gradient of
    the head is summed over chunks in float32.

    Raises:
        ValueError: a temperature that is not above 0.
    """
    if not (temperature.gt(0).all() if isinstance(temperature, Tensor) else temperature > 0):
        raise ValueError(f"temperature={temperature}: log-probs need a temperature above 0")
    sampling = _Sampling(temperature, top_k, top_p)
    rows = chunk_size or automatic_chunk_size(weight.shape[0], weight.shape[1], hidden.device)
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(hidden.device.type, enabled=False):
        log_prob, entropy = _SelectedLogProbs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, sampling, rows, with_entropy, learns
        )
    return log_prob, entropy if with_entropy else None


def automatic_chunk_size(vocabulary: int, width: int, device: torch.device) -> int:
    """Rows whose logits fill the device's `CHUNK_ELEMENTS`, or a quarter of the head's own size if that is
    more: each chunk passes over the whole head and its gradient, which only many rows make worth while."""
    return max(1, CHUNK_ELEMENTS.get(device.type, 1 << 24) // vocabulary, width // 4)


def _multiplies_half(device: torch.device) -> bool:
    """Whether half-precision factors can be summed in float32."""
    return device.type == "cuda"


def _rounds_gradients(hidden: Tensor) -> bool:
    """Whether a CPU multiplies factors of this dtype so much faster than float32 ones that gradients of `hidden`, which
    are rounded to it anyway, are worth having from them; a product there has the dtype of its factors."""
    known = torch.cpu.get_capabilities() if hidden.device.type == "cpu" else {}
    return hidden.dtype == torch.bfloat16 and bool(known.get("amx_bf16") or known.get("avx512_bf16"))


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
        learns: bool,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(hidden, weight, bias, sampling, rows)
        log_prob = hidden.new_empty(len(hidden), dtype=head.dtype)
        log_normaliser = torch.empty_like(log_prob)
        entropy = torch.empty_like(log_prob)
        kept = None
        for part in head.parts:
            logits = head.logits(part, targets)
            chosen = logits.gather(1, targets[part, None])[:, 0]
            largest = logits.amax(dim=1)
            keep = learns and not sampling.restricts and part is head.parts[-1]
            log_total, entropy[part] = head.log_total_and_entropy(
                logits.sub_(largest[:, None]), with_entropy, keep
            )
            log_normaliser[part] = log_total + largest
            log_prob[part] = chosen - log_normaliser[part]
            if keep:
                logits.sub_(log_total[:, None])
                kept = head.buffer
        ctx.save_for_backward(hidden, weight, bias, targets, log_normaliser, entropy)
        ctx.sampling, ctx.rows, ctx.kept = sampling, rows, kept
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, targets, log_normaliser, entropy = ctx.saved_tensors
        if grad_log_prob is None:
            grad_log_prob = torch.zeros_like(log_normaliser)
        slope = grad_log_prob / ctx.sampling.temperature
        entropy_slope = None if grad_entropy is None else grad_entropy / ctx.sampling.temperature
        kept, ctx.kept = ctx.kept, None  # its memory is overwritten: a second backward computes all anew
        head = _Head(hidden, weight, bias, ctx.sampling, ctx.rows, kept)
        gradients = _HeadGradients(head, ctx.needs_input_grad)
        for part in reversed(head.parts):
            if kept is None:
                log_probs = head.logits(part, targets).sub_(log_normaliser[part, None])
            else:
                log_probs, kept = kept[: len(hidden[part])], None
            if entropy_slope is None:
                gradients.add(part, targets[part], slope[part], log_probs.exp_(), slope[part])
            else:
                # p (slope + entropy_slope (log p + H)) is minus the gradient at the logits but for the targets' own:
                # d log p_t / d z_j = [j = t] - p_j and d H / d z_j = -p_j (log p_j + H).
                probabilities = torch.exp(log_probs, out=head.spare(log_probs))
                if ctx.sampling.restricts:
                    log_probs.masked_fill_(log_probs == -torch.inf, 0.0)
                constant = slope[part] + entropy_slope[part] * entropy[part]
                log_probs.mul_(entropy_slope[part, None]).add_(constant[:, None])
                gradients.add(part, targets[part], slope[part], log_probs.mul_(probabilities))
        return (gradients.hidden, gradients.weight, gradients.bias, None, None, None, None, None)


class _Head:
    """The output head over chunks of rows, float32 (float64 for float64) whatever the dtype of its inputs.

    Half-precision rows meet a head that is rounded to their dtype. On a GPU these factors multiply as they are and
    sum in float32; on a CPU they are widened first, which gives the same numbers. Two buffers of one chunk's
    logits serve every chunk: fresh ones cost as much as the product on a CPU.

    given: the head [V, D] in the dtype of its rows. narrow: the same, for gradients of rows, where `_rounds_gradients`.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sampling: _Sampling,
        rows: int,
        buffer: Tensor | None = None,
    ) -> None:
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        half = hidden.dtype in (torch.float16, torch.bfloat16)
        self.rounds = half and _multiplies_half(hidden.device)
        self.factor_dtype = hidden.dtype if self.rounds else self.dtype
        self.hidden = hidden
        self.given = weight.to(hidden.dtype) if half else weight
        self.narrow = self.given if not self.rounds and _rounds_gradients(hidden) else None
        self.bias = None if bias is None else bias.to(self.dtype)
        self.sampling = sampling
        # The last chunk is a full one: it is the one that the backward pass need not compute again.
        ends = range(len(hidden), 0, -rows)
        self.parts = [slice(max(0, end - rows), end) for end in reversed(ends)]
        self._rows = min(rows, len(hidden))
        self.buffer = buffer
        self._spare: Tensor | None = None

    @cached_property
    def weight(self) -> Tensor:
        """[V, D]. Made when it is needed: a backward pass of one chunk has `narrow`."""
        return self.given.to(self.factor_dtype)

    def logits(self, part: slice, targets: Tensor) -> Tensor:
        """[C, V] of the rows `part`, to be overwritten; the next call uses the same memory."""
        inputs = self.hidden[part]
        if self.buffer is None:
            self.buffer = self._new_buffer()
        logits = self.product(inputs, self.weight.T, out=self.buffer[: len(inputs)])
        if self.bias is not None:
            logits.add_(self.bias)
        return self.sampling.apply(logits, targets, part)

    def product(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        left, right = left.to(self.factor_dtype), right.to(self.factor_dtype)
        if not self.rounds:
            return torch.mm(left, right, out=out)
        return torch.mm(left, right, out_dtype=self.dtype, out=out)

    def back(self, pull: Tensor) -> Tensor:
        """[C, D] float32 from [C, V]."""
        if self.narrow is None:
            return self.product(pull, self.weight)
        return torch.mm(pull.to(self.narrow.dtype), self.narrow).to(self.dtype)

    def spare(self, like: Tensor) -> Tensor:
        if self._spare is None:
            self._spare = self._new_buffer()
        return self._spare[: len(like)]

    def _new_buffer(self) -> Tensor:
        shape = (self._rows, self.given.shape[0])
        return torch.empty(shape, dtype=self.dtype, device=self.hidden.device)

    def log_total_and_entropy(
        self, logits: Tensor, with_entropy: bool, keep: bool
    ) -> tuple[Tensor, Tensor | float]:
        """log sum exp and entropy, [C] each, of rows of logits whose largest is 0. Overwrites them unless `keep`,
        which a restricted distribution does not allow."""
        if not (with_entropy or keep):
            return logits.exp_().sum(dim=1).log(), 0.0
        weights = torch.exp(logits, out=self.spare(logits))
        total = weights.sum(dim=1)
        if not with_entropy:
            return total.log(), 0.0
        if self.sampling.restricts:
            logits.masked_fill_(logits == -torch.inf, 0.0)
        expected = weights.mul_(logits).sum(dim=1) / total
        return total.log(), total.log() - expected


class _HeadGradients:
    """Gradients of the head's inputs: chunk by chunk for `hidden`, summed over chunks in float32 for the head.

    A row's slope multiplies its [D] side of the products where it can, never its [V] side.
    """

    def __init__(self, head: _Head, needed: tuple[bool, ...]) -> None:
        self.head = head
        hidden, weight, bias = head.hidden, head.given, head.bias
        self.hidden = torch.zeros_like(hidden, dtype=head.dtype) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=head.dtype) if needed[1] else None
        self.bias = torch.zeros_like(bias) if bias is not None and needed[2] else None

    def add(
        self, part: slice, targets: Tensor, slope: Tensor, pull: Tensor, pull_slope: Tensor | None = None
    ) -> None:
        """The rows `part`: `slope` [C] at the targets' logits, minus `pull` [C, V], times `pull_slope` [C] if given.

        Overwrites `pull` where it is rounded. The two nearly cancel at a likely target, so there they meet
        before the rounding, which is coarser than what remains.
        """
        head = self.head
        inputs = head.hidden[part].to(head.dtype)
        if head.rounds or head.narrow is not None:
            own = slope if pull_slope is None else torch.ones_like(slope)
            pull.scatter_add_(1, targets[:, None], -own[:, None])
        else:
            if self.hidden is not None:
                torch.mul(head.weight[targets].to(head.dtype), slope[:, None], out=self.hidden[part])
            if self.weight is not None:
                self.weight.index_add_(0, targets, inputs * slope[:, None])
            if self.bias is not None:
                self.bias.index_add_(0, targets, slope)
        if pull_slope is not None:
            inputs = inputs * pull_slope[:, None]
        if self.bias is not None:
            slopes = torch.ones_like(pull[:, 0]) if pull_slope is None else pull_slope
            self.bias.addmv_(pull.T, slopes, alpha=-1)
        if head.rounds:
            pull = pull.to(head.factor_dtype)  # once for both products
        if self.hidden is not None:
            back = head.back(pull)
            self.hidden[part] -= back if pull_slope is None else back.mul_(pull_slope[:, None])
        if self.weight is not None and not head.rounds:
            self.weight.addmm_(pull.T, inputs, alpha=-1)
        elif self.weight is not None:
            self.weight -= head.product(pull.T, inputs)
