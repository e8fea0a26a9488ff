"""Draws in proportion to weights that change one at a time."""

import random
from collections.abc import Sequence


class Chances:
    """A tree of sums over the weights: a draw and a change cost the logarithm of their number.

    What it draws depends on the weights and the chance alone, not on the changes that led there.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._width = 1 << max(0, len(weights) - 1).bit_length()
        self._sums = [0.0] * self._width + list(weights) + [0.0] * (self._width - len(weights))
        for node in range(self._width - 1, 0, -1):
            self._add_up(node)

    def _add_up(self, node: int) -> None:
        self._sums[node] = self._sums[2 * node] + self._sums[2 * node + 1]

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return self._sums[1]

    def __getitem__(self, place: int) -> float:
        return self._sums[self._width + place]

    def __setitem__(self, place: int, weight: float) -> None:
        node = self._width + place
        self._sums[node] = weight
        while node > 1:
            node //= 2
            self._add_up(node)

    def draw(self, chance: random.Random) -> int | None:
        """A place, by its share of the total; None where every weight is 0."""
        if not self.total:
            return None
        left, node = chance.random() * self.total, 1
        while node < self._width:
            node *= 2
            beside = self._sums[node + 1]
            # a weight of 0 is never drawn, whatever the sums were rounded to
            if left >= self._sums[node] and beside:
                left -= self._sums[node]
                node += 1
        return node - self._width
