"""How a run ends, as its summary says it and as its exit code does."""

import signal
from typing import Literal

RunOutcome = Literal["finished", "interrupted", "failed"]
INTERRUPTED = 128 + signal.SIGINT
"""Exit code of what an interrupt has left without a result. A training run that wrote its checkpoint exits with 0."""
