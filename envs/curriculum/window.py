"""The recent success of many prompts: of a level, a source, or of what was asked again."""

from collections.abc import Sequence


class Window:
    """The mean of the newest success rates.

    A success counts by its weight: 1 over how often its prompt is drawn, to the mean of all. So the mean is that of
    prompts that come up equally often, whichever are preferred. It may be read from any thread: what it holds is
    replaced, never changed.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._newest: tuple[tuple[float, float], ...] = ()

    def add(self, success: float, weight: float) -> None:
        self._newest = (*self._newest, (success, weight))[-self.size :]

    @property
    def mean(self) -> float | None:
        """None before the first."""
        newest = self._newest
        if not newest:
            return None
        summed = sum([success * weight for success, weight in newest])
        return summed / sum([weight for _, weight in newest])

    @property
    def full(self) -> bool:
        return len(self._newest) == self.size

    def state(self) -> list[tuple[float, float]]:
        return list(self._newest)

    def load(self, state: Sequence[tuple[float, float]]) -> None:
        self._newest = tuple([(success, weight) for success, weight in state])
