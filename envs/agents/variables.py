"""Environment variables of agents."""

import os
from collections.abc import Mapping
from typing import Any

from config.schema.errors import ConfigError

PASSED_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Variables of the run that every agent gets, besides those of the locale; none is a secret."""


def passed_variables(agent_env: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables of all episodes: some of the run, and those of `env.agent_env`.

    Raises:
        ConfigError: a variable of the value null is not set in the run.
    """
    passed = {name: value for name, value in os.environ.items() if name in PASSED_VARIABLES or name[:3] == "LC_"}
    for name, value in agent_env.items():
        if value is None and name not in os.environ:
            raise ConfigError(f"env.agent_env.{name}=null: the run has no such variable; export it, or set a value")
        passed[name] = os.environ[name] if value is None else str(value)
    return passed


def episode_variables(base_url: str, api_key: str) -> dict[str, str]:
    """Returns the variables with the server of one episode."""
    anthropic_url = base_url.rstrip("/").removesuffix("/v1")  # its clients append /v1 themselves
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": anthropic_url,
        "ANTHROPIC_API_KEY": api_key,
    }
