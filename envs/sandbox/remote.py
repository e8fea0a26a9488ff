"""Programs run by a server: the HTTP interface of SandboxFusion (`POST /run_code`), which others offer too.

    grader ── code, stdin, seconds ──▶ server      one request a run
           ◀── status, code, output ──             compared here: expected outputs are never sent

Of assertions the tests are sent too, to a process that the program cannot look into (`envs.sandbox.remote_side`).
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
from envs.sandbox.session import Run, SandboxError
from envs.sandbox.watch import Status

ANSWER_SECONDS = 1.0
"""How much longer than the program may run the server may take to say how it went."""
PROBE_SECONDS = 20.0
FIRST_PAUSE_SECONDS = 0.1
"""Before a request that the server could not take is sent again; each pause is twice as long as the one before."""
BETWEEN = (
    *("values", "channel", "raised", "answer_side"),
    *("stand_in", "pytest_module", "numpy_module", "tests_side"),
)
"""The modules of `envs.sandbox.assertions` that stand between tests and a program, each after those that it imports."""
BUSY = (429, 500, 502, 503, 504)
"""HTTP statuses that pass."""
PROBES = {"python": "print(6 * 7)", "bash": "echo $((6 * 7))", "javascript": "console.log(6 * 7)"}


class RemoteSandbox:
    """Runs programs on a server, one after another; each run is a request. Not for several threads at once.

    A run's `wall_seconds` of the limits and its memory are the server's to keep; it measures no CPU time.

    Args:
        url: of the server, without `/run_code`.
        limits: of each run.
        language: a key of `LANGUAGES`.
    """

    def __init__(self, url: str, limits: Limits | None = None, language: str = "python") -> None:
        self.url = url.rstrip("/")
        self.limits = limits or Limits()
        self.language = language
        self._client = httpx.Client()

    def run(self, source: str, stdin: bytes = b"", wall_seconds: float | None = None) -> Run:
        """Runs a script, for at most `wall_seconds` where that is less than its limit.

        Raises:
            SandboxError: the server cannot be reached, is too busy or failed.
        """
        given = stdin.decode("utf-8", "replace")
        return self._ask(source, given, wall_seconds, LANGUAGES[self.language].remote)

    def call(
        self, source: str, function: str, arguments: Sequence[Any], wall_seconds: float | None = None
    ) -> Run:
        """Calls a function as `Sandbox.call` does. Raises SandboxError as `run`, else as that."""
        code = f"{_text('remote_side')}\n\ncall({source!r}, {function!r})\n"
        return self._behind_mark(code, {"arguments": arguments}, wall_seconds)

    def check(self, source: str, tests: dict[str, Any], wall_seconds: float | None = None) -> Run:
        """Runs tests as `Sandbox.check` does. Raises SandboxError as `run`."""
        texts = {module: _text(f"assertions/{module}") for module in BETWEEN}
        code = f"{_text('remote_side')}\n\ncheck({source!r}, {texts!r})\n"
        return self._behind_mark(code, {"tests": tests}, wall_seconds)

    def _behind_mark(self, code: str, given: dict[str, Any], wall_seconds: float | None) -> Run:
        mark = secrets.token_hex(16)
        run = self._ask(code, json.dumps({**given, "mark": mark}), wall_seconds, "python")
        printed, _, value = run.stdout.rpartition(f"\n{mark}".encode())
        return Run(run.status, run.code, printed, run.stderr, value, run.cpu_seconds, run.wall_seconds)

    def _ask(self, code: str, stdin: str, wall_seconds: float | None, language: str) -> Run:
        limit = self.limits.wall_seconds
        seconds = limit if wall_seconds is None else min(wall_seconds, limit)
        request = {
            "code": code,
            "stdin": stdin,
            "language": language,
            "run_timeout": seconds,
            "memory_limit_MB": self.limits.memory_mib,
        }
        said = self._answer(request, seconds)
        result = said.get("run_result") or {}
        status = result.get("status")
        if status not in ("Finished", "TimeLimitExceeded"):
            compiled = said.get("compile_result") or {}
            why = said.get("message") or compiled.get("stderr") or result or said
            raise SandboxError(f"{self.url}/run_code: the program was not run: {str(why)[:300]}")
        took = float(result.get("execution_time") or 0.0)
        exit_code = result.get("return_code")
        stdout, stderr = (
            str(result.get(stream) or "").encode("utf-8", "replace") for stream in ("stdout", "stderr")
        )
        ended: Status = "finished" if status == "Finished" else "time"
        return Run(ended, -9 if exit_code is None else int(exit_code), stdout, stderr, b"", took, took)

    def _answer(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request, again while the server is busy and there is time."""
        began = time.monotonic()
        deadline = began + seconds + ANSWER_SECONDS
        for attempt in itertools.count():
            said = self._post(request, deadline - time.monotonic())
            if isinstance(said, dict):
                return said
            pause = FIRST_PAUSE_SECONDS * 2**attempt
            if time.monotonic() + pause >= deadline:
                waited = time.monotonic() - began
                raise SandboxError(
                    f"{self.url}/run_code: {said} (asked {attempt + 1} times in {waited:.1f} s)"
                )
            time.sleep(pause)
        raise AssertionError

    def _post(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | str:
        """The answer, or why there is none yet. Raises SandboxError where asking again is no help."""
        try:
            reply = self._client.post(f"{self.url}/run_code", json=request, timeout=max(0.1, seconds))
        except httpx.TransportError as error:
            return f"{type(error).__name__}: {error}"
        if reply.status_code in BUSY:
            return f"HTTP status {reply.status_code}: {reply.text[:300]}"
        if reply.status_code != httpx.codes.OK:
            raise SandboxError(f"{self.url}/run_code: HTTP status {reply.status_code}: {reply.text[:300]}")
        try:
            said = reply.json()
        except ValueError:
            raise SandboxError(f"{self.url}/run_code: no JSON: {reply.text[:300]!r}") from None
        if not isinstance(said, dict):
            raise SandboxError(f"{self.url}/run_code: no object: {reply.text[:300]!r}")
        return str(said.get("message", "")) if said.get("status") == "SandboxError" else said

    def close(self) -> None:
        """Closes its connections."""
        self._client.close()


@functools.cache
def _text(module: str) -> str:
    return (Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")


@functools.cache
def check_server(url: str, language: str = "python") -> None:
    """Lets the server run a program. Raises ConfigError where it does not answer as it should."""
    sandbox = RemoteSandbox(url, Limits(wall_seconds=PROBE_SECONDS), language)
    try:
        run = sandbox.run(PROBES[language])
    except SandboxError as error:
        raise ConfigError(
            f"env.sandbox_url={url}: {error}; start SandboxFusion there, or choose another env.sandbox"
        ) from None
    finally:
        sandbox.close()
    if run.stdout.strip() != b"42":
        raise ConfigError(
            f"env.sandbox_url={url}: a test program in {language} printed {run.stdout!r} {run.stderr[-300:]!r}"
        )
