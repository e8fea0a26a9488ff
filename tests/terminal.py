"""Terminal emulator for tests, and processes with a terminal as their output."""

import os
import pty
import re
import struct
import subprocess
from collections.abc import Mapping, Sequence
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from typing import Self

from rich.cells import cell_len

_SEGMENT = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|[\r\n]|\x1b|[^\x1b\r\n]+")


class Terminal:
    """Emulates the subset of a VT100 that this project uses.

    The subset is wrapped text, `\\r`, `\\n`, cursor up, erase line, and colours.
    lines: all lines, including scrolled ones. wrap_count: number of line wraps at the right edge.
    """

    def __init__(self, columns: int, height: int = 24) -> None:
        self.columns, self.height = columns, height
        self.lines = [""]
        self.row = self.column = 0
        self.wrap_count = 0

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")

    def feed_text(self, text: str) -> None:
        """Processes a program's output."""
        for segment in _SEGMENT.finditer(text):
            argument, command = segment.groups()
            if command is not None:
                self._run_command(argument, command)
            elif segment[0] == "\r":
                self.column = 0
            elif segment[0] == "\n":
                self._next_line()
            else:
                assert segment[0] != "\x1b", f"an escape that is no command: {text[segment.start() :][:20]!r}"
                for character in segment[0]:
                    self._put(character)

    def _run_command(self, argument: str, command: str) -> None:
        if command == "A":
            self.row = max(self.row - int(argument or 1), len(self.lines) - self.height, 0)
        elif command == "K":
            assert argument == "2"
            self.lines[self.row] = ""
        else:
            assert command == "m", f"{argument}{command}: this terminal does not support the command"

    def _put(self, character: str) -> None:
        width = cell_len(character)
        if self.column + width > self.columns:
            self.wrap_count += 1
            self._next_line()
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + character + line[self.column + width :]
        self.column += width

    def _next_line(self) -> None:
        """Moves the cursor to the start of the next line, as a terminal driver does."""
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.lines):
            self.lines.append("")


class TerminalProcess:
    """A process whose stdout and stderr are a terminal; a context manager.

    columns: width of the terminal. code: exit code of the process, None while the process runs.
    """

    def __init__(self, command: Sequence[str], columns: int, cwd: Path, environment: Mapping[str, str]) -> None:
        variables = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
        self._terminal, process_end = pty.openpty()
        ioctl(process_end, TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._process = subprocess.Popen(
            command, cwd=cwd, env={"TERM": "xterm-256color", **variables}, stdout=process_end, stderr=process_end
        )
        os.close(process_end)
        self._output = b""
        self.code: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self.code = self._process.wait()
        os.close(self._terminal)

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def read_until(self, text: str) -> str:
        """Reads the output up to and including `text`."""
        while (start := self._output.find(text.encode())) < 0:
            if not self._read_chunk():
                raise AssertionError(f"the process ended without {text!r}:\n{self._take_output(len(self._output))}")
        return self._take_output(start + len(text.encode()))

    def read_rest(self) -> str:
        """Reads the output to the end of the process."""
        while self._read_chunk():
            pass
        self.code = self._process.wait()
        return self._take_output(len(self._output))

    def _read_chunk(self) -> bool:
        try:
            chunk = os.read(self._terminal, 65536)
        except OSError:  # the process has closed its end
            return False
        self._output += chunk
        return bool(chunk)

    def _take_output(self, size: int) -> str:
        output, self._output = self._output[:size], self._output[size:]
        return output.decode().replace("\r\n", "\n")
