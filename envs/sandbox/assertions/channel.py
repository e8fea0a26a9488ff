"""Channel of JSON frames between the tests' process and the program's process."""

import json
import os
import struct
from typing import Any

FRAME_HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20


class PeerExited(BaseException):
    """The end of the other process. No test can catch this exception by `except Exception`."""


class Channel:
    """Sends and receives JSON frames over a socket.

    Raises:
        PeerExited: the other end is closed, or sends something other than a frame.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        view = memoryview(FRAME_HEADER.pack(len(data)) + data)
        try:
            while view:
                view = view[os.write(self.fd, view) :]
        except OSError as error:
            raise PeerExited from error

    def receive(self) -> dict[str, Any]:
        (size,) = FRAME_HEADER.unpack(self._read(FRAME_HEADER.size))
        if size > MAX_FRAME_BYTES:
            raise PeerExited("a frame that is too long")
        try:
            message = json.loads(self._read(size))
        except (ValueError, RecursionError) as error:
            raise PeerExited("no frame") from error
        if not isinstance(message, dict):
            raise PeerExited("no frame")
        return message

    def _read(self, size: int) -> bytes:
        chunks, left = [], size
        while left:
            try:
                chunk = os.read(self.fd, min(left, 1 << 20))
            except OSError as error:
                raise PeerExited from error
            if not chunk:
                raise PeerExited
            chunks.append(chunk)
            left -= len(chunk)
        return b"".join(chunks)
