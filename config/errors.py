"""What a user is told without a traceback: the text is the whole message."""


class ConfigError(ValueError):
    """Bad input. The message names the value, the place and the remedy."""


class RunError(RuntimeError):
    """The run cannot go on, for a reason that is known. The message names it, and what helps."""


class DeadlineError(RunError, TimeoutError):
    """A wait was over before that came which it waited for. The message says who waited for whom."""
