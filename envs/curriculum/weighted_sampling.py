"""Sampling of indices in proportion to weights, with fast updates of single weights."""

import random
from collections.abc import Sequence


class WeightTree:
    """Binary tree of weight sums; sampling and updates take logarithmic time.

    The sampled index depends only on the weights and the random number, not on the order of the updates.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._width = 1 << max(0, len(weights) - 1).bit_length()
        self._sums = [0.0] * self._width + list(weights) + [0.0] * (self._width - len(weights))
        for node in range(self._width - 1, 0, -1):
            self._update_sum(node)

    def _update_sum(self, node: int) -> None:
        self._sums[node] = self._sums[2 * node] + self._sums[2 * node + 1]

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return self._sums[1]

    def __getitem__(self, index: int) -> float:
        return self._sums[self._width + index]

    def __setitem__(self, index: int, weight: float) -> None:
        node = self._width + index
        self._sums[node] = weight
        while node > 1:
            node //= 2
            self._update_sum(node)

    def sample_index(self, rng: random.Random) -> int | None:
        """Returns an index with probability weight / total; None if all weights are 0."""
        if not self.total:
            return None
        remainder, node = rng.random() * self.total, 1
        while node < self._width:
            node *= 2
            sibling_sum = self._sums[node + 1]
            # An index of weight 0 is never returned, whatever the rounding of the sums.
            if remainder >= self._sums[node] and sibling_sum:
                remainder -= self._sums[node]
                node += 1
        return node - self._width
