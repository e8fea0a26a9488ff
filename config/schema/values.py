"""Checks single config values, and builds a section's dataclass from a plain dictionary.

An unset value (None) passes every check.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.schema.errors import ConfigError
from config.schema.former_names import new_value_of

Section = TypeVar("Section")


def check_choice(place: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        if new := new_value_of(place, value):
            raise ConfigError(f"{place}={value}: the value is now called {new}; set {place}={new}")
        raise ConfigError(f"{place}={value!r}: choose one of {', '.join(choices)}")


def check_minimum(place: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{place}={value}: must be at least {least}")


def check_fields(section: str, config: object, keys: Iterable[str], is_valid: Callable[[Any], bool], rule: str) -> None:
    """Raises ConfigError for a field of a section that fails the predicate `is_valid`.

    rule: the predicate in words, for the message.
    """
    for key in keys:
        value = vars(config)[key]
        if value is not None and not is_valid(value):
            raise ConfigError(f"{section}.{key}={value}: {rule}")


def is_positive(value: float) -> bool:
    return value > 0


def is_positive_finite(value: float) -> bool:
    return 0 < value < math.inf


def is_share(value: float) -> bool:
    return 0 <= value <= 1


def build_section(kind: type[Section], settings: Mapping[str, Any], place: str) -> Section:
    """Builds a section's dataclass from a plain dictionary.

    Values are converted to the types of the fields. place: the dotted key of the section, for error messages.

    Raises:
        ConfigError: a key is unknown, or a value cannot be converted.
    """
    try:
        section = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), settings))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{place}.{error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(section, kind)
    return section
