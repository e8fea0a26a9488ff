"""The languages of tested programs. Python runs in the sandbox's own interpreter, the others in one of the machine."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from config.schema.errors import ConfigError


@dataclass(frozen=True)
class Language:
    """names: what a fence or a row calls it, its usual name first. asked: how a prompt does. remote: how SandboxFusion
    does. interpreter: the program that runs it, with its arguments; empty: the sandbox's own. file: of the program."""

    names: tuple[str, ...]
    asked: str
    remote: str
    interpreter: tuple[str, ...] = ()
    file: str = "solution.py"


LANGUAGES: Mapping[str, Language] = {
    "python": Language(("python", "python3", "py"), "Python 3", "python"),
    "bash": Language(
        ("bash", "sh", "shell"), "Bash", "bash", ("bash", "--noprofile", "--norc"), "solution.sh"
    ),
    "javascript": Language(
        ("javascript", "js", "node", "nodejs"), "JavaScript for Node.js", "nodejs", ("node",), "solution.js"
    ),
}


def named(name: str) -> str:
    """The key in `LANGUAGES` of what a row or a fence says.

    Raises:
        ValueError: a language that is not known here.
    """
    for key, language in LANGUAGES.items():
        if name.strip().lower() in language.names:
            return key
    raise ValueError(f"language={name!r}: choose one of {', '.join(LANGUAGES)}")


def command(language: str) -> list[str]:
    """The interpreter of a language as a path, and its arguments; empty for Python.

    Raises:
        ConfigError: it is not installed.
    """
    interpreter = LANGUAGES[language].interpreter
    if not interpreter:
        return []
    found = shutil.which(interpreter[0])
    if found is None:
        raise ConfigError(
            f"programs in {language} need {interpreter[0]}, which is not on PATH: install it, or let a server run them "
            "(env.sandbox=remote)"
        )
    return [os.path.realpath(found), *interpreter[1:]]
