"""The processes that judge. Started by `envs.judging.pool`; never imports torch.

A nursery imports the task once and then forks workers on request, so that a fresh worker costs milliseconds. It
runs no reward itself, so it always answers; it reaps what dies, and kills whatever a killed worker leaves behind.
It ends when its control socket closes, and its workers with it.

A worker reads batches of (completion, example) and answers verdicts, in portions. Before each verification it
writes its index and the time into a page that it shares with the service, which holds it to its deadline.
"""

import ctypes
import gc
import importlib
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

from envs.own import described
from envs.rewards import checked, make_judge
from envs.task import Completion, Example, Reward, Task

PROGRESS = struct.Struct("<qd")  # index of the running verification or IDLE, time.monotonic() of its start
IDLE = -1
PORTION_SECONDS = 0.02
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
FORK, KILL = b"F", b"K"

Verdict = tuple[
    int, float, dict[str, float], str, float, str
]  # index, score, parts, outcome, seconds, message
CRASHED = "crashed"
OUT_OF_MEMORY = "MemoryError"
TIDY_SECONDS = 5.0
RETIRE_AFTER = 50_000
"""Verifications after which a worker makes room for a fresh one: a leak in a verifier never reaches the limit."""
Batch = tuple[list[int], list[tuple[str, int, bool]], list[int], list[tuple[Any, ...]]]


class Judge:
    """Judges completions of a task; those of a mixture by the member that they come from."""

    def __init__(self, task: Task) -> None:
        self._judges = {name: make_judge(member) for name, member in task.members.items()}
        self._judges[""] = make_judge(task)

    def __call__(self, completion: Completion, example: Example) -> Reward:
        return self._judges[example.source](completion, example)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def start_nursery(control_fd: int) -> None:
    """Body of the nursery process."""
    parent = os.getppid()
    os.dup2(2, 1)  # what a reward prints is no output of the program that it is part of
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=control_fd)
    greeting = Connection(os.dup(control_fd))
    module, name, env, memory_bytes = greeting.recv()
    try:
        task: Task = getattr(importlib.import_module(module), name)(env)
        judge = Judge(task)
        for each in (task, *task.members.values()):
            each.warm_up()
        trouble = None
    except Exception as error:  # reported to the service, which raises it
        trouble = described(error)
    try:
        greeting.send(trouble)
    except BrokenPipeError:
        return  # the service was closed before it needed a worker
    if trouble is not None:
        return
    greeting.close()
    gc.freeze()
    _Nursery(control, judge, memory_bytes, parent).serve()


class _Nursery:
    """parent: the process that it lives for. The socket alone does not tell: a child of it may hold a copy."""

    def __init__(self, control: socket.socket, judge: Judge, memory_bytes: int, parent: int) -> None:
        self.control = control
        self.judge = judge
        self.memory_bytes = memory_bytes
        self.parent = parent
        self.workers: set[int] = set()

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
                    self.control.sendall(b"k")
            self._reap()
        for pid in tuple(self.workers):
            self._kill(pid)
        self._end_orphans()

    def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        with _page() as page:
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
                try:
                    end(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
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

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.workers.discard(pid)


def _page() -> IO[bytes]:
    """Where there is such a thing it lies in memory: a mapped file on a disk that is full ends who touches it."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("grpo_reward_progress"), "w+b")
    return tempfile.TemporaryFile()


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listed:
            return [int(pid) for pid in listed.read().split()]
    except FileNotFoundError:
        return []


def pack(items: Sequence[tuple[int, Completion, Example]]) -> Batch:
    """A batch by columns, each example once: it pickles several times faster than its objects."""
    places: dict[int, int] = {}
    examples: list[tuple[Any, ...]] = []
    for _, _, example in items:
        if id(example) not in places:
            places[id(example)] = len(examples)
            examples.append((example.messages, example.answer, example.row, example.source, example.row_data))
    return (
        [index for index, _, _ in items],
        [(each.text, each.num_tokens, each.truncated) for _, each, _ in items],
        [places[id(example)] for _, _, example in items],
        examples,
    )


def work(judge: Judge, connection: Connection, progress: mmap.mmap) -> None:
    """Judge batches until memory has run out or a fresh worker is due. Raises EOFError when the service goes."""
    judged = 0
    while judged < RETIRE_AFTER:
        indices, completions, places, fields = connection.recv()
        examples = [Example(*each) for each in fields]
        verdicts: list[Verdict] = []
        sent = time.monotonic()
        for index, completion, place in zip(indices, completions, places, strict=True):
            began = time.monotonic()
            if began - sent > PORTION_SECONDS and verdicts:
                PROGRESS.pack_into(progress, 0, IDLE, 0.0)
                connection.send((verdicts, False))
                verdicts = []
                sent = began = time.monotonic()
            PROGRESS.pack_into(progress, 0, index, began)
            verdicts.append(judged_here(judge, index, Completion(*completion), examples[place]))
            if verdicts[-1][-1] == OUT_OF_MEMORY:
                judged = RETIRE_AFTER
                break
        judged += len(indices)
        PROGRESS.pack_into(progress, 0, IDLE, 0.0)
        connection.send((verdicts, index == indices[-1]))


def judged_here(judge: Judge, index: int, completion: Completion, example: Example) -> Verdict:
    """Judge in this process. Whatever the reward raises becomes an outcome of its own."""
    began = time.perf_counter()
    try:
        reward = judge(completion, example)
        score, parts = checked(reward)
        return index, score, parts, reward.outcome, time.perf_counter() - began, ""
    except MemoryError:
        return index, 0.0, {}, CRASHED, time.perf_counter() - began, OUT_OF_MEMORY
    except RecursionError:
        return index, 0.0, {}, CRASHED, time.perf_counter() - began, "RecursionError"
    except (Exception, SystemExit) as error:  # counted as an error and never scored
        return index, 0.0, {}, "error", time.perf_counter() - began, described(error)


def describe(task: Any) -> tuple[str, str]:
    """Module and name by which a nursery finds the task's class."""
    return type(task).__module__, type(task).__qualname__
