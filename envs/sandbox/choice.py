"""Which sandbox a configuration asks for: one of this machine, or a server's."""

from collections.abc import Sequence
from typing import Any, Protocol

from config.schema.env import EnvConfig
from envs.sandbox.languages import command
from envs.sandbox.limits import Limits
from envs.sandbox.sandbox import Run, Sandbox, choose_level

REMOTE = "remote"


class Programs(Protocol):
    """What runs programs one after another. `envs.sandbox.sandbox.Sandbox` says what each method does and raises."""

    def run(self, source: str, stdin: bytes = b"", wall_seconds: float | None = None) -> Run: ...

    def call(
        self, source: str, function: str, arguments: Sequence[Any], wall_seconds: float | None = None
    ) -> Run: ...

    def check(self, source: str, tests: dict[str, Any], wall_seconds: float | None = None) -> Run: ...

    def close(self) -> None: ...


def make_sandbox(env: EnvConfig, limits: Limits | None = None, language: str = "python") -> Programs:
    """The sandbox of `env.sandbox`.

    Raises:
        ConfigError: its level does not work here, or the language's interpreter is missing.
    """
    if env.sandbox == REMOTE:
        from envs.sandbox.remote import RemoteSandbox  # its HTTP client costs a tenth of a second

        return RemoteSandbox(str(env.sandbox_url), limits, language)
    return Sandbox(env.sandbox, limits, language=language)


def check_sandbox(env: EnvConfig, language: str = "python") -> None:
    """Finds out whether programs can be run, so that processes forked later need not.

    Raises:
        ConfigError: as for `make_sandbox`, or the server does not answer.
    """
    if env.sandbox == REMOTE:
        from envs.sandbox.remote import check_server

        check_server(str(env.sandbox_url), language)
    else:
        choose_level(env.sandbox, bool(command(language)))
