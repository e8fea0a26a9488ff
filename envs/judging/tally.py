"""What the verifications of a run came to: outcomes, latencies, the error rate at which the run stops."""

from collections import deque

import numpy as np

from config.errors import ConfigError
from envs.example import Example
from envs.judging.outcome import Result

WINDOW = 1000
"""Verifications over which the error rate and the latencies are taken."""
FEWEST = 100
"""It is taken as if at least so many had been judged: one early error does not stop a run."""
PERCENTILES = (50, 95, 99)


class Tally:
    """Counts of the whole run, and outcomes and seconds of the last `WINDOW` verifications.

    replaced: workers that were lost. last_error: the row and reason of the last error.
    """

    def __init__(self, max_error_rate: float) -> None:
        self.max_error_rate = max_error_rate
        self.invalid = self.errors = self.replaced = 0
        self.last_error = ""
        self._failed: deque[bool] = deque(maxlen=WINDOW)
        self._seconds: deque[float] = deque(maxlen=WINDOW)

    def add(self, example: Example, result: Result) -> None:
        failed = result.outcome == "error"
        self._failed.append(failed)
        self._seconds.append(result.seconds)
        if result.outcome == "invalid":
            self.invalid += 1
        elif failed:
            self.errors += 1
            source = f"{example.source} " if example.source else ""
            self.last_error = f"{source}row {example.row}: {result.message}"

    def metrics(self) -> dict[str, float]:
        """Latency percentiles in seconds, and counts, by their names in the log."""
        latencies = np.percentile(list(self._seconds) or [0.0], PERCENTILES, method="higher").tolist()
        percentiles = {
            f"reward_latency/p{share}_s": value for share, value in zip(PERCENTILES, latencies, strict=True)
        }
        return percentiles | {
            "reward/invalid_total": float(self.invalid),
            "reward/errors_total": float(self.errors),
            "reward/workers_replaced": float(self.replaced),
        }

    def check_error_rate(self) -> None:
        """Raises ConfigError where more verifications fail than `env.max_error_rate` allows."""
        failed = sum(self._failed)
        if failed / max(len(self._failed), FEWEST) > self.max_error_rate:
            raise ConfigError(
                f"{failed} of the last {len(self._failed)} verifications failed through no fault of the model, above "
                f"env.max_error_rate={self.max_error_rate}. The last: {self.last_error}. Mend the row or the "
                "reward, or raise env.max_error_rate"
            )
