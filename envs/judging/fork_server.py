"""The fork server: a process that imports the task once and then forks workers on request, each in milliseconds.

    service ──FORK──▶ fork server ──fork──▶ worker (`worker.work`)
            ◀─ pid, socket, page
            ──KILL pid─▶            kills the worker and whatever it has started
            ◀─ b"k"

It runs no reward itself, so it always replies; it reaps what dies. It ends when its control socket closes, and its
workers with it. Started by `envs.judging.pool`; imports torch for TorchRL's parsers alone.
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

from envs.judging.judge import make_judge, warm_up
from envs.judging.outcome import Judge
from envs.judging.worker import work
from envs.rewards import judge_names
from envs.task import Task
from envs.user_code import described

FORK, KILL, KILLED = b"F", b"K", b"k"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TIDY_SECONDS = 5.0


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def serve(control_fd: int) -> None:
    """Body of the process. The handshake: it receives the task's name and settings, and sends None or what is wrong."""
    parent = os.getppid()
    os.dup2(2, 1)  # what a reward prints is no output of the program that it is part of
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=control_fd)
    handshake = Connection(os.dup(control_fd))
    module, name, env, memory_bytes = handshake.recv()
    if any(name.startswith("torchrl.") for name in judge_names(env)):
        # Its parsers lie beside its engines, which import vLLM where it is installed: seconds, and memory, that judging
        # has no use for. What fails here fails again, with a message, where the reward is looked for.
        sys.modules["vllm"] = None  # type: ignore[assignment]
        with suppress(Exception):
            importlib.import_module("torchrl.envs.llm")
        del sys.modules["vllm"]
    try:
        task: Task = getattr(importlib.import_module(module), name)(env)
        judge = make_judge(task)
        warm_up(task)
        trouble = None
    except Exception as error:  # reported to the service, which raises it
        trouble = described(error)
    try:
        handshake.send(trouble)
    except BrokenPipeError:
        return  # the service was closed before it needed a worker
    if trouble is not None:
        return
    handshake.close()
    ForkServer(control, judge, memory_bytes, parent).serve()


@dataclass
class ForkServer:
    """Forks, kills and reaps workers.

    memory_bytes: address space of a worker.
    parent: the process that it lives for. The socket alone does not tell: a child of it may hold a copy.
    """

    control: socket.socket
    judge: Judge
    memory_bytes: int
    parent: int
    workers: set[int] = field(default_factory=set)

    def serve(self) -> None:
        while os.getppid() == self.parent:
            ready, _, _ = select.select([self.control], [], [], 1.0)
            if ready:
                message = self.control.recv(64)
                if not message:
                    break
                if message[:1] == FORK:
                    self._fork()
                else:
                    self._kill(int(message[1:]))
                    self._end_orphans()
                    self.control.sendall(KILLED)
            with suppress(ChildProcessError):
                while pid := os.waitpid(-1, os.WNOHANG)[0]:
                    self.workers.discard(pid)
        for pid in tuple(self.workers):
            self._kill(pid)
        self._end_orphans()

    def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        # In memory, where that can be: writing to a mapped file on a full disk would kill the writer.
        with (
            os.fdopen(os.memfd_create("grpo_reward_progress"), "w+b")
            if sys.platform == "linux"
            else tempfile.TemporaryFile()
        ) as page:
            page.truncate(mmap.PAGESIZE)
            pid = os.fork()
            if pid == 0:
                self._be_worker(ours, theirs, page.fileno())
            self.workers.add(pid)
            socket.send_fds(self.control, [str(pid).encode()], [ours.fileno(), page.fileno()])
        ours.close()
        theirs.close()

    def _be_worker(self, ours: socket.socket, theirs: socket.socket, page: int) -> None:
        try:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            ours.close()
            self.control.close()
            resource.setrlimit(resource.RLIMIT_AS, (self.memory_bytes, self.memory_bytes))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            work(self.judge, Connection(theirs.detach()), mmap.mmap(page, mmap.PAGESIZE))
        except (EOFError, OSError):
            pass  # the service has gone, and with it the need for this worker
        finally:
            os._exit(0)

    def _kill(self, pid: int) -> None:
        """End a worker and its process group."""
        if pid in self.workers:
            for end in (os.killpg, os.kill):
                with suppress(ProcessLookupError):
                    end(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.workers.discard(pid)

    def _end_orphans(self) -> None:
        """End whatever else a killed worker started.

        What that started in turn may still have to tidy up, as a sandbox its files: it has time to end by itself.
        """
        deadline = 0.0
        while orphans := [child for child in _children() if child not in self.workers]:
            late = time.monotonic() > deadline
            for orphan in orphans:
                if late:
                    os.kill(orphan, signal.SIGKILL)
                os.waitpid(orphan, 0 if late else os.WNOHANG)
            if late:
                deadline = time.monotonic() + TIDY_SECONDS
            else:
                time.sleep(0.002)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listed:
            return [int(pid) for pid in listed.read().split()]
    except FileNotFoundError:
        return []
