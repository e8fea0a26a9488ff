"""Rebuilds exceptions of the program's process in the tests' process, and the reverse.

An exception crosses as its message and the names of its class and base classes. Standard library only, because
the module runs inside the sandbox.
"""

import builtins
import sys
from collections.abc import Sequence
from typing import Any

CATCHABLE_MODULES = (
    *("_csv", "_pickle", "_queue", "asyncio.exceptions", "binascii", "concurrent.futures._base"),
    *("configparser", "copy", "dataclasses", "decimal", "graphlib", "ipaddress", "json.decoder"),
    *("queue", "re", "statistics", "struct", "subprocess", "zlib"),
)
"""Modules whose exceptions arrive as their own class. Exceptions that skip a test must not be among them."""
ITERATION_EXCEPTIONS = ("StopIteration", "StopAsyncIteration", "GeneratorExit")
"""Exceptions that would end a loop of the tests early and let it pass; they arrive as another class."""

Lineage = Sequence[Sequence[str]]
"""Module and name of a class and of its base classes, the class itself first."""


class UnknownRemoteException(Exception):
    """An exception of the other process whose class has no known name."""


def class_lineage(cls: type) -> list[list[str]]:
    """Returns module and name of a class and its base classes."""
    return [[each.__module__, each.__name__] for each in cls.__mro__ if each is not object]


def resolve_exception_class(names: Lineage, created_classes: dict[str, type]) -> Any:
    """Returns this process's exception class for `names`, or creates one class per name.

    created_classes: classes created by earlier calls, by name.
    """
    if not names:
        return UnknownRemoteException
    (module, name), *rest = names
    if name not in ITERATION_EXCEPTIONS and (
        module == "builtins" or (module in CATCHABLE_MODULES and module in sys.modules)
    ):
        candidate = vars(builtins if module == "builtins" else sys.modules[module]).get(name)
        if isinstance(candidate, type) and issubclass(candidate, BaseException):
            return candidate
    if name not in created_classes:
        created_classes[name] = type(
            str(name), (resolve_exception_class(rest, created_classes),), {"__getattr__": _original_attribute}
        )
    return created_classes[name]


def _original_attribute(error: Any, name: str) -> Any:
    """Reads another attribute than the message from the original exception in the program's process."""
    original = vars(error).get("original")
    if original is None:
        raise AttributeError(name)
    return getattr(original, name)


def build_exception(
    names: Lineage, message: str, created_classes: dict[str, type], original: Any = None
) -> BaseException:
    """Builds an exception of this process for an exception of the other process.

    original: proxy of the original exception, for attributes of a created class.
    """
    cls = resolve_exception_class(names, created_classes)
    try:
        error = cls(message)
    except TypeError:  # UnicodeDecodeError and the like take more than a message
        error = cls.__new__(cls, message)
    if cls in created_classes.values():
        error.original = original
    return error  # type: ignore[no-any-return]
