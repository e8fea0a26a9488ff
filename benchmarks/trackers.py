"""What a row of metrics costs a run's loop: trackers with a thread and a queue each, beside calling them in place.

    python benchmarks/trackers.py [--rows 1000]

Four trackers that take a millisecond a row, 60 numbers a row; medians of all rows.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config.run_outcome import RunOutcome  # noqa: E402
from monitoring.tracker_kinds import ShownCompletion  # noqa: E402
from monitoring.trackers import Trackers  # noqa: E402

ROW = {f"reward/{number}": 0.5 for number in range(60)}


class Slow:
    """A tracker whose server answers after a millisecond."""

    def metrics(self, numbers: Mapping[str, float], step: int) -> None:
        time.sleep(0.001)

    def completions(self, shown: Sequence[ShownCompletion], step: int) -> None:
        time.sleep(0.001)

    def close(self, outcome: RunOutcome) -> None:
        pass


def median(rows: int, take: Callable[[int], None]) -> float:
    """Seconds that a row takes."""
    seconds = []
    for step in range(rows):
        began = time.perf_counter()
        take(step)
        seconds.append(time.perf_counter() - began)
        time.sleep(0.005)  # as a step of training: no queue fills
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1000)
    rows = parser.parse_args().rows
    tracked = Trackers({str(number): lambda tell: Slow() for number in range(4)})
    queued = median(rows, lambda step: tracked.metrics(ROW, step))
    tracked.close("finished")
    in_place = [Slow() for _ in range(4)]

    def call_all(step: int) -> None:
        for each in in_place:
            each.metrics(ROW, step)

    called = median(rows, call_all)
    print(f"queued   {1e6 * queued:8.1f} us a row")
    print(f"in place {1e6 * called:8.1f} us a row")
    print(f"queued / in place {queued / called:.4f}")


if __name__ == "__main__":
    main()
