"""Sandboxes that the threads of a process share."""

import atexit
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager

from config.schema.env import EnvConfig
from envs.sandbox.limits import Limits
from envs.sandbox.sandbox_selection import ProgramRunner, check_sandbox, make_sandbox


class SandboxPool:
    """Pool of one sandbox for each core; a thread waits for a free one.

    The sandboxes are closed with the process at the latest.

    Raises:
        ConfigError: the sandbox of `env.sandbox` does not work here.
    """

    def __init__(self, env: EnvConfig, limits: Limits) -> None:
        check_sandbox(env)
        self.env, self.limits = env, limits
        self._idle: queue.LifoQueue[ProgramRunner | None] = queue.LifoQueue()
        for _ in range(os.cpu_count() or 1):
            self._idle.put(None)

    @contextmanager
    def sandbox(self) -> Iterator[ProgramRunner]:
        """Lends a sandbox while the block runs."""
        sandbox = self._idle.get()
        try:
            if sandbox is None:
                sandbox = make_sandbox(self.env, self.limits)
                atexit.register(sandbox.close)
            yield sandbox
        finally:
            self._idle.put(sandbox)
