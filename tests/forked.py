"""Scripts in forks of a process that has imported all that they import: a new interpreter takes seconds for it.

    Forked ── arguments, folder, variables, streams ──▶ server ──fork──▶ keeper ──fork──▶ script
           ◀── its process id, then how it ended ─────────────────────────┘

A forked script is a process: it has its own arguments, folder, variables and streams, and ends by its own exit code or
signal. What differs from `python SCRIPT`: modules were loaded in the server, which had the same variables, texts
have the hashes that they have in the other forks, and the parent is the keeper.

`main` is the body of the server.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import ClassVar

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = (
    "envs.tasks",
    "grpo_utils",
    "hydra._internal.hydra",
    "rollout.stream",
    "run.build",
    "run.engines",
    "run.evaluation",
    "run.lockstep",
    "run.overlapped",
    "training.grpo_loss",
    "training.local_learner",
    "transformers.models.llama.modeling_llama",
)
"""What the scripts import on their way to the first step. Less vLLM, whose CPU build changes torch."""
OF_EACH = {"PYTHONPATH", "PYTEST_CURRENT_TEST"}
"""Variables that the modules do not read as they load; the first is applied to a script's import path."""


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether imports leave a process that may be forked.

    Not with a CUDA build of torch, for a driver that was asked for its devices does not survive a fork; nor where
    NumPy's library starts threads.
    """
    import torch

    one_thread = environment.get("OMP_NUM_THREADS") == "1"
    return sys.platform == "linux" and torch.version.cuda is None and one_thread


# --- in the test ----------------------------------------------------------------------------------------------


class Forked:
    """What `subprocess.Popen` of `python SCRIPT ...` is, with text from pipes, as far as tests use it.

    command: the script and its arguments. stderr: `subprocess.PIPE`, or `subprocess.STDOUT` to join it to stdout.
    """

    def __init__(
        self, command: Sequence[str], cwd: Path, environment: Mapping[str, str], stderr: int = subprocess.PIPE
    ) -> None:
        self.args = [sys.executable, *command]
        self.returncode: int | None = None
        self._out, stdout = _Pipe.and_its_end()
        self._err, complaints = _Pipe.and_its_end()
        self._keeper, reports = socket.socketpair()
        joined = stdout if stderr == subprocess.STDOUT else complaints
        request = json.dumps([list(command), str(cwd), dict(environment)]).encode()
        _Server.of(environment).fork(request, [reports.fileno(), stdout, joined])
        reports.close()
        os.close(stdout)
        os.close(complaints)
        self.pid = self._told()

    def _told(self) -> int:
        """The next number that the keeper sends."""
        sent = self._keeper.recv(16)
        if not sent:
            raise EOFError(f"nobody keeps {self.args}")
        return int(sent)

    def poll(self) -> int | None:
        return self._end_within(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._end_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _end_within(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._keeper], [], [], seconds)[0]:
            self.returncode = self._told()
            self._keeper.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """stdout and stderr, up to where nobody holds them any more; may be called again where the time was over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for pipe in (self._out, self._err):
            pipe.begin()
        for pipe in (self._out, self._err):
            if not pipe.ended(deadline):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self._out.text, self._err.text

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Pipe:
    """The reading end of a pipe of text, read by a thread once somebody asks for it."""

    def __init__(self, end: int) -> None:
        self._file = open(end, encoding="utf-8")  # noqa: SIM115
        self._reader = Thread(target=self._read, daemon=True)
        self.text = ""

    @classmethod
    def and_its_end(cls) -> "tuple[_Pipe, int]":
        """It, and the descriptor to write to."""
        reading, writing = os.pipe()
        return cls(reading), writing

    def begin(self) -> None:
        if self._reader.ident is None:
            self._reader.start()

    def ended(self, deadline: float | None) -> bool:
        self._reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not self._reader.is_alive()

    def _read(self) -> None:
        with self._file:
            self.text = self._file.read()


class _Server:
    """The server process of this test process, replaced where a script is to have other variables."""

    running: "ClassVar[_Server | None]" = None

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            body = f"from tests.forked import main; main({theirs.fileno()})"
            command = [sys.executable, "-c", body]
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=variables, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "_Server":
        variables = {name: value for name, value in environment.items() if name not in OF_EACH}
        if cls.running is None or cls.running._variables != variables:
            if cls.running is not None:
                cls.running.close()
            cls.running = cls(variables)
            atexit.register(cls.running.close)
        return cls.running

    def fork(self, request: bytes, descriptors: list[int]) -> None:
        """descriptors: for the keeper's reports, and the script's stdout and stderr."""
        socket.send_fds(self._socket, [len(request).to_bytes(8, "big")], descriptors)
        self._socket.sendall(request)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


# --- in the server --------------------------------------------------------------------------------------------


def serve(requests: socket.socket) -> list[str]:
    """Fork until the test process closes its end. Returns in a script's process alone, its command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the test process ends us
    while True:
        size, descriptors, _, _ = socket.recv_fds(requests, 8, 3)
        if not size:
            sys.exit()
        request = requests.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
        if os.fork() == 0:
            requests.close()
            return keep(json.loads(request), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        while _reaped():
            pass


def _reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


def keep(request: tuple[list[str], str, dict[str, str]], reports: int, stdout: int, stderr: int) -> list[str]:
    """Fork the script and report its process id and its end. Returns in the script's process alone."""
    pid = os.fork()
    if pid == 0:
        os.close(reports)
        return become(*request, stdout, stderr)
    os.close(stdout)
    os.close(stderr)
    os.write(reports, str(pid).encode())
    _, status = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):  # the test did not wait for it
        os.write(reports, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def become(command: list[str], cwd: str, environment: dict[str, str], stdout: int, stderr: int) -> list[str]:
    """What a new interpreter finds: streams, folder, variables, import path, arguments, signals, chance."""
    import numpy as np

    for descriptor, end in ((1, stdout), (2, stderr)):
        os.dup2(end, descriptor)
    for end in {stdout, stderr}:
        os.close(end)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    ours = sys.path.index("")  # as of `python -c`, which some import has put a folder before
    beside = [Path(command[0]).resolve().parent, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[ours : ours + 1] = [str(folder) for folder in beside if folder]
    sys.argv[:] = command
    sys.orig_argv[:] = [sys.executable, *command]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    np.random.seed()
    return command


def main(requests: int) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("an import has started threads, which a fork does not have")
    gc.collect()
    gc.freeze()
    script, *_ = serve(socket.socket(fileno=requests))
    runpy.run_path(script, run_name="__main__")
