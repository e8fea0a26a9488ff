"""What a run's ledger, history, doctor and live view cost, in one run, iterations with and without them in turn.

    python benchmarks/telling.py [--iterations 100] [key=value ...]

Standard error is a pseudo terminal of 80 columns, so that the live view is drawn. Prints the median seconds of an
iteration with all of them and with none, the median of the ratio pair by pair, and what each takes by itself.
"""

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hydra import compose, initialize_config_dir  # noqa: E402

import grpo  # noqa: E402
from config.composition import register_schema, to_config  # noqa: E402
from run.build import build  # noqa: E402
from run.lockstep import Lockstep  # noqa: E402
from run.run import Run  # noqa: E402

WARM_UP = 3
PARTS = {
    "ledger": ("learned", "consumed"),
    "history": ("event",),
    "doctor": ("see", "metrics"),
    "live view": ("stage", "spent", "step"),
}


class Timed(Lockstep):
    """grpo.py's loop, whose iterations tell everything and nothing in turn."""

    pairs = 0

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.with_all: list[float] = []
        self.with_none: list[float] = []
        self.spent: dict[str, float] = defaultdict(float)
        monitor = run.monitor
        self.owners: list[tuple[Any, str]] = [
            (owner, name)
            for owner, part in (
                (monitor, "ledger"),
                (monitor, "history"),
                (run.doctor, "doctor"),
                (monitor.repetition, "doctor"),
                (monitor.live, "live view"),
            )
            for name in PARTS[part]
            if name in dir(owner)
        ]
        self.telling = {(owner, name): getattr(owner, name) for owner, name in self.owners}

    def tell(self, everything: bool) -> None:
        """Switch the calls of all parts on, each with a clock, or off."""
        for owner, name in self.owners:
            setattr(owner, name, self._clocked(owner, name) if everything else _nothing(name))

    def _clocked(self, owner: Any, name: str) -> Callable[..., Any]:
        part, call = next(part for part, names in PARTS.items() if name in names), self.telling[owner, name]

        def clocked(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                self.spent[part] += time.perf_counter() - began

        return clocked

    def iterations(self) -> Iterator[int]:
        for iteration in range(1, 2 * (self.pairs + WARM_UP) + 1):
            everything = iteration % 2 == 1
            self.tell(everything)
            if iteration == 2 * WARM_UP + 1:
                self.spent.clear()
            began = time.perf_counter()
            yield iteration
            (self.with_all if everything else self.with_none).append(time.perf_counter() - began)

    def done(self, iteration: int) -> None:
        self.run.monitor.consumed(iteration, list(self.run.groups.values()), [])


def _nothing(name: str) -> Callable[..., Any]:
    empty: Any = {"see": [], "metrics": {}}.get(name)
    return lambda *given, **named: empty


def on_a_terminal() -> None:
    """Standard error becomes a pseudo terminal, which somebody reads."""
    ours, theirs = os.openpty()
    os.environ |= {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    sys.stderr = os.fdopen(theirs, "w")
    threading.Thread(
        target=lambda: [None for _ in iter(lambda: os.read(ours, 1 << 16), b"")], daemon=True
    ).start()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--config-name", default="grpo_quickstart")
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    on_a_terminal()
    register_schema()
    quiet = ["logging.sample_frequency=0", "optimizer.lr=1e-9", "train.total_dialog_turns=1000000"]
    with initialize_config_dir(str(ROOT / "config"), version_base=None):
        config = to_config(compose(asked.config_name, overrides=[*quiet, *asked.overrides]))
    with tempfile.TemporaryDirectory() as folder:
        working = build(config, Path(folder), Timed)
        working.pairs = asked.iterations
        grpo.train(working)
        working.tell(everything=False)
        working.run.close("finished")
    told, silent = working.with_all[WARM_UP:], working.with_none[WARM_UP:]
    ratios = [a / b for a, b in zip(told, silent, strict=True)]
    print(f"{asked.config_name}, {asked.iterations} alternating pairs of iterations, medians")
    print(f"  with all  {1000 * statistics.median(told):.2f} ms")
    print(f"  with none {1000 * statistics.median(silent):.2f} ms")
    print(f"  ratio     {statistics.median(ratios):.4f}  (target <= 1.02)")
    whole = statistics.median(told) * len(told)
    for part, seconds in working.spent.items():
        print(f"  {part:<9} {1000 * seconds / len(told):.2f} ms an iteration, {seconds / whole:.2%}")


if __name__ == "__main__":
    main()
