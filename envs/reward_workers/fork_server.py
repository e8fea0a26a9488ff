"""Fork server of reward workers: imports the task once, forks and kills workers on request.

    service ──FORK──▶ fork server ──fork──▶ worker (`worker.run_worker`)
            ◀─ pid, socket, page
            ──KILL pid─▶            kills the worker and all processes that the worker started
            ◀─ b"k"

The fork server runs no reward itself, so it always replies, and it reaps dead processes. When its control
socket closes, the fork server and its workers end. `envs.reward_workers.worker_pool` starts it. It imports
torch for TorchRL's parsers alone.
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
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from envs.reward_workers.scoring import Scorer
from envs.reward_workers.task_scorer import make_scorer, warm_up
from envs.reward_workers.worker import run_worker
from envs.rewards import all_reward_names
from envs.task import Task
from envs.user_code import describe_exception

FORK, KILL, KILLED = b"F", b"K", b"k"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CLEANUP_SECONDS = 5.0


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def serve(control_fd: int) -> None:
    """Runs the fork server process.

    It first receives the task's name and settings, and sends None or an error message.
    """
    parent_pid = os.getppid()
    os.dup2(2, 1)  # output of a reward is no output of the training program
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=control_fd)
    handshake = Connection(os.dup(control_fd))
    module, name, env, memory_bytes = handshake.recv()
    if any(name.startswith("torchrl.") for name in all_reward_names(env)):
        # TorchRL's parsers lie beside its engines, which import an installed vLLM. Rewards need no vLLM, so None in
        # its place saves time and memory. A failing import fails again below, with a message.
        sys.modules["vllm"] = None  # type: ignore[assignment]
        with suppress(Exception):
            importlib.import_module("torchrl.envs.llm")
        del sys.modules["vllm"]
    try:
        task: Task = getattr(importlib.import_module(module), name)(env)
        scorer = make_scorer(task)
        warm_up(task)
        problem = None
    except Exception as error:  # reported to the service, which raises it
        problem = describe_exception(error)
    try:
        handshake.send(problem)
    except BrokenPipeError:
        return  # the service was closed before it needed a worker
    if problem is not None:
        return
    handshake.close()
    ForkServer(control, scorer, memory_bytes, parent_pid).serve()


@dataclass
class ForkServer:
    """Forks, kills and reaps workers.

    memory_bytes: address space of a worker.
    parent_pid: the process of the service, with which the fork server ends. The socket alone does not show that end,
        because a child of the service may hold a copy of the socket.
    """

    control: socket.socket
    scorer: Scorer
    memory_bytes: int
    parent_pid: int
    workers: set[int] = field(default_factory=set)

    def serve(self) -> None:
        """Serves requests until the service closes the control socket or ends."""
        while os.getppid() == self.parent_pid:
            ready, _, _ = select.select([self.control], [], [], 1.0)
            if ready:
                message = self.control.recv(64)
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
        service_end, worker_end = socket.socketpair()
        # The page is in memory if possible: a write to a mapped file on a full disk would kill the writer.
        with (
            os.fdopen(os.memfd_create("grpo_reward_progress"), "w+b")
            if sys.platform == "linux"
            else tempfile.TemporaryFile()
        ) as page:
            page.truncate(mmap.PAGESIZE)
            pid = os.fork()
            if pid == 0:
                self._run_as_worker(service_end, worker_end, page.fileno())
            self.workers.add(pid)
            socket.send_fds(self.control, [str(pid).encode()], [service_end.fileno(), page.fileno()])
        service_end.close()
        worker_end.close()

    def _run_as_worker(self, service_end: socket.socket, worker_end: socket.socket, page: int) -> None:
        try:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            service_end.close()
            self.control.close()
            resource.setrlimit(resource.RLIMIT_AS, (self.memory_bytes, self.memory_bytes))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            run_worker(self.scorer, Connection(worker_end.detach()), mmap.mmap(page, mmap.PAGESIZE))
        except (EOFError, OSError):
            pass  # the service has ended
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
