"""Checks of single values, and of a section that is given in plain dictionaries. All raise ConfigError.

A value that is unset (None) keeps to every rule.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.schema.errors import ConfigError

Section = TypeVar("Section")


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


def is_size(value: float) -> bool:
    return 0 < value < math.inf


def is_share(value: float) -> bool:
    return 0 <= value <= 1


def section_of(kind: type[Section], given: Mapping[str, Any], place: str) -> Section:
    """A dataclass of what stands at `place` in plain dictionaries, each value in the type of its field."""
    try:
        made = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), given))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{place}.{error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(made, kind)
    return made
