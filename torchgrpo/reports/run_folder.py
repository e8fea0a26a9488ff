"""Reads the files of a run's folder except the ledger."""

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
from torchgrpo.monitoring.tracker_interface import iterate_dotted

Row = dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """Metrics, evaluations, events, settings and summary of one run.

    steps: a row of metrics for each optimizer step. evaluations: a row of metrics for each evaluation.
    settings: all keys of the composed config, dotted. overrides: arguments of the command line.
    summary: content of summary.json; empty for a running or killed run.
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
        """Reads the present files of a run.

        Raises:
            ConfigError: the folder has no metrics of a run.
        """
        if not (path / METRICS).is_file():
            raise ConfigError(
                f"run_dir={path}: this is not the folder of a run ({METRICS} is missing); name the folder of a run"
            )
        rows = MetricsFile(path / METRICS).read_rows()
        return cls(
            path,
            [row for row in rows if "reward/mean" in row],
            [row for row in rows if "reward/mean" not in row],
            read_events(path),
            read_settings(path),
            read_overrides(path),
            read_summary(path),
        )

    @property
    def name(self) -> str:
        """Last two parts of the path, by default a date and a time."""
        return "/".join(self.path.resolve().parts[-2:])

    @property
    def command(self) -> str:
        """Command line of the run, quoted for a shell."""
        overlapped = any(event.get("overlapped") for event in self.events)
        words = ["python", "grpo_async.py" if overlapped else "grpo.py"]
        file = self.path / SETTINGS / "hydra.yaml"
        name = OmegaConf.select(OmegaConf.load(file), "hydra.job.config_name") if file.is_file() else None
        words += ["--config-name", str(name)] if name else []
        return " ".join(shlex.quote(word) for word in [*words, *self.overrides])

    def changed_settings(self) -> list[tuple[str, Any, Any]]:
        """Returns (key, value, default) of each setting that differs from its default.

        The default of a free key, such as a key of `env.options`, is empty.
        """
        defaults = dotted_settings(asdict(Config()))
        return [
            (key, value, defaults.get(key, "")) for key, value in self.settings.items() if value != defaults.get(key)
        ]


def read_settings(path: Path) -> dict[str, Any]:
    """Returns the composed config with dotted keys.

    The config is not validated, so runs of other versions can be read too.
    """
    settings = saved_settings(path)
    if settings is None:
        return {}
    composed = OmegaConf.to_container(settings, resolve=True)
    return dotted_settings(composed) if isinstance(composed, dict) else {}


def read_overrides(path: Path) -> list[str]:
    """Returns the arguments of the command line that set a key."""
    file = path / SETTINGS / "overrides.yaml"
    words = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else []
    return [str(word) for word in words] if isinstance(words, list) else []


def read_summary(path: Path) -> dict[str, Any]:
    """Returns the content of summary.json; empty if there is no such file."""
    file = path / SUMMARY
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def dotted_settings(settings: dict[Any, Any]) -> dict[str, Any]:
    """Flattens nested settings: {"a": {"b": 1}} becomes {"a.b": 1}."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in iterate_dotted(settings)}
