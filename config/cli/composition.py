"""The way from what Hydra composed to a checked `Config`: unknown keys are refused, however they were added."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from config.cli.error_messages import NOT_ON_BASE, unknown_key
from config.schema.checks import check
from config.schema.config import Config
from config.schema.errors import ConfigError

CONFIG_DIR = Path(__file__).parents[1]


@cache
def register_schema() -> None:
    """Makes the dataclasses known to Hydra under the names that the YAML `defaults` lists use."""
    ConfigStore.instance().store(name="schema", node=schema())
    # Hydra copies its sources of configs to search them, with this store, which a process has one of and which gives
    # out copies: for `--help` 67 times, half a second.
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]


def schema() -> DictConfig:
    """The dataclasses with their defaults, to put settings on top of."""
    made: DictConfig = OmegaConf.structured(Config)
    _open_free_keys(made)
    return made


def _open_free_keys(section: DictConfig) -> None:
    """Plain dictionaries (`env.options`, `eval.sets`, ...) take new keys on the command line without a `+`."""
    for key in section:
        value = section._get_node(key)
        if isinstance(value, DictConfig):
            if OmegaConf.get_type(value) is dict:
                value._set_flag("struct", False)
            _open_free_keys(value)


def to_config(composed: DictConfig) -> Config:
    """A composed Hydra config as a checked `Config`.

    Hydra takes any key behind a `+` or `++`, and a config without `base` is of no type at all.

    Raises:
        ConfigError: not built on the schema, a key that no dataclass has, a missing value or a contradiction.
    """
    if OmegaConf.get_type(composed) is not Config:
        raise ConfigError(NOT_ON_BASE)
    unknown = list(_unknown_keys(OmegaConf.to_container(composed), Config))
    if unknown:
        raise ConfigError("\n".join(map(unknown_key, unknown)))
    missing = sorted(key for key in OmegaConf.missing_keys(composed) if not key.startswith("hydra"))
    if missing:
        raise ConfigError(f"{', '.join(missing)}: no value; give it on the command line or in the YAML file")
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    config.derive()
    check(config)
    return config


def _unknown_keys(given: Any, section: type[Any] | None, prefix: str = "") -> Iterator[str]:
    """Dotted keys down to the values that no dataclass has. Plain dictionaries (`env.options`, ...) hold any key.

    section: None, where nothing is known.
    """
    known = {} if section is None else {field.name: field.type for field in fields(section)}
    for name, value in given.items():
        kind = known.get(name)
        if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
            yield from _unknown_keys(value, kind, f"{prefix}{name}.")
        elif name not in known and isinstance(value, dict) and value:
            yield from _unknown_keys(value, None, f"{prefix}{name}.")
        elif name not in known:
            yield f"{prefix}{name}"
