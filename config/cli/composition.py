"""Registers the config schema with Hydra, and converts composed configs to checked `Config` objects.

Keys that no dataclass has are rejected.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from config.cli.error_messages import NOT_ON_BASE, unknown_key_message
from config.schema.checks import check_config
from config.schema.config import Config
from config.schema.errors import ConfigError

CONFIG_DIR = Path(__file__).parents[1]


@cache
def register_schema() -> None:
    """Registers the dataclasses with Hydra under the name that the YAML `defaults` lists use."""
    ConfigStore.instance().store(name="schema", node=schema())
    # Hydra deep-copies its config sources, and with them this store, for every search. The store is a singleton and
    # returns copies itself, so that the copies of it are not needed.
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]


def schema() -> DictConfig:
    """Returns the dataclasses with their defaults as a config to merge settings into."""
    node: DictConfig = OmegaConf.structured(Config)
    _open_free_keys(node)
    return node


def _open_free_keys(section: DictConfig) -> None:
    """Lets plain dictionaries (`env.options`, `eval.sets`, ...) take new keys without a `+`."""
    for key in section:
        value = section._get_node(key)
        if isinstance(value, DictConfig):
            if OmegaConf.get_type(value) is dict:
                value._set_flag("struct", False)
            _open_free_keys(value)


def to_config(composed_config: DictConfig) -> Config:
    """Returns a composed Hydra config as a checked `Config`.

    Raises:
        ConfigError: the config is not built on the schema, has an unknown key, lacks a value or contradicts itself.
    """
    if OmegaConf.get_type(composed_config) is not Config:
        raise ConfigError(NOT_ON_BASE)
    unknown = list(_unknown_keys(OmegaConf.to_container(composed_config), Config))
    if unknown:
        raise ConfigError("\n".join(map(unknown_key_message, unknown)))
    missing = sorted(key for key in OmegaConf.missing_keys(composed_config) if not key.startswith("hydra"))
    if missing:
        raise ConfigError(f"{', '.join(missing)}: no value; set a value on the command line or in the YAML file")
    config = OmegaConf.to_object(composed_config)
    assert isinstance(config, Config)
    config.derive_fields()
    check_config(config)
    return config


def _unknown_keys(settings: Any, section: type[Any] | None, prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of values that no dataclass has.

    Plain dictionaries (`env.options`, ...) accept any key.
    section: the dataclass of `settings`; None below an unknown key.
    """
    known = {} if section is None else {field.name: field.type for field in fields(section)}
    for name, value in settings.items():
        kind = known.get(name)
        if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
            yield from _unknown_keys(value, kind, f"{prefix}{name}.")
        elif name not in known and isinstance(value, dict) and value:
            yield from _unknown_keys(value, None, f"{prefix}{name}.")
        elif name not in known:
            yield f"{prefix}{name}"
