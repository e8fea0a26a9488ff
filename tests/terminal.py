"""A terminal for tests: what a person sees after a program has written to it."""

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

_PIECE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|[\r\n]|\x1b|[^\x1b\r\n]+")


class Terminal:
    """As much of a VT100 as programs here use: text that wraps, `\\r`, `\\n`, cursor up, erase the line, colours.

    lines: all that was ever written, the scrolled ones too. wrapped: how often text reached the right edge.
    """

    def __init__(self, columns: int, height: int = 24) -> None:
        self.columns, self.height = columns, height
        self.lines = [""]
        self.row = self.column = 0
        self.wrapped = 0

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")

    def feed(self, written: str) -> None:
        for piece in _PIECE.finditer(written):
            given, command = piece.groups()
            if command is not None:
                self._command(given, command)
            elif piece[0] == "\r":
                self.column = 0
            elif piece[0] == "\n":
                self._down()
            else:
                assert piece[0] != "\x1b", f"an escape that is no command: {written[piece.start() :][:20]!r}"
                for one in piece[0]:
                    self._put(one)

    def _command(self, given: str, command: str) -> None:
        if command == "A":
            self.row = max(self.row - int(given or 1), len(self.lines) - self.height, 0)
        elif command == "K":
            assert given == "2"
            self.lines[self.row] = ""
        else:
            assert command == "m", f"{given}{command}: what would the terminal be left with?"

    def _put(self, one: str) -> None:
        width = cell_len(one)
        if self.column + width > self.columns:
            self.wrapped += 1
            self._down()
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + one + line[self.column + width :]
        self.column += width

    def _down(self) -> None:
        """As a terminal driver has it: a new line begins at the left."""
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.lines):
            self.lines.append("")


class OnATerminal:
    """A process whose standard output and error are a terminal so wide; to be used in a `with` statement.

    code: its exit code, once it has ended.
    """

    def __init__(
        self, command: Sequence[str], columns: int, cwd: Path, environment: Mapping[str, str]
    ) -> None:
        own = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
        self._ours, theirs = pty.openpty()
        ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._process = subprocess.Popen(
            command, cwd=cwd, env={"TERM": "xterm-256color", **own}, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self._read = b""
        self.code: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self.code = self._process.wait()
        os.close(self._ours)

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def until(self, text: str) -> str:
        """What it writes, up to a piece that holds the text."""
        while text.encode() not in self._read:
            if not self._more():
                raise AssertionError(f"it ended without {text!r}:\n{self._taken()}")
        return self._taken()

    def rest(self) -> str:
        """What it writes from here to its end."""
        while self._more():
            pass
        self.code = self._process.wait()
        return self._taken()

    def _more(self) -> bool:
        try:
            piece = os.read(self._ours, 65536)
        except OSError:  # the other end is closed
            return False
        self._read += piece
        return bool(piece)

    def _taken(self) -> str:
        taken, self._read = self._read, b""
        return taken.decode().replace("\r\n", "\n")
