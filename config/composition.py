"""The check of a composed config against the dataclasses: unknown keys are refused, however they were added."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from config.errors import ConfigError
from config.messages import NOT_ON_BASE, unknown_key


def check_composed(composed: DictConfig, schema: type[Any]) -> None:
    """Hydra takes any key behind a `+` or `++`, and a config without `base` is of no type at all.

    Raises:
        ConfigError: a key that no dataclass has, or a config that is not built on the schema.
    """
    if OmegaConf.get_type(composed) is not schema:
        raise ConfigError(NOT_ON_BASE)
    unknown = list(unknown_keys(composed))
    if unknown:
        raise ConfigError("\n".join(unknown_key(key) for key in unknown))


def known_names(schema: type[Any]) -> set[str]:
    """The fields of one dataclass."""
    return {field.name for field in fields(schema)}


def unknown_keys(section: DictConfig, prefix: str = "") -> Iterator[str]:
    """Dotted keys down to the values that no dataclass has. Plain dictionaries (`env.options`, ...) hold any key."""
    kind = OmegaConf.get_type(section)
    known = known_names(kind) if is_dataclass(kind) else None
    for name in map(str, section):
        value = section._get_node(name)
        inner = value if isinstance(value, DictConfig) and _has_keys(value) else None
        if known is not None and name not in known:
            yield from _leaves(inner, f"{prefix}{name}")
        elif inner is not None and is_dataclass(OmegaConf.get_type(inner)):
            yield from unknown_keys(inner, f"{prefix}{name}.")


def _leaves(section: DictConfig | None, key: str) -> Iterator[str]:
    if section is None:
        yield key
        return
    for name in map(str, section):
        value = section._get_node(name)
        yield from _leaves(
            value if isinstance(value, DictConfig) and _has_keys(value) else None, f"{key}.{name}"
        )


def _has_keys(section: DictConfig) -> bool:
    return (
        not (section._is_none() or section._is_missing() or section._is_interpolation()) and len(section) > 0
    )
