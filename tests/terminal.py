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

from rich.cells import cell_len

_PIECE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|[\r\n]|\x1b|[^\x1b\r\n]+")


class Terminal:
    """As much of a VT100 as programs here use: text that wraps, `\\r`, `\\n`, cursor up, erase to the end, colours.

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
        elif command == "J":
            assert given in ("", "0")
            self.lines[self.row] = self.lines[self.row][: self.column]
            del self.lines[self.row + 1 :]
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


def on_a_terminal(
    command: Sequence[str],
    columns: int,
    cwd: Path,
    environment: Mapping[str, str],
) -> tuple[str, int]:
    """What a process writes to a terminal so wide, standard output too, and its exit code."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        command, cwd=cwd, env={"TERM": "xterm-256color", **environment}, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 65536):
            said += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    return said.decode().replace("\r\n", "\n"), process.wait()
