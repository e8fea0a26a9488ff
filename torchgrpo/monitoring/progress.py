"""Progress display of a run: a bar in a terminal, lines in a log."""

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
    """Shows steps, reward and stage of a run on standard error.

    A terminal is updated up to twice a second, a file gets a line every ten seconds. The calls of the training
    loop update the display: there is no thread, so nothing changes between calls.

    Args:
        total_steps: optimizer steps of the whole run; 0: the run does not train.
    """

    def __init__(self, logging: LoggingConfig, total_steps: int) -> None:
        self.total_steps = total_steps
        self.steps = 0
        self.reward = self.length = math.nan
        self.stage_name, self.num_done, self.stage_total = "", 0, 0
        self.start_time = self.stage_start_time = time.monotonic()
        self._training_start_time: float | None = None
        self._steps_before = 0
        self._view = SilentView()
        if logging.progress:
            console = _Console(stderr=True, highlight=False, markup=False, emoji=False)
            # rich reports a terminal if FORCE_COLOR is set; the variable must only force colours.
            terminal = sys.stderr.isatty() and console.is_terminal and not console.is_dumb_terminal
            is_main_process = parent_process() is None  # parallel jobs would erase each other's bars
            self._view = BarView(console, total_steps) if terminal and is_main_process else LineView()
        self._next_update_time = 0.0

    @property
    def erase_sequence(self) -> str:
        """Characters that erase the bar; a signal handler writes them before its message."""
        return self._view.erase_sequence

    def start_stage(self, stage: str) -> None:
        """Shows a stage at once, for example a long stage before the first step."""
        self._next_update_time = 0.0
        self.set_stage(stage)

    def resume(self, first_step: int) -> None:
        """Restarts the clocks of a resumed run that has already done some steps."""
        self.steps = self._steps_before = first_step
        self.start_time = time.monotonic()

    def set_stage(self, name: str, done: int = 0, total: int = 0) -> None:
        """Sets the present stage, such as `collect 40/128`.

        Most calls only store the stage, because the display is updated at intervals.
        """
        now = time.monotonic()
        if name != self.stage_name or done < self.num_done:
            self.stage_start_time = now
        if name == "collect" and self._training_start_time is None:
            self._training_start_time = now
        self.stage_name, self.num_done, self.stage_total = name, done, total
        if now >= self._next_update_time:
            self._view.show(self)
            self._next_update_time = now + self._view.interval

    def count_step(self, reward: float, length: float) -> None:
        """Counts an optimizer step and stores its mean reward and length."""
        self.steps += 1
        self.reward, self.length = reward, length

    def print_text(self, text: str) -> None:
        """Prints a text above the bar."""
        self._view.print_text(text)

    def close(self) -> None:
        """Shows the final numbers, or removes the display of a run without a step.

        A second call does nothing.
        """
        self.stage_name = ""
        self._view.close(self)
        self._view = SilentView()

    def status_texts(self) -> dict[str, str]:
        """Returns the known values as texts, by name: step, reward, length, so far, left, stage."""
        now = time.monotonic()
        texts = {}
        if self.total_steps and (self.steps or self._training_start_time is not None):
            texts["step"] = f"step {self.steps}/{self.total_steps}"
            if not math.isnan(self.reward):
                texts |= {"reward": f"reward {self.reward:.3f}", "length": f"length {self.length:.1f}"}
            texts["so far"] = f"{format_clock(now - self.start_time)} so far"
            start, steps = self._training_start_time, self.steps - self._steps_before
            if start is not None and steps and self.stage_name:
                left = (now - start) / steps * (self.total_steps - self.steps)
                texts["left"] = f"{format_clock(left)} left"
        if self.stage_name:
            counts = f" {self.num_done}/{self.stage_total}" if self.stage_total else ""
            texts["stage"] = f"{escape_control_characters(self.stage_name)}{counts}"
            if self.num_done and not self.total_steps:
                seconds = (now - self.stage_start_time) / self.num_done
                texts["left"] = f"{format_clock(seconds * (self.stage_total - self.num_done))} to go"
        return texts


class _Console(Console):
    """Console that never hides the cursor, so a killed run leaves a usable terminal."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class SilentView:
    """View without progress; texts are printed nevertheless.

    interval: minimum seconds between two updates. erase_sequence: characters that erase the view from the screen.
    """

    interval = float("inf")
    erase_sequence = ""

    def show(self, progress: Progress) -> None:
        pass

    def print_text(self, text: str) -> None:
        print(escape_control_characters(text), file=sys.stderr, flush=True)

    def close(self, progress: Progress) -> None:
        pass


class LineView(SilentView):
    """View that prints a line for each update."""

    interval = 10.0

    def show(self, progress: Progress) -> None:
        self.print_text(", ".join(progress.status_texts().values()))

    def close(self, progress: Progress) -> None:
        if not math.isnan(progress.reward):
            self.show(progress)


class BarView(SilentView):
    """View with a progress bar of rich in the last line of a terminal.

    Standard streams are not redirected: forked processes would inherit the redirection and print bars too.
    """

    interval = 0.5
    erase_sequence = "\r\x1b[2K"

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
        texts = progress.status_texts()
        names = ("step", "reward", "left" if "left" in texts else "so far", "stage")
        description = "  ".join(texts[name].removeprefix("step ") for name in names if name in texts)
        self._bars.update(self._task, completed=progress.steps, description=description, refresh=True)

    def print_text(self, text: str) -> None:
        self._bars.console.print(Text(escape_control_characters(text)), soft_wrap=True)

    def close(self, progress: Progress) -> None:
        self._bars.live.transient = math.isnan(progress.reward)
        self.show(progress)
        self._bars.stop()


def format_clock(seconds: float) -> str:
    """Formats seconds as `02:03`, `1:02:03` or `3 d 04:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"


def escape_control_characters(text: str) -> str:
    """Escapes control characters, which could move the cursor or change colours.

    Newlines and tabs are kept.
    """
    return text.translate(_CONTROL)
