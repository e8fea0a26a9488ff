"""Namespaces of a process: a network, processes or mounts that only those see which have entered."""

import ctypes
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

USER = ["--user", "--map-root-user"] if os.geteuid() else []
"""Of `unshare`: whoever is not root needs one of users as well."""
KINDS = ("user", "net", "pid", "mnt")
"""As the kernel names them, in the order in which one may enter."""


@dataclass(frozen=True)
class Namespaces:
    """Of the process `pid`, those `kinds` that it does not share with this one, as `nsenter` names them."""

    pid: int
    kinds: Sequence[str]

    def command(self, folder: str) -> list[str]:
        """What starts another command in them."""
        user = ["--user", "--preserve-credentials"] if USER else []
        kinds = [f"--{kind}" for kind in self.kinds]
        return ["nsenter", "--target", str(self.pid), *user, *kinds, f"--wd={folder}"]


def asker(connection: socket.socket) -> int:
    """The process id, as it is here, of whoever has connected over a socket of this machine."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", told)[0])


def apart(pid: int) -> list[str]:
    """The namespaces of a process that are others than those here, as files."""
    return [f"/proc/{pid}/ns/{kind}" for kind in KINDS if _place(pid, kind) != _place("self", kind)]


def enter(pid: int) -> None:
    """Those of a process, as far as they are others. The next child is the first to have its process ids.

    Raises OSError where this process may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    for descriptor in [os.open(other, os.O_RDONLY) for other in apart(pid)]:
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter a namespace of process {pid}")
        os.close(descriptor)


def _place(pid: int | str, kind: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")
