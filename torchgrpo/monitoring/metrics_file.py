"""Writer and reader of `metrics.jsonl` in a run's folder. Imports no torch."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.run_folder.atomic_files import atomic_file
from config.schema.former_names import METRICS, with_new_names


@dataclass
class MetricsFile:
    """File of metrics: one JSON object per line, one line per optimizer step.

    Each line is flushed when it is written.
    """

    path: Path

    def append(self, row: dict[str, Any]) -> None:
        """Appends a row, or raises OSError and leaves the file unchanged."""
        size = self.path.stat().st_size if self.path.is_file() else 0
        try:
            with self.path.open("ab") as file:
                file.write((json.dumps(row) + "\n").encode())
        except OSError:
            os.truncate(self.path, size)
            raise

    def read_rows(self) -> list[dict[str, Any]]:
        """Returns all readable rows."""
        return self.read_rows_and_broken_lines()[0]

    def read_rows_and_broken_lines(self) -> tuple[list[dict[str, Any]], list[int]]:
        """Returns the rows, and the line numbers (from 1) of unreadable lines.

        A crash or a full disk may leave unreadable lines. A last line without a line end was being written and
        is not counted.
        """
        if not self.path.is_file():
            return [], []
        *lines, last = self.path.read_bytes().split(b"\n")
        rows, broken_lines = [], []
        for number, line in enumerate([*lines, last], start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and isinstance(row.get("optimizer_step"), int):
                rows.append(with_new_names(METRICS, row))
            elif number <= len(lines):
                broken_lines.append(number)
        return rows, broken_lines

    def copy_rows(self, run_dir: Path, optimizer_steps: int) -> list[str]:
        """Copies the rows up to an optimizer step from the metrics of `run_dir`.

        `run_dir` may be the folder of this file. Returns a message about unreadable lines, if there are any.
        """
        source = MetricsFile(run_dir / self.path.name)
        rows, broken_lines = source.read_rows_and_broken_lines()
        with atomic_file(self.path) as file:
            for row in rows:
                if row["optimizer_step"] <= optimizer_steps:
                    file.write((json.dumps(row) + "\n").encode())
        if not broken_lines:
            return []
        numbers = ", ".join(map(str, broken_lines[:5])) + (" ..." if len(broken_lines) > 5 else "")
        return [(f"{source.path}: {len(broken_lines)} lines are not rows of metrics and are left out (line {numbers})")]

    def clear(self) -> None:
        """Removes all rows, for example those of an attempt that left no checkpoint."""
        self.path.unlink(missing_ok=True)
