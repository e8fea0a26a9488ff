"""Loads user code named `module:name`, and formats exceptions in one line."""

import os
import sys
import sysconfig
import traceback
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from config.schema.errors import ConfigError


def is_user_code(name: str) -> bool:
    """Whether a name has the form `module:name`, unlike the names of built-in code."""
    return ":" in name


@cache
def load_user_object(key: str, path: str) -> Any:
    """Loads the function or class of a path `module:name`, also from the current folder.

    Args:
        key: config key with the path, for messages.

    Raises:
        ConfigError: the import fails, the module lacks the name, or an installed module hides the user's module.
    """
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    _check_not_shadowed(key, path, module_name)
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module can raise any exception
        raise ConfigError(
            f"{key}={path}: importing {module_name!r} failed: {describe_exception(error)}; modules are "
            f"searched in {os.getcwd()} and in PYTHONPATH"
        ) from error
    if name not in vars(module):
        place = f"{module_name} ({getattr(module, '__file__', 'a package')})"
        own = [one for one, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        names = f"; it has {', '.join(own[:10])}" if own else ""
        raise ConfigError(f"{key}={path}: {place} has no {name!r}{names}")
    return vars(module)[name]


def _check_not_shadowed(key: str, path: str, module_name: str) -> None:
    """Raises ConfigError if an installed module hides a module of the current folder."""
    parts = module_name.split(".")
    user_file = next(
        (one for one in (Path(*parts).with_suffix(".py"), Path(*parts, "__init__.py")) if one.is_file()), None
    )
    spec = find_spec(parts[0]) if user_file is not None else None
    if user_file is None or spec is None or spec.origin is None:
        return
    origin = Path(spec.origin).resolve()
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib")]
    hiding_folders = [Path(__file__).resolve().parents[1], *(Path(path).resolve() for path in installed)]
    if not origin.is_relative_to(Path.cwd().resolve()) and any(map(origin.is_relative_to, hiding_folders)):
        raise ConfigError(
            f"{key}={path}: {user_file.absolute()} is hidden by {parts[0]!r} of {origin}; give your file another name"
        )


def describe_error(error: BaseException) -> str:
    """Returns type and message of an exception, whose `__str__` may fail too."""
    try:
        message = str(error)
    except BaseException:  # code of a user
        message = "(its message cannot be read)"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def describe_exception(error: BaseException) -> str:
    """Formats type, message and place of an exception on one line.

    The place is the last line outside of Python's library and of installed packages, if there is one.
    """
    text = " ".join(describe_error(error).split())
    if isinstance(error, SyntaxError):  # its message names the place
        return text
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].filename.startswith("<frozen"):
        return text
    installed = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib"))
    frame = ([one for one in frames if not one.filename.startswith(installed)] or frames)[-1]
    return f"{text} ({os.path.basename(frame.filename)}:{frame.lineno})"
