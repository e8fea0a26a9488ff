"""Tool `python`: a Python interpreter in the sandbox of tested programs."""

import threading

from config.schema.env import EnvConfig
from envs.sandbox.sandbox import ProgramResult
from envs.sandbox.sandbox_selection import ProgramRunner, check_sandbox, make_sandbox
from envs.tools.results import shorten_result


class _ThreadSandbox(threading.local):
    """Sandbox of the current thread."""

    sandbox: ProgramRunner | None = None


class PythonTool:
    """You have a Python interpreter; what your program prints is its result.

    Every call is a new program. Each calling thread has a sandbox of its own.

    Raises:
        ConfigError: the sandbox does not work here.
    """

    def __init__(self, env: EnvConfig) -> None:
        check_sandbox(env)
        self.env = env
        self._thread_local = _ThreadSandbox()
        self._sandboxes: list[ProgramRunner] = []
        self._lock = threading.Lock()

    def run(self, code: str) -> str:
        """Runs a program; returns its output and the reason of a failure.

        Args:
            code: a whole program, which prints its result
        """
        if self._thread_local.sandbox is None:
            self._thread_local.sandbox = make_sandbox(self.env)
            with self._lock:
                self._sandboxes.append(self._thread_local.sandbox)
        result = self._thread_local.sandbox.run(code.strip("\n"))
        return shorten_result(_result_text(result), self.env.tool_result_characters)

    def close(self) -> None:
        """Closes all sandboxes; no program may be running."""
        for sandbox in self._sandboxes:
            sandbox.close()
        self._sandboxes = []


def _result_text(run: ProgramResult) -> str:
    """Formats the output of a program, with the reason of a failure."""
    output = run.stdout.decode("utf-8", "replace").strip()
    if run.is_success:
        return output or "(no output; print the result)"
    if run.status != "finished":
        return f"{output}\nstopped: {run.status}".strip()
    error = run.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"{output}\n{error[-1] if error else f'exit code {run.code}'}".strip()


tool = PythonTool
