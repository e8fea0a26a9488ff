"""Resolves `run_dir` to run folders, and loads saved settings, raw or as `Config`."""

from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from yaml import CSafeLoader

from config.cli.composition import schema, to_config
from config.run_folder.checkpoints import CHECKPOINTS_FOLDER
from config.run_folder.folders import SETTINGS, SETTINGS_FILES
from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.former_names import with_new_settings

METRICS = "metrics.jsonl"
_schema = cache(schema)


def saved_config(run_dir: Path, changes: list[str] | None = None) -> Config:
    """Returns the checked config of the run in a folder.

    Later calls return the same object: callers must not change the config.
    changes: overrides of the saved settings, such as `policy.kl_coef=0.1`.

    Raises:
        ConfigError: the folder has no settings, or settings of another version of this code.
    """
    if saved_settings(run_dir) is None:
        raise ConfigError(
            f"{run_dir}: the folder has no settings of a run ({_file(run_dir)} is missing); name the folder of a run"
        )
    return _load_config(_file(run_dir).read_text(encoding="utf-8"), tuple(changes or ()))


def saved_settings(run_dir: Path) -> DictConfig | None:
    """Returns the settings that Hydra composed for the run; None where no file exists.

    The settings may come from another version of this code. Later calls return the same object: callers must
    not change the settings.

    Raises:
        ConfigError: the file is no mapping.
    """
    path = _file(run_dir)
    if not path.is_file():
        return None
    settings = _parse_settings(path.read_text(encoding="utf-8"))
    if not isinstance(settings, DictConfig):
        raise ConfigError(
            f"{path}: the settings of a run must be keys and values, but the file holds a list; name the "
            "folder of a run"
        )
    return settings


def _file(run_dir: Path) -> Path:
    return run_dir / SETTINGS / SETTINGS_FILES[0]


@lru_cache(maxsize=8)
def _load_config(settings: str, changes: tuple[str, ...]) -> Config:
    """Merges saved settings and changes into a checked config, with a cache.

    A report loads the same settings twice.
    """
    composed = OmegaConf.merge(_schema(), _parse_settings(settings), OmegaConf.from_dotlist(list(changes)))
    return to_config(composed)  # type: ignore[arg-type]


@lru_cache(maxsize=8)
def _parse_settings(settings: str) -> DictConfig | ListConfig:
    """Parses settings with libyaml.

    libyaml reads everything that OmegaConf writes, faster than OmegaConf's own loader.
    """
    saved = yaml.load(settings, Loader=CSafeLoader)
    return OmegaConf.create(with_new_settings(saved) if isinstance(saved, dict) else saved)


def chosen_runs(run_dir_setting: Any) -> list[Path]:
    """Returns the run folders that `run_dir=` names; unset, the folder of the newest run.

    Raises:
        ConfigError: a folder is not a run's folder, or there is no run.
    """
    if run_dir_setting is None:
        runs = _runs()
        if not runs:
            raise ConfigError("run_dir: no run was found here; name the folder of a run, run_dir=FOLDER")
        return runs[:1]
    folders = [
        Path(name) for name in (run_dir_setting if isinstance(run_dir_setting, list | tuple) else [run_dir_setting])
    ]
    for folder in folders:
        if not is_run(folder):
            newest = ", ".join(map(str, _runs()[:3]))
            hint = (
                f"choose one of the newest runs here: {newest}"
                if newest
                else "no run was found here; name the folder of a run"
            )
            raise ConfigError(f"run_dir={folder}: not the folder of a run ({METRICS} is missing); {hint}")
    return folders


def chosen_run(run_dir_setting: Any) -> Path:
    """Returns the one run folder that `run_dir=` names; see `chosen_runs`."""
    folders = chosen_runs(run_dir_setting)
    if len(folders) > 1:
        raise ConfigError(f"run_dir={','.join(map(str, folders))}: several folders; name the folder of one run")
    return folders[0]


def is_run(folder: Path) -> bool:
    return (folder / METRICS).is_file() or (folder / CHECKPOINTS_FOLDER).is_dir()


def _runs() -> list[Path]:
    """Returns the run folders below the current folder, newest first."""
    folders = (*Path().glob("outputs/*/*"), *Path().glob("multirun/*/*/*"))
    runs = [folder for folder in folders if is_run(folder)]
    return sorted(runs, key=lambda folder: folder.stat().st_mtime, reverse=True)
