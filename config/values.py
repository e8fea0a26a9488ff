"""Checks of single values: one of the known ones, or large enough."""

from config.errors import ConfigError


def one_of(place: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{place}={value!r}: choose one of {', '.join(known)}")


def at_least(place: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(f"{place}={value}: must be at least {least}")
