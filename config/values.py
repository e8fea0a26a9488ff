"""Checks of single values: one of the known ones, large enough, or what else a rule says. All raise ConfigError.

A value that is unset (None) keeps to every rule.
"""

from collections.abc import Callable, Iterable
from typing import Any

from config.errors import ConfigError


def one_of(place: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{place}={value!r}: choose one of {', '.join(known)}")


def at_least(place: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{place}={value}: must be at least {least}")


def check_fields(
    section: str, config: object, keys: Iterable[str], holds: Callable[[Any], bool], rule: str
) -> None:
    """Fields of a section against `holds`, which is `rule` in words."""
    for key in keys:
        value = vars(config)[key]
        if value is not None and not holds(value):
            raise ConfigError(f"{section}.{key}={value}: {rule}")


def above_0(value: float) -> bool:
    return value > 0


def is_share(value: float) -> bool:
    return 0 <= value <= 1
