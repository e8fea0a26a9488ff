"""Updates a run's HTML report in a subprocess, and writes the final report in-process.

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
from config.run_folder.atomic_files import remove_temporary_files
from config.run_folder.folders import REPORT

MIN_INTERVAL_RATIO = 50
"""Minimum interval between two reports during a run, as a multiple of the time that the last one took."""


class ReportWriter:
    """Writes the report of a run's folder.

    An error is logged and never stops the run.

    log: receives the message of an error.
    """

    def __init__(self, run_dir: Path, log: Callable[[str], None]) -> None:
        self.run_dir, self.log = run_dir, log
        self._writer: subprocess.Popen[bytes] | None = None
        self._start_time = 0.0

    def renew(self) -> None:
        """Writes the report in a separate process, unless the last one is too recent."""
        report = self.run_dir / REPORT
        took = report.stat().st_mtime - self._start_time if report.is_file() else 0.0
        due = time.time() - self._start_time > MIN_INTERVAL_RATIO * took
        if self._writer is not None and (self._writer.poll() is None or not due):
            return
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._start_time = time.time()
        try:
            self._writer = subprocess.Popen(
                [sys.executable, "-m", "torchgrpo.reports", str(self.run_dir)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # an error is logged at the end of the run
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            self._log_failure(error)

    def finish(self) -> None:
        """Writes the final report, once all files of the run are written."""
        if self._writer is not None:
            self._writer.kill()
            self._writer.wait()
            remove_temporary_files(self.run_dir)
        if not (self.run_dir / METRICS).is_file():
            return
        from torchgrpo.reports.report import write_report

        try:
            write_report(self.run_dir)
        except Exception as error:
            self._log_failure(error)

    def _log_failure(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self.log(f"warning: {self.run_dir / REPORT} could not be written ({reason}); the run itself is not affected")
