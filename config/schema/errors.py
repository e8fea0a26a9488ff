"""Exceptions printed without a traceback, names of run outcomes, and an exception's chain of causes."""

import signal
from typing import Literal

RunOutcome = Literal["finished", "interrupted", "failed"]
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit code of an interrupted job without a result. An interrupted training run that wrote its checkpoint exits
with 0."""


class ConfigError(ValueError):
    """Bad input. The message names the value, the place and the remedy."""


class RunError(RuntimeError):
    """A known reason why the run cannot continue, with a remedy in the message."""


class DeadlineError(RunError, TimeoutError):
    """A wait that exceeded its deadline. The message names the waiting and the awaited side."""


class RankLost(RunError):
    """A learner or scorer rank died, failed or hangs.

    The rank's own traceback is printed first.
    """


def causes(error: BaseException | None) -> list[BaseException]:
    """Returns an exception and its chain of causes, latest first."""
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links
