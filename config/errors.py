"""The one exception for what a user can mend: its text is the whole message, printed without a traceback."""


class ConfigError(ValueError):
    """Bad input. The message names the value, the place and the remedy."""
