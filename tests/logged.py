"""What loggers said in a test, in the place of pytest's own plugin.

That one goes through all loggers, of which libraries make thousands, six times a test: 18 CPU seconds of the suite.
"""

import logging


class Logged(logging.Handler):
    """messages: of all loggers that pass theirs on, in the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    @property
    def text(self) -> str:
        return "\n".join(self.messages)
