"""Builds and checks the sandbox that `env.sandbox` names, local or on a server."""

from collections.abc import Sequence
from typing import Any, Protocol

from config.schema.env import EnvConfig
from envs.sandbox.languages import interpreter_command
from envs.sandbox.limits import Limits
from envs.sandbox.sandbox import ProgramResult, Sandbox, choose_level

REMOTE = "remote"


class ProgramRunner(Protocol):
    """Interface of a sandbox that runs programs one after another.

    `envs.sandbox.sandbox.Sandbox` documents the methods and their errors.
    """

    def run(self, source: str, stdin: bytes = b"", wall_seconds: float | None = None) -> ProgramResult: ...

    def call_function(
        self, source: str, function: str, arguments: Sequence[Any], wall_seconds: float | None = None
    ) -> ProgramResult: ...

    def run_tests(self, source: str, tests: dict[str, Any], wall_seconds: float | None = None) -> ProgramResult: ...

    def close(self) -> None: ...


def make_sandbox(env: EnvConfig, limits: Limits | None = None, language: str = "python") -> ProgramRunner:
    """Builds the sandbox that `env.sandbox` names.

    Raises:
        ConfigError: the level does not work on this machine, or the language's interpreter is missing.
    """
    if env.sandbox == REMOTE:
        from envs.sandbox.remote_sandbox import RemoteSandbox  # its HTTP client is slow to import

        return RemoteSandbox(str(env.sandbox_url), limits, language)
    return Sandbox(env.sandbox, limits, language=language)


def check_sandbox(env: EnvConfig, language: str = "python") -> None:
    """Checks that programs can be run.

    The result is cached, so that processes forked later do not repeat the check.

    Raises:
        ConfigError: as for `make_sandbox`, or the server does not answer.
    """
    if env.sandbox == REMOTE:
        from envs.sandbox.remote_sandbox import check_server

        check_server(str(env.sandbox_url), language)
    else:
        choose_level(env.sandbox, bool(interpreter_command(language)))
