"""Client of a sandbox server with SandboxFusion's HTTP interface (`POST /run_code`).

    grader ── code, stdin, seconds ──▶ server      one request a run
           ◀── status, code, output ──             compared here: expected outputs are never sent

Tests that are Python code are sent too, to a process that the program cannot look into
(`envs.sandbox.server_script`).
"""

import functools
import itertools
import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from config.schema.errors import ConfigError
from envs.sandbox.languages import LANGUAGES
from envs.sandbox.limits import Limits
from envs.sandbox.program_monitor import ProgramStatus
from envs.sandbox.supervisor_client import ProgramResult, SandboxError

REPLY_SECONDS = 1.0
"""Time that the server may take beyond the program's own limit."""
PROBE_SECONDS = 20.0
FIRST_RETRY_SECONDS = 0.1
"""Pause before the first retry of a request to a busy server; the pause doubles with each retry."""
ASSERTION_MODULES = (
    *("value_codec", "channel", "exceptions", "program_process"),
    *("remote_proxy", "pytest_module", "numpy_module", "tests_process"),
)
"""The modules of `envs.sandbox.assertions` that a server needs, each after the modules that it imports."""
BUSY_STATUSES = (429, 500, 502, 503, 504)
"""HTTP statuses of a passing failure, after which the request is sent again."""
PROBE_PROGRAMS = {"python": "print(6 * 7)", "bash": "echo $((6 * 7))", "javascript": "console.log(6 * 7)"}


