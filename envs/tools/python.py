"""The tool `python`: an interpreter for the model, in the sandbox of tested programs."""

import threading

from config.schema.env import EnvConfig
from envs.sandbox.choice import Programs, check_sandbox, make_sandbox
from envs.sandbox.sandbox import Run
from envs.tool_calls import shortened


class _Own(threading.local):
    """What belongs to one thread."""

    sandbox: Programs | None = None


class PythonTool:
    """You have a Python interpreter; what your program prints is its result.

    Every call is a new program. Each thread that calls has a sandbox of its own.

    Raises:
        ConfigError: the sandbox does not work here.
    """

    def __init__(self, env: EnvConfig) -> None:
        check_sandbox(env)
        self.env = env
        self._own = _Own()
        self._sandboxes: list[Programs] = []
        self._lock = threading.Lock()

    def run(self, request: str) -> str:
        """What the program printed, or why it failed."""
        if self._own.sandbox is None:
            self._own.sandbox = make_sandbox(self.env)
            with self._lock:
                self._sandboxes.append(self._own.sandbox)
        return shortened(_told(self._own.sandbox.run(request.strip("\n"))))

    def close(self) -> None:
        """Ends every sandbox; nothing may be running."""
        for sandbox in self._sandboxes:
            sandbox.close()
        self._sandboxes = []


def _told(run: Run) -> str:
    printed = run.stdout.decode("utf-8", "replace").strip()
    if run.succeeded:
        return printed or "(no output; print the result)"
    if run.status != "finished":
        return f"{printed}\nstopped: {run.status}".strip()
    error = run.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"{printed}\n{error[-1] if error else f'exit code {run.code}'}".strip()


tool = PythonTool
