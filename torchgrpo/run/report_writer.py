"""Writes the report of a run, beside it and at its end.

evaluation ─▶ ReportWriter.renew ─▶ a process of its own, at the lowest priority ─▶ RUN/report.html
end        ─▶ ReportWriter.finish ─▶ in this process                             ─▶ RUN/report.html
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from config.cli.saved_settings import METRICS
from config.run_folder.files import remove_unfinished
from config.run_folder.folders import REPORT

SPARING = 50
"""A report that took s seconds is not made again within 50 s seconds: 2% of one core at most."""


class ReportWriter:
    """Writes the report of the run that works in a folder. It never stops the run: `say` is told what failed."""

    def __init__(self, run_dir: Path, say: Callable[[str], None]) -> None:
        self.run_dir, self.say = run_dir, say
        self._writer: subprocess.Popen[bytes] | None = None
        self._begun = 0.0

    def renew(self) -> None:
        """After an evaluation: make the report beside the run, where the last one is long enough ago."""
        report = self.run_dir / REPORT
        took = report.stat().st_mtime - self._begun if report.is_file() else 0.0
        due = time.time() - self._begun > SPARING * took
        if self._writer is not None and (self._writer.poll() is None or not due):
            return
        place = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([place, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._begun = time.time()
        try:
            self._writer = subprocess.Popen(
                [sys.executable, "-m", "torchgrpo.reports", str(self.run_dir)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what is wrong is told at the end of the run
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            self._failed(error)

    def finish(self) -> None:
        """The end of the run, when all its files are written."""
        if self._writer is not None:
            self._writer.kill()
            self._writer.wait()
            remove_unfinished(self.run_dir)
        if not (self.run_dir / METRICS).is_file():
            return
        from torchgrpo.reports.report import write_report

        try:
            write_report(self.run_dir)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        self.say(
            f"warning: {self.run_dir / REPORT} could not be written ({why}); nothing else is touched by that"
        )
