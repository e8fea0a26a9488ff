"""The settings of a run, from its folder to a checked `Config`."""

from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from yaml import CSafeLoader

from config.cli.composition import schema, to_config
from config.run_folder.checkpoints import FOLDER
from config.run_folder.folders import SETTINGS, SETTINGS_FILES
from config.schema.config import Config
from config.schema.errors import ConfigError

METRICS = "metrics.jsonl"
_schema = cache(schema)


def saved_config(run_dir: Path, changes: list[str] | None = None) -> Config:
    """The config of the run in a folder; do not change it, for later calls return the same object.

    changes: settings such as `policy.kl_coef=0.1`, on top of it.

    Raises:
        ConfigError: the folder holds none, or one of another version of this code.
    """
    if saved_settings(run_dir) is None:
        raise ConfigError(f"{run_dir}: no run has left its settings there ({_file(run_dir)} is missing)")
    return _checked(_file(run_dir).read_text(encoding="utf-8"), tuple(changes or ()))


def saved_settings(run_dir: Path) -> DictConfig | None:
    """The settings that Hydra composed for the run, as written; None where there are none.

    They may be of another version of this code. Do not change them: later calls return the same object.

    Raises:
        ConfigError: the file holds something else.
    """
    path = _file(run_dir)
    if not path.is_file():
        return None
    settings = _parsed(path.read_text(encoding="utf-8"))
    if not isinstance(settings, DictConfig):
        raise ConfigError(f"{path}: keys and values are wanted here, this is a list; it is no run's file")
    return settings


def _file(run_dir: Path) -> Path:
    return run_dir / SETTINGS / SETTINGS_FILES[0]


@lru_cache(maxsize=8)
def _checked(settings: str, changes: tuple[str, ...]) -> Config:
    """A report asks for the same twice."""
    composed = OmegaConf.merge(_schema(), _parsed(settings), OmegaConf.from_dotlist(list(changes)))
    return to_config(composed)  # type: ignore[arg-type]


@lru_cache(maxsize=8)
def _parsed(settings: str) -> DictConfig | ListConfig:
    """Parse by libyaml: all that OmegaConf writes, and faster than its own loader."""
    return OmegaConf.create(yaml.load(settings, Loader=CSafeLoader))


def chosen_runs(given: Any) -> list[Path]:
    """The folders that `run_dir=` names, one or several; where it names none, that of the newest run.

    Raises:
        ConfigError: one of them is no run's folder, or there is none.
    """
    if given is None:
        runs = _runs()
        if not runs:
            raise ConfigError("run_dir: no run has been made here; name the folder of one: run_dir=FOLDER")
        return runs[:1]
    folders = [Path(name) for name in (given if isinstance(given, list | tuple) else [given])]
    for folder in folders:
        if not is_run(folder):
            newest = ", ".join(map(str, _runs()[:3]))
            found = f"the newest runs here: {newest}" if newest else "there is none here"
            raise ConfigError(f"run_dir={folder}: no run's folder (there is no {METRICS}); {found}")
    return folders


def chosen_run(given: Any) -> Path:
    """Choose one run, as `chosen_runs` does."""
    folders = chosen_runs(given)
    if len(folders) > 1:
        raise ConfigError(f"run_dir={','.join(map(str, folders))}: one run's folder is wanted here")
    return folders[0]


def is_run(folder: Path) -> bool:
    return (folder / METRICS).is_file() or (folder / FOLDER).is_dir()


def _runs() -> list[Path]:
    """Runs below the current folder, the newest first."""
    places = (*Path().glob("outputs/*/*"), *Path().glob("multirun/*/*/*"))
    found = [folder for folder in places if is_run(folder)]
    return sorted(found, key=lambda folder: folder.stat().st_mtime, reverse=True)
