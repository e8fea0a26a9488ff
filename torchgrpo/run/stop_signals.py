"""Turns the first Ctrl-C or SIGTERM into a stop request, the second into KeyboardInterrupt."""

import atexit
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType

ECHO_S = 1.0
"""Seconds within which a second signal is an echo of the first and is ignored.

`timeout --foreground`, make and launchers pass on a Ctrl-C that the terminal has already sent to the whole foreground
process group.
"""
FINISHING = (
    "finishing this iteration, then writing a checkpoint; a second signal ends the run at once. To resume "
    "later:\n  {resume}"
)
CLOSING = "the run has ended, and its log and report are being written; a second signal ends the process at once"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class StopRequest:
    """Stop request by a signal: the run reads `is_requested` between two iterations.

    is_over: no iteration is left to finish.
    handled_at: monotonic clock of the last signal that was not an echo, in seconds.
    resume: the command that resumes the run, printed with the first signal.
    erase: terminal text that erases the progress bar, printed before the message.
    """

    is_requested: bool = False
    is_over: bool = False
    handled_at: float = field(default=-ECHO_S, repr=False)
    resume: str = ""
    erase: str = ""

    def install(self, resume: str, erase: str = "") -> None:
        """Installs handlers that request a stop; a second signal raises KeyboardInterrupt."""
        self.resume, self.erase = resume, erase
        for number in SIGNALS:
            signal.signal(number, self._request_stop)

    def install_for_closing(self) -> None:
        """Installs handlers for a finished run, which first writes its last files."""
        self.is_over = True
        self.install(self.resume, self.erase)

    def uninstall(self) -> None:
        """Installs handlers that end the process as Python's defaults do, but ignore echoes."""
        for number in SIGNALS:
            signal.signal(number, self._end_process)

    def watch(self) -> None:
        """Installs the handler for the time before a run.

        Ctrl-C ends the process at once; its echoes are ignored.
        """
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have set it to be ignored
            signal.signal(signal.SIGINT, self._end_process)
            # Python restores default handlers as it exits; an echo would then change the exit code.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        if self._is_echo():
            return
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
        status = CLOSING if self.is_over else FINISHING.format(resume=self.resume)
        message = f"{self.erase}\n{signal.Signals(number).name}: {status}\n"
        with suppress(OSError):  # os.write, because the signal may have interrupted a print
            os.write(2, message.encode())

    def _end_process(self, number: int, frame: FrameType | None) -> None:
        if self._is_echo():
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _is_echo(self) -> bool:
        """Whether a signal is an echo; otherwise records its time."""
        now = time.monotonic()
        if now - self.handled_at < ECHO_S:
            return True
        self.handled_at = now
        return False
