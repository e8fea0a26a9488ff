"""The job `run=report run_dir=RUN`: the page of a run, of several, or of a sweep."""

from pathlib import Path
from typing import Any

from config.cli.saved_settings import METRICS, chosen_runs
from config.run_folder.folders import REPORT, remove_if_unused
from config.schema.config import Config
from config.schema.errors import ConfigError, RunOutcome
from torchgrpo.reports.report import COMPARISON, write_comparison, write_report
from torchgrpo.reports.sweep import swept_runs, write_sweep
from torchgrpo.run.job import Job


def run(job: Job[Any]) -> RunOutcome:
    remove_if_unused(job.run_dir)
    print(report(job.config), flush=True)
    return "finished"


def report(config: Config) -> str:
    """The report of a run anew, a page of several runs, or of a sweep; the path, for a person.

    Raises:
        ConfigError: `run_dir` names no run, or one whose folder cannot be written.
    """
    given = config.run_dir
    try:
        if isinstance(given, str) and not (Path(given) / METRICS).is_file() and Path(given).is_dir():
            folder = Path(given)
            if swept_runs(folder):
                write_sweep(folder)
                return f"{folder / REPORT}"
        runs = chosen_runs(given)
        if len(runs) == 1:
            return f"{write_report(runs[0])}"
        return f"{write_comparison(runs, runs[0] / COMPARISON)}"
    except OSError as error:
        raise ConfigError(
            f"run_dir={config.run_dir}: the report cannot be written ({error.filename}: {error.strerror}); copy what "
            "it is about to a folder that can be"
        ) from error
