"""Scripts and Ray's workers in forks of a process that has imported all that they import: a new interpreter takes
seconds for it.

    Forked ── arguments, folder, variables, streams ──▶ server ──fork──▶ script
           ◀── its process id, then how it ended ────────┘
                  where vLLM is wanted ──▶ the server's fork that has imported it ──fork──▶ script
    Ray ── its command ──▶ tests/forked_ray/setup_worker.py: the same, for a worker or a helper of Ray

Test processes that run beside each other share one server.

A forked script is a process: it has its own arguments, folder, variables and streams, and ends by its own exit code or
signal. What differs from `python SCRIPT`: modules were loaded in the server, which had the same variables, texts
have the hashes that they have in the other forks, the parent is the server, Hydra composes a config once instead of
twice, and at the end modules are not taken apart.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

from tests.keeper import FORKS, Keeper
from tests.namespaces import Namespaces

ROOT = Path(__file__).resolve().parent.parent
WANTS_VLLM = "inference_model.backend=vllm"
VLLM_WORDS = (WANTS_VLLM, "torchrl.envs.llm:", "vllm_two_shards.py")
"""Words in a script's command: it, and what it starts, is forked from a process that has imported vLLM as well."""
OF_EACH = {"PYTHONPATH", "PYTEST_CURRENT_TEST"}
"""Variables that the modules do not read as they load; the first is applied to a script's import path."""
SERVED_AT = "FORK_SERVER_AT"
"""The variable that gives the test processes of one run the folder of the server that they share."""
AT_LOAD = ("CUDA_", "HF_", "HOME", "MKL_", "OMP_", "TMPDIR", "TORCH_", "TRANSFORMERS_", "XDG_")
"""How variables begin that modules read as they are loaded."""


def at_load(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of the variables that modules read as they are loaded."""
    return {name: value for name, value in environment.items() if name.startswith(AT_LOAD)}


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether imports leave a process that may be forked.

    Not with a CUDA build of torch, for a driver that was asked for its devices does not survive a fork; nor where
    NumPy's library starts threads.
    """
    import torch

    one_thread = environment.get("OMP_NUM_THREADS") == "1"
    return sys.platform == "linux" and torch.version.cuda is None and one_thread


class Forked:
    """What `subprocess.Popen` of `python SCRIPT ...` is, with text from pipes, as far as tests use it.

    command: the script and its arguments. stderr: `subprocess.PIPE`, or `subprocess.STDOUT` to join it to stdout.
    within: namespaces that it enters. Raises ValueError where modules would see other variables than the script.
    """

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        stderr: int = subprocess.PIPE,
        within: Namespaces | None = None,
    ) -> None:
        self.args = [sys.executable, *command]
        self.returncode: int | None = None
        self._out, stdout = _Pipe.and_its_end()
        self._err, complaints = _Pipe.and_its_end()
        joined = stdout if stderr == subprocess.STDOUT else complaints
        vllm = any(word in argument for argument in command for word in VLLM_WORDS)
        address = Server.of(environment).address(vllm)
        variables = {**environment, FORKS: address}
        beside = within.pid if within else None
        self._keeper = Keeper(address, command, str(cwd), variables, (stdout, joined), beside)
        os.close(stdout)
        os.close(complaints)
        self.pid = self._keeper.told()

    def poll(self) -> int | None:
        return self._end_within(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._end_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _end_within(self, seconds: float | None) -> int | None:
        if self.returncode is None and self._keeper.tells_within(seconds):
            self.returncode = self._keeper.told()
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


_server: "Server | None" = None


class Server:
    """The process that scripts of this test process are forked from.

    folder: of the sockets that it listens to. variables: those that its modules see as they load.
    """

    def __init__(self, folder: str, variables: Mapping[str, str]) -> None:
        self._folder = folder
        self._variables = variables

    def address(self, vllm: bool) -> str:
        """Of the socket that it listens to, or its fork with vLLM, where that is installed."""
        return f"{self._folder}/{'vllm' if vllm and find_spec('vllm') else 'server'}"

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Server":
        """The one that `SERVED_AT` names, or else one that ends with this process. Raises ValueError where its modules
        see other variables than these."""
        global _server
        if _server is None:
            _server = cls(os.environ.get(SERVED_AT) or start_server(environment), environment)
        if at_load(environment) != at_load(_server._variables):
            raise ValueError(f"modules were loaded with other variables than {at_load(environment)}")
        return _server


def start_server(environment: Mapping[str, str]) -> str:
    """A process that imports nothing before it is first asked for a fork, and ends with this one. Its folder."""
    folder = tempfile.TemporaryDirectory(prefix="forks_")
    line, theirs = socket.socketpair()
    with _listener(folder.name, "server") as plain, _listener(folder.name, "vllm") as with_vllm, theirs:
        given = [plain.fileno(), with_vllm.fileno(), theirs.fileno()]
        process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.fork_server import main; main(*{given})"],
            cwd=ROOT,
            env={name: value for name, value in environment.items() if name not in OF_EACH},
            pass_fds=given,
            stdin=subprocess.DEVNULL,
        )

    def end() -> None:
        line.close()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    return folder.name


def _listener(folder: str, name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{folder}/{name}")
    listener.listen(64)
    return listener
