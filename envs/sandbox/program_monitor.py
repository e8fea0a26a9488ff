"""Reads a program's output until it ends or exceeds its deadline, output or disk limit."""

import os
import select
import time
from dataclasses import dataclass, field
from typing import Literal

from envs.sandbox.isolation import DISK_ENTRIES

ProgramStatus = Literal["finished", "time", "output", "disk"]

ERROR_BYTES = 8192
DISK_CHECK_SECONDS = 0.1
LONGEST_PATH = 1000
"""Characters; a longer path counts as an attempt to hide files."""


@dataclass
class OutputPipe:
    """The reading end of a pipe from the program.

    limit: bytes kept. limit_ends_run: output beyond `limit` ends the run; otherwise it is cut off.
    """

    fd: int
    limit: int
    limit_ends_run: bool = True
    content: bytearray = field(default_factory=bytearray)
    is_open: bool = True
    overflow: bool = False

    def read(self) -> bool:
        """Reads the available bytes; returns False if there were none or the pipe ended."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return False
        room = self.limit - len(self.content)
        self.content.extend(data[:room])
        self.overflow |= self.limit_ends_run and len(data) > room
        self.is_open = bool(data)
        return self.is_open


class ProgramMonitor:
    """Reads the pipes of one program: standard output, standard error and a function's value.

    Args:
        output_bytes: limit of the output, and of the value.
        directory: the program's files, on a disk that it must not fill; None: the file system itself has a
            limit.
        disk_bytes: limit of the total size of these files.
    """

    def __init__(self, output_bytes: int, directory: str | None, disk_bytes: int) -> None:
        pipes = [os.pipe() for _ in range(3)]
        self.write_ends = [write_end for _, write_end in pipes]
        limits = ((output_bytes, True), (ERROR_BYTES, False), (output_bytes, True))
        self.streams = [OutputPipe(read_end, *limit) for (read_end, _), limit in zip(pipes, limits, strict=True)]
        for stream in self.streams:
            os.set_blocking(stream.fd, False)
        self.directory, self.disk_bytes = directory, disk_bytes

    def close_write_ends(self) -> None:
        """Closes this process's copies of the write ends, once the program has its own."""
        while self.write_ends:
            os.close(self.write_ends.pop())

    def wait_for_reply(self, reply: int, deadline: float) -> ProgramStatus:
        """Reads output until the descriptor `reply` is readable or a limit is broken; returns which."""
        poll = select.poll()
        by_fd = {stream.fd: stream for stream in self.streams}
        for fd in (reply, *by_fd):
            poll.register(fd, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return "time"
            events = poll.poll(1000 * (left if self.directory is None else min(left, DISK_CHECK_SECONDS)))
            for stream in (by_fd[fd] for fd, _ in events if fd != reply):
                if not stream.read() and not stream.is_open:
                    poll.unregister(stream.fd)
            if self.overflow:
                return "output"
            if any(fd == reply for fd, _ in events):
                return "finished"
            if self.directory is not None and self._is_disk_full(self.directory):
                return "disk"

    def read_output(self) -> tuple[bytes, bytes, bytes]:
        """Returns output, errors and value, once the program's last process has ended."""
        for stream in self.streams:
            while stream.is_open and stream.read():
                pass
        out, err, value = (bytes(stream.content) for stream in self.streams)
        return out, err, value

    @property
    def overflow(self) -> bool:
        """Whether output broke a limit that ends the run."""
        return any(stream.overflow for stream in self.streams)

    def _is_disk_full(self, directory: str) -> bool:
        entries, used = 0, 0
        queue = [directory]
        while queue:
            try:
                for entry in os.scandir(queue.pop()):
                    entries += 1
                    used += entry.stat(follow_symlinks=False).st_blocks * 512
                    if len(entry.path) > LONGEST_PATH:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        queue.append(entry.path)
            except FileNotFoundError:
                continue
            except OSError:
                return True  # the program locked a directory, which hides its size
        return entries > DISK_ENTRIES or used > self.disk_bytes

    def __enter__(self) -> "ProgramMonitor":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close_write_ends()
        for stream in self.streams:
            os.close(stream.fd)
