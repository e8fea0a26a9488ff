"""Exceptions that the user sees as one message without a traceback, and how a run ends."""

import signal
from typing import Literal

RunOutcome = Literal["finished", "interrupted", "failed"]
INTERRUPTED = 128 + signal.SIGINT
"""Exit code of what an interrupt has left without a result. A training run that wrote its checkpoint exits with 0."""


class ConfigError(ValueError):
    """Bad input. The message names the value, the place and the remedy."""


class RunError(RuntimeError):
    """A known reason why the run cannot go on. The message names it, and what helps."""


class DeadlineError(RunError, TimeoutError):
    """A wait that reached its deadline. The message says who waited for whom."""


class RankLost(RunError):
    """A rank of the learner or of a scorer died, failed or hangs; its own traceback comes first."""


def causes(error: BaseException | None) -> list[BaseException]:
    """An exception and those that it came from, the latest first."""
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links
