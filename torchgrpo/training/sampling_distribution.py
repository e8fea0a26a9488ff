"""Sampling distribution of tokens, applied to chunks of logits."""

import math
from dataclasses import dataclass

from torch import Tensor, inf


@dataclass(frozen=True)
class SamplingDistribution:
    """Sampling distribution: temperature first, then min-p, top-k, and top-p among the tokens that are left."""

    temperature: float | Tensor
    top_k: int
    top_p: float
    min_p: float

    @property
    def restricts(self) -> bool:
        """Whether min-p, top-k or top-p excludes tokens."""
        return self.min_p > 0 or self.has_top_filter

    @property
    def has_top_filter(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0

    def apply(self, logits: Tensor, targets: Tensor, chunk: slice) -> Tensor:
        """Applies the distribution to the logits [C, V] of the rows `chunk`, in place.

        Logits are divided by the temperature; tokens outside min-p, top-k and top-p get -inf. The target token is never
        excluded: it was sampled, and its log-prob must stay finite even if rounding or newer weights would
        exclude it.
        """
        if isinstance(self.temperature, Tensor):
            logits.div_(self.temperature[chunk, None])
        elif self.temperature != 1.0:
            logits.div_(self.temperature)
        if self.restricts:
            indices = targets[chunk, None]
            target_logits = logits.gather(1, indices)
            if self.min_p > 0:
                logits.masked_fill_(logits < logits.amax(1, keepdim=True) + math.log(self.min_p), -inf)
            if self.has_top_filter:
                self._mask_outside_top(logits)
            logits.scatter_(1, indices, target_logits)
        return logits

    def _mask_outside_top(self, logits: Tensor) -> None:
        """Sets logits outside top-k and top-p to -inf, in place."""
        vocabulary = logits.shape[1]
        count = min(self.top_k, vocabulary) if self.top_k > 0 else vocabulary
        ordered, order = logits.topk(count, dim=1) if count < vocabulary else logits.sort(dim=1, descending=True)
        if self.top_p < 1.0:
            probabilities = ordered.softmax(dim=1)
            before = probabilities.cumsum(dim=1) - probabilities
            ordered = ordered.masked_fill(before >= self.top_p, -inf)
        logits.fill_(-inf).scatter_(1, order, ordered)


def row_chunks(count: int, rows: int) -> list[slice]:
    """Splits `count` rows into chunks of `rows`; only the first chunk may be smaller.

    A backward pass does not recompute the logits of the last chunk, so this chunk should be a whole one.
    """
    ends = range(count, 0, -rows)
    return [slice(max(0, end - rows), end) for end in reversed(ends)]
