"""Ctrl-C and SIGTERM: the first asks a run to finish its iteration, a deliberate second one ends it at once."""

import atexit
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType

ECHO_S = 1.0
"""A signal this soon after another is that one again: `timeout --foreground`, make and launchers pass on a Ctrl-C that
the terminal has already brought to every process in front."""
FINISHING = "finishing this iteration, then a checkpoint; once more ends at once. To go on later:\n  {resume}"
CLOSING = "the run is over, and its log and report are being written; once more ends at once"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Stop:
    """Whether a signal has asked the run to stop: `requested` is read between two iterations.

    heeded: the clock when a signal was last acted on. over: there is no iteration left to finish.
    resume: the command that goes on after the stop, told with the first signal. erase: takes the bar away first.
    """

    requested: bool = False
    over: bool = False
    heeded: float = field(default=-ECHO_S, repr=False)
    resume: str = ""
    erase: str = ""

    def install(self, resume: str, erase: str = "") -> None:
        """From here on signals ask."""
        self.resume, self.erase = resume, erase
        for number in SIGNALS:
            signal.signal(number, self._ask)

    def closing(self) -> None:
        """From here on the first signal lets a run that is over write its last files."""
        self.over = True
        self.install(self.resume, self.erase)

    def uninstall(self) -> None:
        """From here on they end the process, as Python has it; the echo of one that was heeded does not."""
        for number in SIGNALS:
            signal.signal(number, self._end)

    def watch(self) -> None:
        """Before there is a run to finish: Ctrl-C ends the process at once, and its echo does not disturb the end."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
            signal.signal(signal.SIGINT, self._end)
            # Python gives signals their default back as it ends; an echo would then change the exit code.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._is_echo():
            return
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        doing = CLOSING if self.over else FINISHING.format(resume=self.resume)
        said = f"{self.erase}\n{signal.Signals(number).name}: {doing}\n"
        with suppress(OSError):  # not print: the signal may have come in the middle of another one
            os.write(2, said.encode())

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self._is_echo():
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _is_echo(self) -> bool:
        """Notes the time of a signal that is none."""
        now = time.monotonic()
        if now - self.heeded < ECHO_S:
            return True
        self.heeded = now
        return False
