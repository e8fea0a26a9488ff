"""Job `run=report`: writes the report of a run, several runs, or a sweep.

`run_dir=RUN` names the folder, or the folders.
"""

from pathlib import Path
from typing import Any

from config.cli.saved_settings import METRICS, chosen_runs
from config.run_folder.folders import REPORT, remove_unused_folder
from config.schema.config import Config
from config.schema.errors import ConfigError, RunOutcome
from torchgrpo.reports.report import COMPARISON_PAGE, write_comparison, write_report
from torchgrpo.reports.sweep_report import read_sweep_runs, write_sweep
from torchgrpo.run.job import Job


def run(job: Job[Any]) -> RunOutcome:
    remove_unused_folder(job.run_dir)
    print(report(job.config), flush=True)
    return "finished"


def report(config: Config) -> str:
    """Writes the report of a run, several runs or a sweep, and returns its path.

    Raises:
        ConfigError: `run_dir` names no run, or one whose folder cannot be written.
    """
    run_dirs = config.run_dir
    try:
        if isinstance(run_dirs, str) and not (Path(run_dirs) / METRICS).is_file() and Path(run_dirs).is_dir():
            folder = Path(run_dirs)
            if read_sweep_runs(folder):
                write_sweep(folder)
                return f"{folder / REPORT}"
        runs = chosen_runs(run_dirs)
        if len(runs) == 1:
            return f"{write_report(runs[0])}"
        return f"{write_comparison(runs, runs[0] / COMPARISON_PAGE)}"
    except OSError as error:
        raise ConfigError(
            f"run_dir={config.run_dir}: the report cannot be written ({error.filename}: {error.strerror}); "
            "copy the runs to a writable folder"
        ) from error
