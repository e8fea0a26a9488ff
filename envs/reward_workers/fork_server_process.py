"""Starts the process of a fork server, and sends requests to it."""

import json
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from config.schema.errors import DeadlineError
from envs.reward_workers.fork_server import FORK, KILL

START_SECONDS = 120.0
REPLY_SECONDS = 30.0
_CODE = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); module, name = sys.argv[2].split(':'); "
    "getattr(importlib.import_module(module), name)(int(sys.argv[3]))"
)


class ForkServerDied(Exception):
    """Death of the fork server, killed from outside or by a worker."""


class ForkServerProcess:
    """Process of a fork server.

    Requests block until the reply, and only one thread at a time may send one.

    serve: `module:function` that the process runs, such as `envs.reward_workers.fork_server:serve`. setup: pickled for
    this function. variables: environment variables of the process; None for those of this process.
    """

    def __init__(self, serve: str, setup: Any, variables: Mapping[str, str] | None = None) -> None:
        self.control, fork_server_end = socket.socketpair()
        with fork_server_end:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CODE, json.dumps(sys.path), serve, str(fork_server_end.fileno())],
                pass_fds=[fork_server_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**(os.environ if variables is None else variables), "OMP_NUM_THREADS": "1"},
            )
        self._handshake = Connection(os.dup(self.control.fileno()))
        self._handshake.send(setup)
        self._ready = False

    def is_ready(self) -> bool:
        """Whether workers can be forked without waiting for the imports of the process."""
        return self._ready or self._handshake.poll(0)

    def wait_until_ready(self, waiting_side: str) -> str | None:
        """Waits for the imports of the process; returns the problem that prevents them, or None.

        waiting_side: for the message.

        Raises:
            DeadlineError: the process did not start in time.
        """
        if self._ready:
            return None
        if not self._handshake.poll(START_SECONDS):
            raise DeadlineError(f"{waiting_side} waited {START_SECONDS:.0f} s for its first process to start")
        problem: str | None
        try:
            problem = self._handshake.recv()
        except (EOFError, ConnectionError):
            problem = f"the process ended with exit code {self.process.wait(REPLY_SECONDS)}"
        self._handshake.close()
        if problem is None:
            self._ready = True
            self.control.settimeout(REPLY_SECONDS)
        return problem

    def fork(self) -> tuple[int, int, mmap.mmap]:
        """Forks a worker; returns its process id, socket and shared page.

        Raises:
            ForkServerDied: the process is dead.
        """
        pid, (connection, page) = self._send_request(FORK)
        shared_page = mmap.mmap(page, mmap.PAGESIZE)
        os.close(page)
        return int(pid), connection, shared_page

    def kill(self, pid: int) -> None:
        """Kills a worker and all processes that it started. Raises ForkServerDied as `fork`."""
        self._send_request(KILL + str(pid).encode())

    def _send_request(self, message: bytes) -> tuple[bytes, list[int]]:
        """Sends a request; returns the reply and its descriptors."""
        try:
            self.control.sendall(message)
            reply, descriptors, _, _ = socket.recv_fds(self.control, 64, 2)
        except ConnectionError as error:
            raise ForkServerDied from error
        if not reply:
            raise ForkServerDied
        return reply, descriptors

    def close(self) -> None:
        """Ends the process and all workers. Safe to call twice."""
        self._handshake.close()
        self.control.close()
        try:
            self.process.wait(REPLY_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
