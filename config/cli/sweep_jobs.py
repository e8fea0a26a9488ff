"""Runs one job of a sweep and returns its objective to Hydra's sweeper.

A failed job raises `JobFailed`, after which Hydra runs the other jobs.
"""

import json
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from config.cli.error_messages import user_message
from config.run_folder.folders import SETTINGS, SUMMARY, save_settings
from config.schema.errors import EXIT_INTERRUPTED, RunOutcome

LAST_STEPS = 10
"""Optimizer steps whose mean reward is the objective of a run without evaluations; one step is mostly noise."""


def objective(run_dir: Path, metric: str | None) -> float | None:
    """Returns the objective of a run that a sweeper such as Optuna's maximises.

    With evaluations: the value of `metric` at the last evaluation; with `metric` None, pass@1 of the first of
    `eval.sets`. Without evaluations: the mean reward of the last `LAST_STEPS` optimizer steps. None where the
    run has no such value, or the value is not finite.
    """
    summary = run_dir / SUMMARY
    if not summary.is_file():
        return None
    evaluation = json.loads(summary.read_text(encoding="utf-8")).get("evaluation") or {}
    names = [name for name in evaluation if name == metric or (metric is None and name.endswith("/pass@1"))]
    values = [float(evaluation[name]) for name in names[:1]]
    if not values:
        rows = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        values = [row["reward/mean"] for row in rows if "reward/mean" in row][-LAST_STEPS:]
    mean = math.fsum(values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else None


class JobFailed(Exception):
    """A failed job of a sweep.

    Hydra runs the other jobs and raises the first of these exceptions at the end.
    """


def run_sweep_job(run: Callable[[], RunOutcome], composed_config: DictConfig) -> float | None:
    """Runs a job of a sweep and returns its objective.

    Raises:
        JobFailed: the job failed; its error is already printed.
    """
    hydra_config = HydraConfig.get()
    run_dir = Path(hydra_config.runtime.output_dir)
    try:
        outcome = run()
    except SystemExit as exit_error:
        if exit_error.code != EXIT_INTERRUPTED:
            cause = exit_error.__cause__
            reason = user_message(cause) if cause else f"exit code {exit_error.code}"
            raise _job_failure(run_dir, composed_config, reason) from None
        outcome = "interrupted"
    except Exception as error:
        traceback.print_exc()
        raise _job_failure(run_dir, composed_config, f"{type(error).__name__}: {error}") from None
    if outcome == "finished":
        return objective(run_dir, composed_config.train.keep_best)
    if hydra_config.runtime.choices["hydra/launcher"] == "basic":  # other launchers share this process among jobs
        print("the sweep ends here; its other runs have not started", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    raise JobFailed(f"{run_dir} was interrupted")


def _job_failure(run_dir: Path, composed_config: DictConfig, reason: str) -> JobFailed:
    """Returns the exception of a failed job; records an unstarted job for the sweep's report.

    The folder of an earlier run is left unchanged.
    """
    if not (run_dir / SETTINGS).exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        save_settings(run_dir, composed_config, HydraConfig.get())
        summary = json.dumps({"outcome": "failed", "error": reason})
        (run_dir / SUMMARY).write_text(summary, encoding="utf-8")
    return JobFailed(f"{run_dir} failed: {reason}")