class RemoteSandbox:
    """Runs programs on a server, one request per program. Not for several threads at once.

    The server enforces `wall_seconds` and the memory limit; it measures no CPU time.

    Args:
        url: address of the server, without `/run_code`.
        limits: limits of each run.
        language: a key of `LANGUAGES`.
    """

    def __init__(self, url: str, limits: Limits | None = None, language: str = "python") -> None:
        self.url = url.rstrip("/")
        self.limits = limits or Limits()
        self.language = language
        self._client = httpx.Client()

    def run(self, source: str, stdin: bytes = b"", wall_seconds: float | None = None) -> ProgramResult:
        """Runs a script for at most `wall_seconds`, or its limit if that is less.

        Raises:
            SandboxError: the server cannot be reached, is too busy or failed.
        """
        text = stdin.decode("utf-8", "replace")
        return self._run_request(source, text, wall_seconds, LANGUAGES[self.language].server_name)

    def call_function(
        self, source: str, function: str, arguments: Sequence[Any], wall_seconds: float | None = None
    ) -> ProgramResult:
        """Calls a function as `Sandbox.call_function` does. Raises SandboxError as `run` does."""
        code = f"{_module_source('server_script')}\n\ncall_function({source!r}, {function!r})\n"
        return self._run_with_marker(code, {"arguments": arguments}, wall_seconds)

    def run_tests(self, source: str, tests: dict[str, Any], wall_seconds: float | None = None) -> ProgramResult:
        """Runs tests as `Sandbox.run_tests` does. Raises SandboxError as `run` does."""
        texts = {module: _module_source(f"assertions/{module}") for module in ASSERTION_MODULES}
        code = f"{_module_source('server_script')}\n\nrun_tests({source!r}, {texts!r})\n"
        return self._run_with_marker(code, {"tests": tests}, wall_seconds)

    def _run_with_marker(self, code: str, payload: dict[str, Any], wall_seconds: float | None) -> ProgramResult:
        marker = secrets.token_hex(16)
        run = self._run_request(code, json.dumps({**payload, "mark": marker}), wall_seconds, "python")
        printed, _, value = run.stdout.rpartition(f"\n{marker}".encode())
        return ProgramResult(run.status, run.code, printed, run.stderr, value, run.cpu_seconds, run.wall_seconds)

    def _run_request(self, code: str, stdin: str, wall_seconds: float | None, language: str) -> ProgramResult:
        limit = self.limits.wall_seconds
        seconds = limit if wall_seconds is None else min(wall_seconds, limit)
        request = {
            "code": code,
            "stdin": stdin,
            "language": language,
            "run_timeout": seconds,
            "memory_limit_MB": self.limits.memory_mib,
        }
        reply_body = self._send_with_retries(request, seconds)
        result = reply_body.get("run_result") or {}
        status = result.get("status")
        if status not in ("Finished", "TimeLimitExceeded"):
            compiled = reply_body.get("compile_result") or {}
            reason = reply_body.get("message") or compiled.get("stderr") or result or reply_body
            raise SandboxError(f"{self.url}/run_code: the program was not run: {str(reason)[:300]}")
        duration = float(result.get("execution_time") or 0.0)
        exit_code = result.get("return_code")
        stdout, stderr = (str(result.get(stream) or "").encode("utf-8", "replace") for stream in ("stdout", "stderr"))
        ending: ProgramStatus = "finished" if status == "Finished" else "time"
        return ProgramResult(
            ending, -9 if exit_code is None else int(exit_code), stdout, stderr, b"", duration, duration
        )

    def _send_with_retries(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Sends a request, and retries while the server is busy and there is time.

        Returns the server's reply.
        """
        start = time.monotonic()
        deadline = start + seconds + REPLY_SECONDS
        for attempt in itertools.count():
            reply_body = self._post_request(request, deadline - time.monotonic())
            if isinstance(reply_body, dict):
                return reply_body
            pause = FIRST_RETRY_SECONDS * 2**attempt
            if time.monotonic() + pause >= deadline:
                waited = time.monotonic() - start
                raise SandboxError(f"{self.url}/run_code: {reply_body} ({attempt + 1} requests in {waited:.1f} s)")
            time.sleep(pause)
        raise AssertionError

    def _post_request(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | str:
        """Posts a request; returns the reply, or a text if a retry may help.

        Raises:
            SandboxError: a retry cannot help.
        """
        try:
            reply = self._client.post(f"{self.url}/run_code", json=request, timeout=max(0.1, seconds))
        except httpx.TransportError as error:
            return f"{type(error).__name__}: {error}"
        if reply.status_code in BUSY_STATUSES:
            return f"HTTP status {reply.status_code}: {reply.text[:300]}"
        if reply.status_code != httpx.codes.OK:
            raise SandboxError(f"{self.url}/run_code: HTTP status {reply.status_code}: {reply.text[:300]}")
        try:
            reply_body = reply.json()
        except ValueError:
            raise SandboxError(f"{self.url}/run_code: the reply is not JSON: {reply.text[:300]!r}") from None
        if not isinstance(reply_body, dict):
            raise SandboxError(f"{self.url}/run_code: the reply is not a JSON object: {reply.text[:300]!r}")
        return str(reply_body.get("message", "")) if reply_body.get("status") == "SandboxError" else reply_body

    def close(self) -> None:
        """Closes the connections to the server."""
        self._client.close()


@functools.cache
def _module_source(module: str) -> str:
    """Returns the source text of a module of this package."""
    return (Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")


@functools.cache
def check_server(url: str, language: str = "python") -> None:
    """Checks a server by running a test program on it.

    Raises:
        ConfigError: the server cannot be reached, or the program's output is wrong.
    """
    sandbox = RemoteSandbox(url, Limits(wall_seconds=PROBE_SECONDS), language)
    try:
        run = sandbox.run(PROBE_PROGRAMS[language])
    except SandboxError as error:
        raise ConfigError(
            f"env.sandbox_url={url}: {error}; start SandboxFusion there, or set another env.sandbox"
        ) from None
    finally:
        sandbox.close()
    if run.stdout.strip() != b"42":
        raise ConfigError(
            f"env.sandbox_url={url}: a test program in {language} printed {run.stdout!r} "
            f"{run.stderr[-300:]!r}; correct the server, or set another env.sandbox"
        )
