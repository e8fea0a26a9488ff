"""Checks of `env.agent` and the settings that belong to it."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from config.schema.errors import ConfigError

AGENTS_PER_CORE = 4
"""Agents at a time and core of this machine, without `env.episodes`: agents mostly wait for the model."""
DEFAULT_AGENT_TURNS = 64
FUNCTION_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""Form of `module:function`; any other value of `env.agent` is a command line."""
ANSWER_COLUMNS = ("answer", "gt_answer", "reward_model", "solution", "test_cases")
"""Columns from which tasks take the reference answer; an agent never reads them."""
OWN_VARIABLES = (
    *("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
    *("GRPO_EXAMPLE", "TMPDIR"),
)
"""Environment variables that every agent gets from the run."""


def max_agents() -> int:
    """Returns the number of agents that may run at a time without `env.episodes`."""
    return AGENTS_PER_CORE * (os.cpu_count() or 1)


def split_command(agent: str) -> tuple[str, ...]:
    """Returns the words of the command line `env.agent`; none for `module:function`.

    Raises:
        ConfigError: there is no word, or a quotation mark is open.
    """
    if FUNCTION_PATH.fullmatch(agent):
        return ()
    try:
        words = shlex.split(agent)
    except ValueError as error:
        raise ConfigError(f"env.agent={agent!r}: {error}; correct the quotation marks of the command line") from error
    if not words or not words[0] or "\0" in agent:
        raise ConfigError(f"env.agent={agent!r}: name a command line such as 'python agent.py', or module:function")
    return tuple(words)


def check_agent(agent: str | None, variables: Mapping[str, Any], columns: Sequence[str], answer: Any) -> None:
    """Checks `env.agent`, `env.agent_env` and `env.agent_columns`.

    answer: `env.options.answer`, the path of the answer in a row.

    Raises:
        ConfigError: a value is invalid, or unused without an agent.
    """
    if agent is None:
        if variables or columns:
            raise ConfigError(
                f"env.agent_env={sorted(variables)}, env.agent_columns={columns}: there is no agent; set env.agent"
            )
        return
    split_command(agent)
    for name, value in variables.items():
        place = f"env.agent_env.{name}"
        if name in OWN_VARIABLES:
            raise ConfigError(f"{place}: the run sets this variable for each episode; remove it from env.agent_env")
        if not name or "=" in name or "\0" in name:
            raise ConfigError(f"{place}: {name!r} is no name of an environment variable; correct it")
        if isinstance(value, bool) or not isinstance(value, str | int | float | None) or "\0" in str(value):
            raise ConfigError(f"{place}={value!r}: must be text or a number, or null for the value in the run")
    hidden = (*ANSWER_COLUMNS, str(answer or "answer").partition(".")[0])
    for column in columns:
        if column in hidden:
            raise ConfigError(
                f"env.agent_columns={list(columns)}: the column {column!r} holds the answer, which agents must not "
                "read; remove it"
            )
