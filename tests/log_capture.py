"""Captures log messages in tests, in place of pytest's own plugin.

That plugin goes through all loggers six times per test, and libraries create thousands of loggers.
"""

import logging


class LogCapture(logging.Handler):
    """Collects the messages of all loggers that propagate to the root, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    @property
    def text(self) -> str:
        return "\n".join(self.messages)
