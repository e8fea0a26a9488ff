"""Composes configs as Hydra does, with a cache of the merged files and groups.

Most tests differ only in single values, which are applied to a copy of the cached config.
"""

import pickle
import re
from functools import cache

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from config.cli.composition import CONFIG_DIR, register_schema

VALUE = re.compile(r"(?!hydra\.)\w+(\.\w+)+=")
"""Override of an existing dotted key. Hydra chooses config groups, which have no dots, before it sets
values."""


def compose_config(name: str, *overrides: str) -> DictConfig:
    """Composes `--config-name NAME OVERRIDES` as in a script, without Hydra's own settings."""
    values = [override for override in overrides if VALUE.match(override)]
    group_overrides = tuple(override for override in overrides if override not in values)
    config: DictConfig = pickle.loads(_pickled_config(name, group_overrides))
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(values), config)
    return config


@cache
def _pickled_config(name: str, group_overrides: tuple[str, ...]) -> bytes:
    """Composes and pickles a config; unpickling is a faster copy than `deepcopy`."""
    register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        return pickle.dumps(compose(name, overrides=list(group_overrides)))
