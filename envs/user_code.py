"""Code of the user's own, named `module:name`: a reward, a task or a tool. No torch here."""

import os
import sys
import traceback
from functools import cache
from importlib import import_module
from typing import Any

from config.schema.errors import ConfigError


def is_own(name: str) -> bool:
    """Whether a name is `module:name`, and not one of those that this project knows."""
    return ":" in name


@cache
def load_own(key: str, path: str) -> Any:
    """The function or class that `path` (module:name) names; modules of the current folder are found.

    Args:
        key: the configuration key that holds `path`, for messages.

    Raises:
        ConfigError: the module does not import, or has no such name.
    """
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module raises is the user's to mend
        raise ConfigError(
            f"{key}={path}: importing {module_name!r} failed: {described(error)}; modules are looked for in "
            f"{os.getcwd()} and in PYTHONPATH"
        ) from error
    if name not in vars(module):
        raise ConfigError(
            f"{key}={path}: {module_name} ({getattr(module, '__file__', 'a package')}) has no {name!r}"
        )
    return vars(module)[name]


def described(error: BaseException) -> str:
    """Type, message and place of an exception, in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):  # says its place itself
        return text
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].filename.startswith("<frozen"):
        return text
    return f"{text} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
