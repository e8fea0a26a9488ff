"""The tracker `tensorboard`: TensorBoard through TorchRL's logger."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import yaml

from config.schema.errors import RunOutcome
from torchgrpo.monitoring.tracker_interface import COLUMNS, OpenTracker, ShownCompletion


class TensorBoard:
    """TensorBoard through TorchRL's logger; completions and settings are texts."""

    def __init__(self, run_dir: Path, title: str, config: dict[str, Any]) -> None:
        from torchrl.record.loggers import get_logger

        self.logger: Any = get_logger("tensorboard", logger_name=str(run_dir), experiment_name=title)
        settings = yaml.safe_dump(config, sort_keys=False)
        self.logger.experiment.add_text("config", "\n".join(f"    {line}" for line in settings.splitlines()))

    def metrics(self, numbers: Mapping[str, float], step: int) -> None:
        self.logger.log_metrics(dict(numbers), step=step)

    def completions(self, shown: Sequence[ShownCompletion], step: int) -> None:
        rows = [COLUMNS, ["---"] * len(COLUMNS), *([step, *astuple(one)] for one in shown)]
        table = "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in rows)
        self.logger.experiment.add_text("completions", table, global_step=step)
        self.logger.flush()

    def close(self, outcome: RunOutcome) -> None:
        self.logger.close()


def _cell(value: object) -> str:
    """A cell of a Markdown table, in which a completion's marks are its own characters."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    marks = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "`": "&#96;", "*": "&#42;"})
    return "<br>".join(text.translate(marks).splitlines())


OPEN = OpenTracker(
    "tensorboard", lambda logging, run_dir, title, config, tell: TensorBoard(run_dir, title, config)
)
