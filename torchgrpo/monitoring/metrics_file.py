"""`metrics.jsonl` of a run's folder: what is written to it and read from it. No torch."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.run_folder.files import written_whole


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
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and isinstance(row.get("optimizer_step"), int):
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
