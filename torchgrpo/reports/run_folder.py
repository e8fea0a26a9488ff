"""What a run's folder says without its ledger: rows of metrics, evaluations, events, settings, the summary."""

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from config.cli.saved_settings import METRICS, saved_settings
from config.run_folder.folders import SETTINGS, SUMMARY
from config.schema.config import Config
from config.schema.errors import ConfigError
from torchgrpo.monitoring.events import read_events
from torchgrpo.monitoring.metrics_file import MetricsFile
from torchgrpo.monitoring.tracker_interface import flat

Row = dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """One run as its files tell of it.

    steps: a row for each optimizer step. evaluations: a row for each time that sets were evaluated.
    settings: every key of the config as it was composed, dotted. overrides: the words of the command line.
    summary: how it ended; empty while it runs, and where it was killed.
    """

    path: Path
    steps: list[Row]
    evaluations: list[Row]
    events: list[Row]
    settings: dict[str, Any]
    overrides: list[str]
    summary: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "RunFolder":
        """Whatever is there of a run.

        Raises:
            ConfigError: no run has written to the folder.
        """
        if not (path / METRICS).is_file():
            raise ConfigError(
                f"run_dir={path}: no run has been here ({METRICS} is missing); name the folder of a run"
            )
        rows = MetricsFile(path / METRICS).rows()
        return cls(
            path,
            [row for row in rows if "reward/mean" in row],
            [row for row in rows if "reward/mean" not in row],
            read_events(path),
            settings_of(path),
            overrides_of(path),
            summary_of(path),
        )

    @property
    def name(self) -> str:
        """The last two parts of its path: a date and a time where nobody chose another."""
        return "/".join(self.path.resolve().parts[-2:])

    @property
    def command(self) -> str:
        """The command line, as a shell takes it."""
        overlapped = any(event.get("overlapped") for event in self.events)
        words = ["python", "grpo_async.py" if overlapped else "grpo.py"]
        file = self.path / SETTINGS / "hydra.yaml"
        name = OmegaConf.select(OmegaConf.load(file), "hydra.job.config_name") if file.is_file() else None
        words += ["--config-name", str(name)] if name else []
        return " ".join(shlex.quote(word) for word in [*words, *self.overrides])

    def differences(self) -> list[tuple[str, Any, Any]]:
        """(key, value, default) of every setting that is not the default; the default of a free key is empty."""
        given = dotted(asdict(Config()))
        return [
            (key, value, given.get(key, ""))
            for key, value in self.settings.items()
            if value != given.get(key)
        ]


def settings_of(path: Path) -> dict[str, Any]:
    """The composed config, dotted; as it was written, so that a run of another version can be read too."""
    settings = saved_settings(path)
    if settings is None:
        return {}
    composed = OmegaConf.to_container(settings, resolve=True)
    return dotted(composed) if isinstance(composed, dict) else {}


def overrides_of(path: Path) -> list[str]:
    """The words of the command line that set something."""
    file = path / SETTINGS / "overrides.yaml"
    words = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else []
    return [str(word) for word in words] if isinstance(words, list) else []


def summary_of(path: Path) -> dict[str, Any]:
    """How the run ended; empty where that is not known."""
    file = path / SUMMARY
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def dotted(settings: dict[Any, Any]) -> dict[str, Any]:
    """Dotted keys down to what is no section: {"a": {"b": 1}} is {"a.b": 1}."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in flat(settings)}
