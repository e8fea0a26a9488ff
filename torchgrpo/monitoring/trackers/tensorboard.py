"""Tracker `tensorboard`: sends metrics to TensorBoard through TorchRL's logger."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import yaml

from config.schema.errors import RunOutcome
from torchgrpo.monitoring.tracker_interface import COLUMNS, CompletionRow, TrackerFactory


class TensorBoard:
    """One TensorBoard run; completions and settings are logged as texts."""

    def __init__(self, run_dir: Path, title: str, config: dict[str, Any]) -> None:
        from torchrl.record.loggers import get_logger

        self.logger: Any = get_logger("tensorboard", logger_name=str(run_dir), experiment_name=title)
        settings = yaml.safe_dump(config, sort_keys=False)
        self.logger.experiment.add_text("config", "\n".join(f"    {line}" for line in settings.splitlines()))

    def metrics(self, numbers: Mapping[str, float], step: int) -> None:
        self.logger.log_metrics(dict(numbers), step=step)

    def completions(self, rows: Sequence[CompletionRow], step: int) -> None:
        lines = [COLUMNS, ["---"] * len(COLUMNS), *([step, *astuple(row)] for row in rows)]
        table = "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)
        self.logger.experiment.add_text("completions", table, global_step=step)
        self.logger.flush()

    def close(self, outcome: RunOutcome) -> None:
        self.logger.close()


def _cell(value: object) -> str:
    """Returns a value as a cell of a Markdown table, with markup escaped."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    marks = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "`": "&#96;", "*": "&#42;"})
    return "<br>".join(text.translate(marks).splitlines())


FACTORY = TrackerFactory(
    "tensorboard", lambda logging, run_dir, title, config, on_message: TensorBoard(run_dir, title, config)
)
