"""Code of the user's own, named `module:name`: a reward, a task or a tool. No torch here."""

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


def is_own(name: str) -> bool:
    """Whether a name is `module:name`, and not one of those that this project knows."""
    return ":" in name


@cache
def load_own(key: str, path: str) -> Any:
    """The function or class that `path` (module:name) names; modules of the current folder are found.

    Args:
        key: the configuration key that holds `path`, for messages.

    Raises:
        ConfigError: the module does not import, has no such name, or an installed one hides that of the current folder.
    """
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    _check_hidden(key, path, module_name)
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


def _check_hidden(key: str, path: str, module_name: str) -> None:
    """Refuse a module of the current folder whose first name is one of Python, a package or this project."""
    parts = module_name.split(".")
    mine = next(
        (one for one in (Path(*parts).with_suffix(".py"), Path(*parts, "__init__.py")) if one.is_file()), None
    )
    spec = find_spec(parts[0]) if mine is not None else None
    if mine is None or spec is None or spec.origin is None:
        return
    origin = Path(spec.origin).resolve()
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib")]
    hiding = [Path(__file__).resolve().parents[1], *(Path(path).resolve() for path in installed)]
    if not origin.is_relative_to(Path.cwd().resolve()) and any(map(origin.is_relative_to, hiding)):
        raise ConfigError(
            f"{key}={path}: {mine.absolute()} is hidden by {parts[0]!r} of {origin}; give your file another name"
        )


def described(error: BaseException) -> str:
    """Type, message and place of an exception, in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):  # says its place itself
        return text
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].filename.startswith("<frozen"):
        return text
    return f"{text} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
