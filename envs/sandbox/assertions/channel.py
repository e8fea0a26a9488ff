"""Frames of JSON over a socket, between tests and the program that they test."""

import json
import os
import struct
from typing import Any

FRAME = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20


class AnswerEnded(BaseException):
    """The other side's process is gone. No test can catch it by `except Exception`."""


class Channel:
    """Frames over a socket. Raises AnswerEnded when the other end is closed or sends what is no frame."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        view = memoryview(FRAME.pack(len(data)) + data)
        try:
            while view:
                view = view[os.write(self.fd, view) :]
        except OSError as error:
            raise AnswerEnded from error

    def receive(self) -> dict[str, Any]:
        (size,) = FRAME.unpack(self._read(FRAME.size))
        if size > MAX_FRAME_BYTES:
            raise AnswerEnded("a frame that is too long")
        try:
            message = json.loads(self._read(size))
        except (ValueError, RecursionError) as error:
            raise AnswerEnded("no frame") from error
        if not isinstance(message, dict):
            raise AnswerEnded("no frame")
        return message

    def _read(self, size: int) -> bytes:
        pieces, left = [], size
        while left:
            try:
                piece = os.read(self.fd, min(left, 1 << 20))
            except OSError as error:
                raise AnswerEnded from error
            if not piece:
                raise AnswerEnded
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)
