"""Fork server: imports the code of its workers once, forks and kills workers on request.

    client ──FORK──▶ fork server ──fork──▶ worker, such as `worker.run_worker` of rewards
           ◀─ pid, socket, page
           ──KILL pid─▶            kills the worker and all processes that the worker started
           ◀─ b"k"

The fork server runs no code of a reward itself, so it always replies, and it reaps dead processes. When its control
socket closes, the fork server and its workers end. `envs.reward_workers.fork_server_process` starts it. Reward
workers come from `serve`; the workers of environments from `envs.environments.worker_process`. It imports torch for
TorchRL's parsers alone.
"""

import ctypes
import importlib
import mmap
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.reward_workers.task_scorer import make_scorer, warm_up
from envs.reward_workers.worker import run_worker
from envs.rewards import all_reward_names
from envs.task import Task
from envs.user_code import describe_exception

FORK, KILL, KILLED = b"F", b"K", b"k"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CLEANUP_SECONDS = 5.0
RunWorker = Callable[[Connection, mmap.mmap], None]
"""Main loop of a worker, with its connection and a page that it shares with the client."""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def serve(control_fd: int) -> None:
    """Runs the fork server of reward workers.

    It receives the task's module and name, the `env` section, and the address space of a worker in bytes.
    """

    def load(setup: tuple[str, str, EnvConfig, int]) -> tuple[RunWorker, int]:
        module, name, env, memory_bytes = setup
        if any(reward.startswith("torchrl.") for reward in all_reward_names(env)):
            # TorchRL's parsers lie beside its engines, which import an installed vLLM. Rewards need no vLLM, so None
            # in its place saves time and memory. A failing import fails again below, with a message.
            sys.modules["vllm"] = None  # type: ignore[assignment]
            with suppress(Exception):
                importlib.import_module("torchrl.envs.llm")
            del sys.modules["vllm"]
        task: Task = getattr(importlib.import_module(module), name)(env)
        scorer = make_scorer(task)
        warm_up(task)
        return partial(run_worker, scorer), memory_bytes

    run_fork_server(control_fd, load)


def run_fork_server(control_fd: int, load: Callable[[Any], tuple[RunWorker, int]]) -> None:
    """Runs a fork server process until its client ends.

    It first receives a setup, and sends None or an error message.

    load: imports what the workers need, and returns their main loop and their address space in bytes.
    """
    parent_pid = os.getppid()
    os.dup2(2, 1)  # output of a reward is no output of the training program
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=control_fd)
    handshake = Connection(os.dup(control_fd))
    setup = handshake.recv()
    try:
        run_loaded_worker, memory_bytes = load(setup)
        problem = None
    except Exception as error:  # reported to the client, which raises it
        problem = str(error) if isinstance(error, ConfigError) else describe_exception(error)
    try:
        handshake.send(problem)
    except BrokenPipeError:
        return  # the client was closed before it needed a worker
    if problem is not None:
        return
    handshake.close()
    ForkServer(control, run_loaded_worker, memory_bytes, parent_pid).serve()


@dataclass
class ForkServer:
    """Forks, kills and reaps workers.

    run_worker: main loop of a worker, which raises EOFError or OSError when the client has ended.
    memory_bytes: address space of a worker.
    parent_pid: the process of the client, with which the fork server ends. The socket alone does not show that end,
        because a child of the client may hold a copy of the socket.
    """

    control: socket.socket
    run_worker: RunWorker
    memory_bytes: int
    parent_pid: int
    workers: set[int] = field(default_factory=set)

    def serve(self) -> None:
        """Serves requests until the client closes the control socket or ends."""
        while os.getppid() == self.parent_pid:
            ready, _, _ = select.select([self.control], [], [], 1.0)
            if ready:
                try:
                    message = self.control.recv(64)
                except ConnectionError:  # the client ended before it read an answer
                    break
                if not message:
                    break
                if message[:1] == FORK:
                    self._fork()
                else:
                    self._kill(int(message[1:]))
                    self._kill_orphans()
                    self.control.sendall(KILLED)
            with suppress(ChildProcessError):
                while pid := os.waitpid(-1, os.WNOHANG)[0]:
                    self.workers.discard(pid)
        for pid in tuple(self.workers):
            self._kill(pid)
        self._kill_orphans()

    def _fork(self) -> None:
        client_end, worker_end = socket.socketpair()
        # The page is in memory if possible: a write to a mapped file on a full disk would kill the writer.
        with (
            os.fdopen(os.memfd_create("grpo_worker_progress"), "w+b")
            if sys.platform == "linux"
            else tempfile.TemporaryFile()
        ) as page:
            page.truncate(mmap.PAGESIZE)
            pid = os.fork()
            if pid == 0:
                self._run_as_worker(client_end, worker_end, page.fileno())
            self.workers.add(pid)
            socket.send_fds(self.control, [str(pid).encode()], [client_end.fileno(), page.fileno()])
        client_end.close()
        worker_end.close()

    def _run_as_worker(self, client_end: socket.socket, worker_end: socket.socket, page: int) -> None:
        try:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            client_end.close()
            self.control.close()
            resource.setrlimit(resource.RLIMIT_AS, (self.memory_bytes, self.memory_bytes))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            self.run_worker(Connection(worker_end.detach()), mmap.mmap(page, mmap.PAGESIZE))
        except (EOFError, OSError):
            pass  # the client has ended
        finally:
            os._exit(0)

    def _kill(self, pid: int) -> None:
        """Kills a worker and its process group."""
        if pid in self.workers:
            for end in (os.killpg, os.kill):
                with suppress(ProcessLookupError):
                    end(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.workers.discard(pid)

    def _kill_orphans(self) -> None:
        """Kills the remaining processes that a killed worker started.

        Their own children may still have to clean up, such as a sandbox its files. So they get time to end by
        themselves.
        """
        deadline = 0.0
        while orphans := [child for child in _child_pids() if child not in self.workers]:
            late = time.monotonic() > deadline
            for orphan in orphans:
                if late:
                    os.kill(orphan, signal.SIGKILL)
                os.waitpid(orphan, 0 if late else os.WNOHANG)
            if late:
                deadline = time.monotonic() + CLEANUP_SECONDS
            else:
                time.sleep(0.002)


def _child_pids() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:
        return []
