"""What proving every push costs an iteration, in lockstep and where generation and learner overlap.

    python benchmarks/canary.py [--iterations 160] [--config-name NAME] [key=value ...]

The pushes of eight iterations are proven, those of the next eight not, and so on: in overlap one iteration takes from
the next, so single ones would say little. Prints the medians of both, their ratio, what a proof took
(`canary/seconds`), and the seconds of fixed sequences at the first push: of later ones these iterations hold only
those which prove what nothing else can.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hydra import compose, initialize_config_dir  # noqa: E402

import grpo  # noqa: E402
import grpo_async  # noqa: E402
from config.composition import register_schema, to_config  # noqa: E402
from config.schema import Config  # noqa: E402
from run.build import build  # noqa: E402
from run.lockstep import Lockstep  # noqa: E402
from run.overlapped import Overlapped  # noqa: E402
from run.run import Run  # noqa: E402
from training.batch import Batch  # noqa: E402

WARM_UP = BLOCK = 8


class Clock:
    """Seconds of iterations whose push is proven and of others, and of the proofs."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.proofs: list[float] = []
        self.first = 0.0
        self._began = 0.0

    @property
    def proves(self) -> bool:
        return (self.run.monitor.iteration - 1) // BLOCK % 2 == 0

    def before_learning(self) -> None:
        if self.run.weights.version == 0:
            self.first = self.run.weights.watched
            self.run.weights.canary.share = 0.0
        elif not self.proves:
            self.run.pushed_seen = self.run.weights.version

    def learned(self) -> None:
        if self.proves and self.run.monitor.iteration > WARM_UP:
            self.proofs.append(self.run.weights.watched)

    def iterated(self) -> None:
        now = time.perf_counter()
        if self.run.monitor.iteration % BLOCK:
            return
        if self.run.monitor.iteration > WARM_UP:
            self.seconds[self.proves].append((now - self._began) / BLOCK)
        self._began = now


class Schedule(Protocol):
    """What Lockstep and Overlapped do after a batch was taken."""

    def learn(self, batch: Batch, /) -> None: ...

    def done(self, iteration: int, /) -> None: ...


def clocked(working: Schedule, clock: Clock) -> None:
    learn, done = working.learn, working.done

    def learn_in_blocks(batch: Batch) -> None:
        clock.before_learning()
        learn(batch)
        clock.learned()

    def done_in_blocks(iteration: int) -> None:
        done(iteration)
        clock.iterated()

    vars(working).update(learn=learn_in_blocks, done=done_in_blocks)


SCHEDULES: tuple[tuple[ModuleType, type[Lockstep] | type[Overlapped]], ...] = (
    (grpo, Lockstep),
    (grpo_async, Overlapped),
)


def configured(name: str, iterations: int, overrides: Sequence[str]) -> Config:
    quiet = [
        "logging.progress=false",
        "logging.sample_frequency=0",
        "eval.frequency=0",
        "train.checkpoint_frequency=0",
    ]
    config = to_config(compose(name, overrides=[*quiet, *overrides]))
    turns = iterations * config.completions_per_iteration
    return to_config(compose(name, overrides=[*quiet, *overrides, f"train.total_dialog_turns={turns}"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=160)
    parser.add_argument("--config-name", default="grpo_quickstart")
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    register_schema()
    with initialize_config_dir(str(ROOT / "config"), version_base=None):
        config = configured(asked.config_name, asked.iterations + WARM_UP, asked.overrides)
    for script, schedule in SCHEDULES:
        with tempfile.TemporaryDirectory() as folder:
            working = build(config, Path(folder), schedule)
            clock = Clock(working.run)
            clocked(working, clock)
            script.train(working)
            working.run.close("finished")
        with_proof, without = (statistics.median(clock.seconds[proven]) for proven in (True, False))
        proof = statistics.median(clock.proofs)
        print(
            f"{script.__name__}.py: an iteration with a proof {with_proof:.4f} s, without {without:.4f} s, "
            f"ratio {with_proof / without:.3f}; the proof {proof:.4f} s, {proof / with_proof:.2%} of it "
            f"(target <= 1%); fixed sequences, once, {clock.first:.3f} s"
        )


if __name__ == "__main__":
    main()
