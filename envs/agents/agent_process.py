"""The process of an agent: becomes its command, or calls its function."""

import asyncio
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from envs.agents.example_record import example_of_record
from envs.agents.results import read_value
from envs.example import Example
from envs.user_code import describe_exception

NOT_STARTED = 127
"""Exit code of a command that cannot be started, as in shells."""
OUT_OF_MEMORY_SCORE = 500
"""Increase of the agent's out-of-memory score, so that the kernel kills it before the run."""

ERROR_CHARACTERS = 2000
"""Length of an exception's text, so that the guard keeps the whole report."""


@dataclass(frozen=True)
class AgentCall:
    """Call of an agent in one episode.

    command: words of the command line; empty for a function. function: of the user; None for a command. variables: the
    environment. record: of the example. output, errors, report: descriptors of standard output, standard error, and of
    the pipe on which this process reports.
    """

    command: tuple[str, ...]
    function: Callable[[Example], Any] | None
    variables: Mapping[str, str]
    record: dict[str, Any]
    output: int
    errors: int
    report: int

    def run(self) -> NoReturn:
        """Runs the agent in this process, and ends the process."""
        os.setsid()
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(OUT_OF_MEMORY_SCORE))
        for target, descriptor in ((1, self.output), (2, self.errors)):
            os.dup2(descriptor, target)
            os.close(descriptor)
        for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if self.function is None:
            self._execute()
        self._call(self.function)

    def _execute(self) -> NoReturn:
        try:
            os.execvpe(self.command[0], self.command, self.variables)
        except OSError as error:
            self._send({"error": f"{self.command[0]!r} cannot be started: {error.strerror}"})
        os._exit(NOT_STARTED)

    def _call(self, function: Callable[[Example], Any]) -> NoReturn:
        own_pid = os.getpid()
        os.environ.clear()
        os.environ.update(self.variables)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # Python raises an exception instead
        if "numpy" in sys.modules:  # forks begin with equal states; the generator of `random` seeds itself anew
            sys.modules["numpy"].random.seed()
        report = _report_of_call(function, example_of_record(self.record))
        if os.getpid() == own_pid:  # else a child that the function forked
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            self._send(report)
        os._exit(0)

    def _send(self, report: Mapping[str, Any]) -> None:
        data = json.dumps(report).encode()
        while data:
            data = data[os.write(self.report, data) :]


def _report_of_call(function: Callable[[Example], Any], example: Example) -> dict[str, Any]:
    """Calls the function of an agent; returns its result, or an error."""
    try:
        value = function(example)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
    except BaseException as error:  # code of a user
        return {"error": describe_exception(error)[:ERROR_CHARACTERS]}
    try:
        return asdict(read_value(value))
    except ValueError as error:
        return {"error": str(error)}
    except Exception as error:  # the repr of a user's object
        return {"error": describe_exception(error)[:ERROR_CHARACTERS]}
