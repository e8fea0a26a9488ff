"""A watch over a program that runs: its output as it comes, its deadline, the size of its files."""

import os
import select
import time
from dataclasses import dataclass, field
from typing import Literal

from envs.sandbox.isolation import DISK_ENTRIES

Status = Literal["finished", "time", "output", "disk"]

ERROR_BYTES = 8192
DISK_CHECK_SECONDS = 0.1
LONGEST_PATH = 1000
"""Characters; whoever nests more deeply wants to hide something."""


@dataclass
class Stream:
    """The reading end of a pipe from the program. ends_the_run: output beyond `limit` bytes is not just cut off."""

    fd: int
    limit: int
    ends_the_run: bool = True
    text: bytearray = field(default_factory=bytearray)
    open: bool = True
    overflow: bool = False

    def read(self) -> bool:
        """Takes what is there. False where there was nothing, or it was the end."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return False
        room = self.limit - len(self.text)
        self.text.extend(data[:room])
        self.overflow |= self.ends_the_run and len(data) > room
        self.open = bool(data)
        return self.open


class Watch:
    """The pipes from one program: standard output, standard error, and the value of a function.

    Args:
        output_bytes: limit of the output, and of the value.
        directory: where the program's files lie on a disk that it must not fill; None: their place is limited.
        disk_bytes: all files together.
    """

    def __init__(self, output_bytes: int, directory: str | None, disk_bytes: int) -> None:
        pipes = [os.pipe() for _ in range(3)]
        self.theirs = [theirs for _, theirs in pipes]
        limits = ((output_bytes, True), (ERROR_BYTES, False), (output_bytes, True))
        self.streams = [Stream(ours, *limit) for (ours, _), limit in zip(pipes, limits, strict=True)]
        for stream in self.streams:
            os.set_blocking(stream.fd, False)
        self.directory, self.disk_bytes = directory, disk_bytes

    def given(self) -> None:
        """The program has its ends of the pipes; ours of them close."""
        while self.theirs:
            os.close(self.theirs.pop())

    def until(self, reply: int, deadline: float) -> Status:
        """Reads until the descriptor `reply` can be read, or a limit is broken: then it says which."""
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
                if not stream.read() and not stream.open:
                    poll.unregister(stream.fd)
            if self.overflow:
                return "output"
            if any(fd == reply for fd, _ in events):
                return "finished"
            if self.directory is not None and self._disk_is_full(self.directory):
                return "disk"

    def rest(self) -> tuple[bytes, bytes, bytes]:
        """All that it wrote, once its last process has ended."""
        for stream in self.streams:
            while stream.open and stream.read():
                pass
        out, err, value = (bytes(stream.text) for stream in self.streams)
        return out, err, value

    @property
    def overflow(self) -> bool:
        return any(stream.overflow for stream in self.streams)

    def _disk_is_full(self, directory: str) -> bool:
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
                return True  # locked, so that it cannot be seen: no honest program does that
        return entries > DISK_ENTRIES or used > self.disk_bytes

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.given()
        for stream in self.streams:
            os.close(stream.fd)
