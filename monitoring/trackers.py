"""Where metrics go: always `metrics.jsonl` in the run folder, and the tracker that `logging.backend` names."""

import json
import logging as python_logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl.record.loggers import Logger, WandbLogger, get_logger

from config.files import written_whole
from config.outcome import RunOutcome
from config.schema import LoggingConfig

log = python_logging.getLogger("grpo")
REACH_S = 12.0
"""How long W&B may take to ask for a key, and to answer; its own default is 90."""


@dataclass
class MetricsFile:
    """One JSON object a line, one line an optimizer step, flushed as it is written."""

    path: Path

    def append(self, row: dict[str, Any]) -> None:
        size = self.path.stat().st_size if self.path.is_file() else 0
        try:
            with self.path.open("ab") as file:
                file.write((json.dumps(row) + "\n").encode())
        except OSError:
            os.truncate(self.path, size)  # a disk that is full took half a line
            raise

    def rows(self) -> list[dict[str, Any]]:
        """Every row that can be read."""
        return self.read()[0]

    def read(self) -> tuple[list[dict[str, Any]], list[int]]:
        """The rows, and the numbers (from 1) of the lines that are none: a crash or a full disk may leave some.

        A last line without an end is not counted among them: it was being written.
        """
        if not self.path.is_file():
            return [], []
        *lines, last = self.path.read_bytes().split(b"\n")
        rows, broken = [], []
        for number, line in enumerate([*lines, last], start=1):
            row = _row(line)
            if row is not None:
                rows.append(row)
            elif number <= len(lines):
                broken.append(number)
        return rows, broken

    def continue_from(self, run_dir: Path, optimizer_steps: int) -> list[str]:
        """Start with the rows that the run in `run_dir` (or this one, before it was killed) wrote up to a step.

        Returns:
            What to tell of lines that are left out because they cannot be read.
        """
        earlier = MetricsFile(run_dir / self.path.name)
        rows, broken = earlier.read()
        with written_whole(self.path) as file:
            for row in rows:
                if row["optimizer_step"] <= optimizer_steps:
                    file.write((json.dumps(row) + "\n").encode())
        if not broken:
            return []
        numbers = ", ".join(map(str, broken[:5])) + (" ..." if len(broken) > 5 else "")
        return [
            f"{earlier.path}: {len(broken)} lines are no rows of metrics and are left out (line {numbers})"
        ]

    def begin(self) -> None:
        """Start with no row: those of an attempt that left no checkpoint are no part of this run."""
        self.path.unlink(missing_ok=True)


def _row(line: bytes) -> dict[str, Any] | None:
    """None for what is no row of metrics."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("optimizer_step"), int) else None


def make_tracker(logging: LoggingConfig, run_dir: Path, config: dict[str, Any]) -> Logger | None:
    """W&B or TensorBoard through TorchRL's loggers; None for `logging.backend=none`.

    W&B goes offline, and says so once, where `logging.mode=online` finds no key or no server within `REACH_S` seconds.
    """
    if logging.backend == "none":
        return None
    name = logging.experiment_name or run_dir.name
    if logging.backend != "wandb":
        return get_logger(logging.backend, logger_name=str(run_dir), experiment_name=name)
    if logging.mode == "online":
        import wandb  # a second

        try:
            return _wandb(logging, run_dir, name, config, offline=False)
        except wandb.Error as error:
            reason = str(error).splitlines()[0]
            said = (
                f"logging.mode=online: W&B cannot be used ({reason}), so the run is recorded offline. Send it later "
                f"with `wandb sync {run_dir}/wandb/offline-run-*`; `wandb login` or WANDB_API_KEY gives a key"
            )
            print(said, file=sys.stderr)
            log.info(said)
    return _wandb(logging, run_dir, name, config, offline=True)


def _wandb(logging: LoggingConfig, run_dir: Path, name: str, config: dict[str, Any], offline: bool) -> Logger:
    """Raises wandb.Error where there is no key or no answer."""
    import wandb

    options = {
        "project": logging.project,
        "offline": offline,
        "mode": "offline" if offline else "online",  # else that of the environment at its first start holds
        "config": config,
        "settings": wandb.Settings(init_timeout=REACH_S, login_timeout=REACH_S),
    }
    return get_logger("wandb", logger_name=str(run_dir), experiment_name=name, wandb_kwargs=options)


def close_tracker(tracker: Logger, outcome: RunOutcome) -> None:
    """End its run, so that the next one of a sweep is another; W&B shows a failed one as failed."""
    if isinstance(tracker, WandbLogger) and outcome == "failed":
        tracker.experiment.finish(exit_code=1)
    tracker.close()
