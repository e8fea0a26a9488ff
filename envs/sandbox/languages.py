"""Programming languages of tested programs and their interpreters.

Python runs in the sandbox's own interpreter, other languages in an interpreter of the machine.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from config.schema.errors import ConfigError


@dataclass(frozen=True)
class Language:
    """A programming language and its names.

    names: names in a Markdown fence or a data row, the usual one first. prompt_name: the name in a prompt.
    server_name: the name in SandboxFusion's interface. interpreter: the command that runs a program; empty: the
    sandbox's own Python. file: name of the program's file.
    """

    names: tuple[str, ...]
    prompt_name: str
    server_name: str
    interpreter: tuple[str, ...] = ()
    file: str = "solution.py"


LANGUAGES: Mapping[str, Language] = {
    "python": Language(("python", "python3", "py"), "Python 3", "python"),
    "bash": Language(("bash", "sh", "shell"), "Bash", "bash", ("bash", "--noprofile", "--norc"), "solution.sh"),
    "javascript": Language(
        ("javascript", "js", "node", "nodejs"), "JavaScript for Node.js", "nodejs", ("node",), "solution.js"
    ),
}


def find_language(name: str) -> str:
    """Returns the key in `LANGUAGES` for a name in a row or a fence.

    Raises:
        ValueError: an unknown language.
    """
    for key, language in LANGUAGES.items():
        if name.strip().lower() in language.names:
            return key
    raise ValueError(f"language={name!r}: choose one of {', '.join(LANGUAGES)}")


def interpreter_command(language: str) -> list[str]:
    """Returns the path of a language's interpreter and its arguments; empty for Python.

    Raises:
        ConfigError: the interpreter is not installed.
    """
    interpreter = LANGUAGES[language].interpreter
    if not interpreter:
        return []
    path = shutil.which(interpreter[0])
    if path is None:
        raise ConfigError(
            f"programs in {language} need {interpreter[0]}, which is not on PATH; install {interpreter[0]}, "
            "or set env.sandbox=remote to run programs on a server"
        )
    return [os.path.realpath(path), *interpreter[1:]]
