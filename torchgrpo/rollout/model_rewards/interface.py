"""Protocol of a reward that a model computes in the run's loop."""

from typing import Protocol

from envs.example import Completion, Example


class ModelRewardError(Exception):
    """Failure of a model reward for one completion, whose outcome becomes `error`."""


class ModelReward(Protocol):
    """Async reward of one completion, for any number of concurrent calls."""

    async def score(self, completion: Completion, example: Example) -> float:
        """Returns the score of a completion.

        Raises:
            ModelRewardError: there is no score for this completion.
            RunError: the run cannot continue.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Returns counts since the start and recent durations in seconds, by metric name."""
        ...

    async def close(self) -> None:
        """Closes connections and threads, in the loop of the calls."""
        ...
