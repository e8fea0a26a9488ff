"""Asking for a fork: of what a process of Ray needs before it is one, nothing else, for there are hundreds of them."""

import json
import select
import socket
from collections.abc import Mapping, Sequence

FORKS = "FORKS_AT"
"""The variable that names the server's socket to whatever a script starts."""


class Keeper:
    """Asks the server at `address` for a fork, and hears of it: first its process id, then how it ended.

    streams: its stdout and stderr. beside: the process whose namespaces it enters, or None for those of this one.
    Raises OSError where nobody listens there.
    """

    def __init__(
        self,
        address: str,
        command: Sequence[str],
        cwd: str,
        environment: Mapping[str, str],
        streams: tuple[int, int],
        beside: int | None,
    ) -> None:
        self._command = command
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(address)
        request = json.dumps([command, cwd, environment, beside]).encode()
        socket.send_fds(self._socket, [len(request).to_bytes(8, "big")], streams)
        self._socket.sendall(request)

    def told(self) -> int:
        """The next number. Raises EOFError where there is none."""
        line = b""
        while not line.endswith(b"\n"):
            sent = self._socket.recv(1)
            if not sent:
                raise EOFError(f"nobody keeps {self._command}")
            line += sent
        return int(line)

    def tells_within(self, seconds: float | None) -> bool:
        return bool(select.select([self._socket], [], [], seconds)[0])

    def close(self) -> None:
        self._socket.close()
