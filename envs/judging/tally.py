"""Counts of a run's verdicts: outcomes, latencies, the error rate at which the run stops."""

import math
from array import array

from config.schema.errors import ConfigError
from envs.example import Example
from envs.judging.outcome import Result

WINDOW = 1000
"""Verifications over which the error rate and the latencies are taken."""
FEWEST = 100
"""It is taken as if at least so many had been judged: one early error does not stop a run."""


class Tally:
    """Counts of the whole run, and outcomes and seconds of the last `WINDOW` verifications.

    replaced: workers that were lost. last_error: the row and reason of the last error.
    """

    def __init__(self, max_error_rate: float) -> None:
        self.max_error_rate = max_error_rate
        self.judged = self.invalid = self.errors = self.replaced = 0
        self.last_error = ""
        self._failed = bytearray(WINDOW)  # rings of numbers, which take far less time than as many objects
        self._seconds = array("d", bytes(8 * WINDOW))

    def add(self, example: Example, result: Result) -> None:
        outcome, place = result.outcome, self.judged % WINDOW
        self.judged += 1
        self._failed[place] = outcome == "error"
        self._seconds[place] = result.seconds
        if outcome == "invalid":
            self.invalid += 1
        elif outcome == "error":
            self.errors += 1
            source = f"{example.source} " if example.source else ""
            self.last_error = f"{source}row {example.row}: {result.message}"

    def metrics(self) -> dict[str, float]:
        """Latency percentiles in seconds, and counts, by their names in the log."""
        latencies = sorted(self._seconds[: max(1, min(self.judged, WINDOW))])
        longest = len(latencies) - 1
        percentiles = {
            f"reward_latency/p{share}_s": latencies[math.ceil(share / 100 * longest)]
            for share in (50, 95, 99)
        }
        return percentiles | {
            "reward/invalid_total": float(self.invalid),
            "reward/errors_total": float(self.errors),
            "reward/workers_replaced": float(self.replaced),
        }

    def check_error_rate(self) -> None:
        """Raises ConfigError where more verifications fail than `env.max_error_rate` allows."""
        failed, judged = self._failed.count(1), min(self.judged, WINDOW)
        if failed / max(judged, FEWEST) > self.max_error_rate:
            raise ConfigError(
                f"{failed} of the last {judged} verifications failed through no fault of the model, above "
                f"env.max_error_rate={self.max_error_rate}. The last: {self.last_error}. Mend the row or the "
                "reward, or raise env.max_error_rate"
            )
