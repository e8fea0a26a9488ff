"""The live view: how far the run is, and what it is doing now; rows at the end of a terminal, lines in a log."""

import sys
import time
from collections.abc import Iterable, Mapping
from multiprocessing import parent_process
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from config.logging import LoggingConfig
from monitoring.live_rows import TO_ASCII, log_line, printable, screen_rows
from monitoring.progress_numbers import Course

SHARE = 1e-3
"""Of the time that updates may take: the next one waits so much longer, but not over `_PATIENCE` intervals."""
_PATIENCE = 10
ERASE = "\x1b[J"
"""Erases from the cursor to the end of a terminal."""


class Output(Protocol):
    """Where the view is shown. interval: least seconds between two updates. erase: what takes it from the screen.

    `say` shows a text above it, `close` leaves its last state.
    """

    interval: float
    erase: str

    def show(self, course: Course) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self, course: Course) -> None: ...


class Progress:
    """One view on standard error: a terminal sees it change up to twice a second, a file gets a line every ten seconds.

    Whoever works shows it, in passing: there is no thread, so nothing is shown while nothing is told.

    Args:
        total_steps: optimizer steps of the whole run; 0: it trains nothing.
    """

    def __init__(self, logging: LoggingConfig, total_steps: int) -> None:
        self.course = Course(total_steps)
        self.output = _output(logging)
        self._due = 0.0

    @property
    def erase(self) -> str:
        """What a signal handler, which must not print, writes before its own message."""
        return self.output.erase

    def begin(self, stage: str) -> None:
        """A stage before the first step, which may take long: shown at once."""
        now = time.monotonic()
        self.course.does(stage, 0, 0, now)
        self.output.show(self.course)
        self._due = now + self.output.interval

    def resume(self, first_step: int) -> None:
        """Everything is there, and so many steps are done: clocks and shares of time count from here."""
        self.course.steps = first_step
        self.course.began = time.monotonic()

    def remember(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of metrics of an earlier part of the run."""
        for row in rows:
            if "reward/mean" in row:
                self.course.rewards.add(row["reward/mean"])
                self.course.reward, self.course.length = row["reward/mean"], row["length/response_mean"]
            else:
                self.course.evaluated(row["optimizer_step"], row)

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        """What the run does now: `collect 40/128`. Cheap: most calls note it and look at the clock."""
        now = time.monotonic()
        self.course.does(name, done, total, now)
        if now >= self._due:
            self.output.show(self.course)
            least, taken = self.output.interval, time.monotonic() - now
            self._due = now + min(max(least, taken / SHARE), _PATIENCE * least)

    def spent(self, phase: str, seconds: float) -> None:
        """A phase, such as `collect`, has taken so long."""
        self.course.seconds[phase] = self.course.seconds.get(phase, 0.0) + seconds

    def step(self, reward: float, length: float) -> None:
        """An optimizer step is done."""
        self.course.stepped(reward, length)

    def evaluated(self, optimizer_step: int, metrics: Mapping[str, float]) -> None:
        """Every set has been evaluated after that step."""
        self.course.evaluated(optimizer_step, metrics)

    def alarm(self, text: str) -> None:
        """The newest worry about the run; it stays in sight until another takes its place."""
        self.course.alarm = text

    def say(self, text: str) -> None:
        """A text above the view."""
        self.output.say(text)

    def close(self) -> None:
        """Leaves the numbers of the last step, and nothing of a run that made none. May be called more than once."""
        self.course.doing = ""
        self.output.close(self.course)
        self.output = Silent()


def _output(logging: LoggingConfig) -> Output:
    """As the user and standard error have it."""
    if not logging.progress:
        return Silent()
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    # A console takes FORCE_COLOR for a terminal; colours are all that it may force.
    terminal = sys.stderr.isatty() and console.is_terminal and not console.is_dumb_terminal
    alone = parent_process() is None  # jobs that a launcher runs side by side would erase each other's rows
    return Screen(console) if terminal and alone else Log()


class Silent:
    """No view; what the run says is said all the same."""

    interval = float("inf")
    erase = ""

    def show(self, course: Course) -> None:
        pass

    def say(self, text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    def close(self, course: Course) -> None:
        pass


class Log(Silent):
    """Lines."""

    interval = 10.0

    def show(self, course: Course) -> None:
        line = log_line(course, time.monotonic())
        if line:
            self.say(line)

    def close(self, course: Course) -> None:
        if course.rewards.count:
            self.show(course)


class Screen:
    """Rows below all that is printed.

    The cursor waits on an empty line above them, and every update erases from there on. So nothing has to be put right
    in the end, however the run ends, and what others print, past Python or from other processes, goes above the rows
    and stays. (rich's own Live hides the cursor, and erases what it did not print itself.)
    """

    interval = 0.5
    erase = ERASE

    def __init__(self, console: Console) -> None:
        self.console = console
        self.shown = ""

    def show(self, course: Course) -> None:
        rows = self._rows(course)
        self.shown = f"\n{rows}\x1b[{rows.count(chr(10)) + 1}A\r" if rows else ""
        self._write(f"\r{ERASE}{self.shown}")

    def say(self, text: str) -> None:
        self._write(f"\r{ERASE}{printable(text)}\n{self.shown}")

    def close(self, course: Course) -> None:
        rows = self._rows(course) if course.rewards.count else ""
        self._write(f"\r{ERASE}{rows}\n" if rows else f"\r{ERASE}")

    def _rows(self, course: Course) -> str:
        """With the terminal's colours. One column and two lines stay free, so that no terminal wraps or scrolls."""
        size = self.console.size
        rows = screen_rows(course, size.width - 1, time.monotonic())[: max(size.height - 2, 0)]
        with self.console.capture() as drawn:
            self.console.print(Text("\n").join(rows), end="", soft_wrap=True)
        return drawn.get() if self.console.encoding.startswith("utf") else drawn.get().translate(TO_ASCII)

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
