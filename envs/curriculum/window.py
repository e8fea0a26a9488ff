"""The recent success of many prompts: of a level, a source, or of what was asked again."""

from collections import deque
from collections.abc import Sequence


class Window:
    """The mean of the newest success rates.

    A success counts by its weight: 1 over how often its prompt is drawn, to the mean of all. So the mean is that of
    prompts that come up equally often, whichever are preferred. `mean` is None before the first; it may be read from
    any thread.
    """

    def __init__(self, size: int) -> None:
        self._newest: deque[tuple[float, float]] = deque(maxlen=size)
        self.mean: float | None = None

    def add(self, success: float, weight: float) -> None:
        self._newest.append((success, weight))
        self._count()

    def _count(self) -> None:
        weights = sum([weight for _, weight in self._newest])
        summed = sum([success * weight for success, weight in self._newest])
        self.mean = summed / weights if weights else None

    @property
    def full(self) -> bool:
        return len(self._newest) == self._newest.maxlen

    def state(self) -> list[tuple[float, float]]:
        return list(self._newest)

    def load(self, state: Sequence[tuple[float, float]]) -> None:
        self._newest.clear()
        self._newest.extend(tuple(pair) for pair in state)  # type: ignore[misc]
        self._count()
