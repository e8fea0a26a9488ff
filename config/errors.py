"""Exceptions that the user sees as one message without a traceback."""


class ConfigError(ValueError):
    """Bad input. The message names the value, the place and the remedy."""


class RunError(RuntimeError):
    """A known reason why the run cannot go on. The message names it, and what helps."""


class DeadlineError(RunError, TimeoutError):
    """A wait that reached its deadline. The message says who waited for whom."""
