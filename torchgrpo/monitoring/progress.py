"""Progress of a run, live: a bar at the end of a terminal, lines in a log."""

import math
import sys
import time
from multiprocessing import parent_process

from rich import progress as bars
from rich.console import Console
from rich.text import Text

from config.schema.logging import LoggingConfig

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Progress:
    """Steps, reward and stage of a run, shown on standard error.

    A terminal sees them up to twice a second, a file gets a line every ten seconds. The training loop shows them in
    passing: there is no thread, so nothing is shown while nothing is told.

    Args:
        total_steps: optimizer steps of the whole run; 0: it trains nothing.
    """

    def __init__(self, logging: LoggingConfig, total_steps: int) -> None:
        self.total_steps = total_steps
        self.steps = 0
        self.reward = self.length = math.nan
        self.stage_name, self.done, self.of = "", 0, 0
        self.began = self.counting_since = time.monotonic()
        self._training_since: float | None = None
        self._steps_before = 0
        self._view = Silent()
        if logging.progress:
            console = _Console(stderr=True, highlight=False, markup=False, emoji=False)
            # A console takes FORCE_COLOR for a terminal; colours are all that it may force.
            terminal = sys.stderr.isatty() and console.is_terminal and not console.is_dumb_terminal
            alone = parent_process() is None  # jobs side by side would erase each other's bars
            self._view = Bar(console, total_steps) if terminal and alone else Lines()
        self._due = 0.0

    @property
    def erase(self) -> str:
        """The characters that a signal handler, which must not print, writes before its own message."""
        return self._view.erase

    def begin(self, stage: str) -> None:
        """Show a stage before the first step, which may take long, at once."""
        self._due = 0.0
        self.stage(stage)

    def resume(self, first_step: int) -> None:
        """Count clocks from here, with so many steps done."""
        self.steps = self._steps_before = first_step
        self.began = time.monotonic()

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        """Tell the present stage, such as `collect 40/128`. Most calls note it and look at the clock."""
        now = time.monotonic()
        if name != self.stage_name or done < self.done:
            self.counting_since = now
        if name == "collect" and self._training_since is None:
            self._training_since = now
        self.stage_name, self.done, self.of = name, done, total
        if now >= self._due:
            self._view.show(self)
            self._due = now + self._view.interval

    def step(self, reward: float, length: float) -> None:
        """Count an optimizer step."""
        self.steps += 1
        self.reward, self.length = reward, length

    def say(self, text: str) -> None:
        """Print a text above the bar."""
        self._view.say(text)

    def close(self) -> None:
        """Leave the numbers of the last step, and nothing of a run that made none. A second call does nothing."""
        self.stage_name = ""
        self._view.close(self)
        self._view = Silent()

    def told(self) -> dict[str, str]:
        """The numbers in words, those that are known: step, reward, length, so far, left, stage."""
        now = time.monotonic()
        words = {}
        if self.total_steps and (self.steps or self._training_since is not None):
            words["step"] = f"step {self.steps}/{self.total_steps}"
            if not math.isnan(self.reward):
                words |= {"reward": f"reward {self.reward:.3f}", "length": f"length {self.length:.1f}"}
            words["so far"] = f"{clock(now - self.began)} so far"
            since, steps = self._training_since, self.steps - self._steps_before
            if since is not None and steps and self.stage_name:
                left = (now - since) / steps * (self.total_steps - self.steps)
                words["left"] = f"{clock(left)} left"
        if self.stage_name:
            counted = f" {self.done}/{self.of}" if self.of else ""
            words["stage"] = f"{printable(self.stage_name)}{counted}"
            if self.done and not self.total_steps:
                each = (now - self.counting_since) / self.done
                words["left"] = f"{clock(each * (self.of - self.done))} to go"
        return words


class _Console(Console):
    """A console that never hides the cursor, so that a run that is killed leaves a terminal that works."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class Silent:
    """No view; texts are printed all the same.

    interval: least seconds between two updates. erase: takes what is shown from the screen.
    """

    interval = float("inf")
    erase = ""

    def show(self, progress: Progress) -> None:
        pass

    def say(self, text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    def close(self, progress: Progress) -> None:
        pass


class Lines(Silent):
    """A line for each update."""

    interval = 10.0

    def show(self, progress: Progress) -> None:
        self.say(", ".join(progress.told().values()))

    def close(self, progress: Progress) -> None:
        if not math.isnan(progress.reward):
            self.show(progress)


class Bar(Silent):
    """A bar of rich's in the last line of a terminal.

    Standard streams stay as they are, for processes that are forked from this one would else draw bars too.
    """

    interval = 0.5
    erase = "\r\x1b[2K"

    def __init__(self, console: Console, total_steps: int) -> None:
        self.total_steps = total_steps
        columns = [bars.BarColumn(bar_width=None)] if total_steps else []
        self._bars = bars.Progress(
            *columns,
            bars.TextColumn("{task.description}", markup=False),
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            expand=True,
        )
        self._task = self._bars.add_task("", total=max(total_steps, 1))
        self._bars.start()

    def show(self, progress: Progress) -> None:
        told = progress.told()
        names = ("step", "reward", "left" if "left" in told else "so far", "stage")
        words = "  ".join(told[name].removeprefix("step ") for name in names if name in told)
        self._bars.update(self._task, completed=progress.steps, description=words, refresh=True)

    def say(self, text: str) -> None:
        self._bars.console.print(Text(printable(text)), soft_wrap=True)

    def close(self, progress: Progress) -> None:
        self._bars.live.transient = math.isnan(progress.reward)
        self.show(progress)
        self._bars.stop()


def clock(seconds: float) -> str:
    """`02:03`, `1:02:03`, `3 d 04:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"


def printable(text: str) -> str:
    """A model's text without what would move a terminal's cursor or change its colours; lines stay lines."""
    return text.translate(_CONTROL)
