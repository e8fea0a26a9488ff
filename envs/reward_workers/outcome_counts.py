"""Counts reward outcomes and latencies of a run, and raises above `env.max_error_rate`."""

import math
from array import array

from config.schema.errors import ConfigError
from envs.example import Example
from envs.reward_workers.scoring import ScoringResult

WINDOW_SIZE = 1000
"""Number of the last verifications that the error rate and the latencies cover."""
MIN_VERIFICATIONS = 100
"""Smallest denominator of the error rate, so that one early error does not stop a run."""


class OutcomeCounts:
    """Counts outcomes of the whole run, and keeps the last `WINDOW_SIZE` outcomes and durations.

    Args:
        failures: what failed, after its number, in the message of too many errors.
        remedy: imperative sentence part that follows the last error there.

    num_replaced_workers: lost workers. last_error: row and reason of the last error.
    """

    def __init__(
        self,
        max_error_rate: float,
        failures: str = "verifications failed without a fault of the model",
        remedy: str = "Correct the row or the reward",
    ) -> None:
        self.max_error_rate, self.failures, self.remedy = max_error_rate, failures, remedy
        self.num_verifications = self.num_invalid = self.num_errors = self.num_replaced_workers = 0
        self.last_error = ""
        self._error_flags = bytearray(WINDOW_SIZE)  # ring buffers of plain numbers are far faster than objects
        self._seconds = array("d", bytes(8 * WINDOW_SIZE))

    def add(self, example: Example, result: ScoringResult) -> None:
        """Counts the result of one verification."""
        outcome, slot = result.outcome, self.num_verifications % WINDOW_SIZE
        self.num_verifications += 1
        self._error_flags[slot] = outcome == "error"
        self._seconds[slot] = result.seconds
        if outcome == "invalid":
            self.num_invalid += 1
        elif outcome == "error":
            self.num_errors += 1
            source = f"{example.source} " if example.source else ""
            self.last_error = f"{source}row {example.row}: {result.message}"

    def metrics(self) -> dict[str, float]:
        """Returns latency percentiles in seconds and the totals, by metric name."""
        latencies = sorted(self._seconds[: max(1, min(self.num_verifications, WINDOW_SIZE))])
        longest = len(latencies) - 1
        percentiles = {
            f"reward_latency/p{share}_s": latencies[math.ceil(share / 100 * longest)] for share in (50, 95, 99)
        }
        return percentiles | self.totals()

    def totals(self) -> dict[str, float]:
        """Returns the counts of the whole run by metric name."""
        return {
            "reward/invalid_total": float(self.num_invalid),
            "reward/errors_total": float(self.num_errors),
            "reward/workers_replaced": float(self.num_replaced_workers),
        }

    def check_error_rate(self) -> None:
        """Raises ConfigError if more verifications fail than `env.max_error_rate` allows."""
        num_failed, window = self._error_flags.count(1), min(self.num_verifications, WINDOW_SIZE)
        if num_failed / max(window, MIN_VERIFICATIONS) > self.max_error_rate:
            raise ConfigError(
                f"env.max_error_rate={self.max_error_rate}: {num_failed} of the last {window} {self.failures}; "
                f"the last failure: {self.last_error}. {self.remedy}, or raise env.max_error_rate"
            )
