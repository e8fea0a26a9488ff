"""Lists a package's modules as values of a configuration key, and loads one on use.

    NAME.py in the folder ─▶ KEY=NAME is accepted ─▶ an attribute of the module is loaded on use

The check of a name lists the files and imports none of them.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from config.schema.values import check_choice


@dataclass(frozen=True)
class Registry:
    """The modules of a package that define `attribute`.

    key: the configuration key whose values are the module names. package: a package whose `__init__.py` imports
    nothing.
    """

    key: str
    package: str
    attribute: str

    @property
    def names(self) -> tuple[str, ...]:
        """Sorted names of the modules."""
        return _module_names(tuple(import_module(self.package).__path__))

    def check(self, value: object, *extra_choices: str) -> None:
        """Raises ConfigError unless `value` is a registered name or one of `extra_choices`."""
        check_choice(self.key, value, (*extra_choices, *self.names))

    def load(self, name: str) -> Any:
        """Imports the module `name` and returns its attribute."""
        return getattr(import_module(f"{self.package}.{name}"), self.attribute)


@cache
def _module_names(path: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(module.name for module in iter_modules(path)))
