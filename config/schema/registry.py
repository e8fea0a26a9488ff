"""Registered names: one file of a folder for each, whose list is the check of the configuration key.

    NAME.py in the folder ─▶ KEY=NAME is accepted ─▶ its attribute is loaded where it is used

Checking a name lists files and imports none of them.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from config.schema.errors import ConfigError


@dataclass(frozen=True)
class Registry:
    """The modules of a package, each of which defines `attribute`.

    key: the configuration key that takes their names. package: a folder whose `__init__.py` imports nothing.
    """

    key: str
    package: str
    attribute: str

    @property
    def names(self) -> tuple[str, ...]:
        """Registered names, sorted."""
        return _module_names(tuple(import_module(self.package).__path__))

    def check(self, value: object, *others: str) -> None:
        """Raise ConfigError for a value that is no registered name and none of `others`."""
        known = (*others, *self.names)
        if value not in known:
            raise ConfigError(f"{self.key}={value!r}: choose one of {', '.join(known)}")

    def load(self, name: str) -> Any:
        """The attribute of the module of this name, which is imported now."""
        return getattr(import_module(f"{self.package}.{name}"), self.attribute)


@cache
def _module_names(path: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(module.name for module in iter_modules(path)))
