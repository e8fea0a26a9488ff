"""Exceptions that cross between two processes, by the names of their classes and of those that these derive from.

Standard library only: this runs inside the sandbox.
"""

import builtins
import sys
from collections.abc import Sequence
from typing import Any

CATCHABLE = (
    *("_csv", "_pickle", "_queue", "asyncio.exceptions", "binascii", "concurrent.futures._base"),
    *("configparser", "copy", "dataclasses", "decimal", "graphlib", "ipaddress", "json.decoder"),
    *("queue", "re", "statistics", "struct", "subprocess", "zlib"),
)
"""Modules whose exceptions arrive as themselves. Those by which a test says that it was skipped must not."""
ENDINGS = ("StopIteration", "StopAsyncIteration", "GeneratorExit")
"""Exceptions by which a loop of the tests ends early, and passes: they arrive as others."""

Lineage = Sequence[Sequence[str]]
"""Module and name of a class and of those that it derives from, itself first."""


class FromOutside(Exception):
    """An exception of the other side of which nothing is known here."""


def lineage(cls: type) -> list[list[str]]:
    return [[each.__module__, each.__name__] for each in cls.__mro__ if each is not object]


def exception_class(names: Lineage, made: dict[str, type]) -> Any:
    """The class of this side, or one that is made, once for each name, for it.

    made: those that were made before, by their names.
    """
    if not names:
        return FromOutside
    (module, name), *rest = names
    if name not in ENDINGS and (module == "builtins" or (module in CATCHABLE and module in sys.modules)):
        found = vars(builtins if module == "builtins" else sys.modules[module]).get(name)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
    if name not in made:
        made[name] = type(str(name), (exception_class(rest, made),), {"__getattr__": _of_original})
    return made[name]


def _of_original(error: Any, name: str) -> Any:
    """What an exception of the program has besides its message: asked there."""
    original = vars(error).get("original")
    if original is None:
        raise AttributeError(name)
    return getattr(original, name)


def exception(names: Lineage, message: str, made: dict[str, type], original: Any = None) -> BaseException:
    """original: what stands for the exception itself, for attributes of a class that is not of this side."""
    cls = exception_class(names, made)
    try:
        error = cls(message)
    except TypeError:  # UnicodeDecodeError and the like take more than a message
        error = cls.__new__(cls, message)
    if cls in made.values():
        error.original = original
    return error  # type: ignore[no-any-return]
