"""Weighted mean of the newest success rates of a level, source or replay."""

from collections.abc import Sequence


class SuccessWindow:
    """Weighted mean of the newest `size` success rates.

    The weight of a success rate is the probability of its prompt under uniform sampling, divided by the actual sampling
    probability. So the mean estimates the success under uniform sampling, whichever prompts are preferred. Any thread
    may read the mean: the tuple of entries is replaced, never changed.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._newest: tuple[tuple[float, float], ...] = ()

    def add(self, success: float, weight: float) -> None:
        """Adds the success rate of a group; a full window drops its oldest entry."""
        self._newest = (*self._newest, (success, weight))[-self.size :]

    @property
    def mean(self) -> float | None:
        """Weighted mean of the entries; None in an empty window."""
        newest = self._newest
        if not newest:
            return None
        summed = sum([success * weight for success, weight in newest])
        return summed / sum([weight for _, weight in newest])

    @property
    def is_full(self) -> bool:
        """Whether the window has `size` entries."""
        return len(self._newest) == self.size

    def state(self) -> list[tuple[float, float]]:
        """Returns the entries for a checkpoint: (success, weight)."""
        return list(self._newest)

    def load(self, state: Sequence[tuple[float, float]]) -> None:
        """Restores the entries of a checkpoint."""
        self._newest = tuple([(success, weight) for success, weight in state])
