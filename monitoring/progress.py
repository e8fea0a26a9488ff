"""The live line: how far the run is, and what it is doing now."""

import sys
import time
from functools import partial
from typing import Any

from tqdm import tqdm

from config.schema import LoggingConfig

_LINE = "{desc}: {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"


class Progress:
    """One line on standard error; a terminal sees it change twice a second, a file every ten seconds.

    Args:
        total_steps: optimizer steps of the whole run; 0: there is no line.
    """

    def __init__(self, logging: LoggingConfig, total_steps: int) -> None:
        self.logging = logging
        live = sys.stderr.isatty()
        self._interval = 0.5 if live else 10.0
        self._line = partial(tqdm, mininterval=self._interval, dynamic_ncols=live)
        self._shown = time.monotonic()
        self._numbers = ""
        self.bar = self._line(
            total=total_steps,
            desc="grpo",
            unit="step",
            disable=not logging.progress or not total_steps,
            bar_format=_LINE,
        )

    def second(self, total: int, name: str, unit: str) -> "tqdm[Any]":
        """A second line, for what happens between two optimizer steps. To be used in a `with` statement."""
        silent = not self.logging.progress
        return self._line(total=total, desc=name, unit=unit, position=1, leave=False, disable=silent)

    def begin(self, stage: str) -> None:
        """A stage before the first step, which may take long: shown at once."""
        self.bar.set_postfix_str(stage, refresh=False)
        self.bar.refresh()

    def resume(self, first_step: int) -> None:
        """A checkpoint has been found: so many steps are done."""
        self.bar.n = self.bar.initial = self.bar.last_print_n = first_step

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        """What the run does now: `collect 40/128`. Cheap: most calls change a string and look at the clock."""
        counted = f"{name} {done}/{total}" if total else name
        self.bar.set_postfix_str(f"{self._numbers}{counted}", refresh=False)
        now = time.monotonic()
        if now - self._shown >= self._interval:
            self._shown = now
            self.bar.refresh()

    def step(self, reward: float, length: float) -> None:
        """An optimizer step is done."""
        self._numbers = f"reward {reward:.3f}, length {length:.1f}, "
        self.bar.set_postfix_str(self._numbers[:-2], refresh=False)
        self.bar.update()

    def close(self) -> None:
        """Leaves the numbers of the last step, and no line of a run that made none. May be called more than once."""
        self.bar.leave = bool(self._numbers)
        self.bar.set_postfix_str(self._numbers[:-2], refresh=False)
        self.bar.close()
