"""One job of a sweep: what it returns to the sweeper, and how it fails without ending the others."""

import json
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from config.cli.error_messages import readable
from config.run_folder.folders import SETTINGS, SUMMARY, save_settings
from config.schema.errors import INTERRUPTED, RunOutcome

LAST_STEPS = 10
"""Optimizer steps whose mean reward is the objective of a run without evaluations; one alone is mostly noise."""


def objective(run_dir: Path, metric: str | None) -> float | None:
    """The objective that a sweeper such as Optuna's maximises.

    At the last evaluation the value of `metric`, or else pass@1 of the first of `eval.sets`; without evaluations the
    mean reward of the last `LAST_STEPS` optimizer steps. None where nothing is there, or where it is no number.
    """
    summary = run_dir / SUMMARY
    if not summary.is_file():
        return None
    evaluation = json.loads(summary.read_text(encoding="utf-8")).get("evaluation") or {}
    chosen = [name for name in evaluation if name == metric or (metric is None and name.endswith("/pass@1"))]
    found = [float(evaluation[name]) for name in chosen[:1]]
    if not found:
        rows = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        found = [row["reward/mean"] for row in rows if "reward/mean" in row][-LAST_STEPS:]
    mean = math.fsum(found) / len(found) if found else math.nan
    return mean if math.isfinite(mean) else None


class JobFailed(Exception):
    """Why a job of a sweep failed. Hydra runs the others, and raises the first of these at the end."""


def run_in_sweep(run: Callable[[], RunOutcome], composed: DictConfig) -> float | None:
    """Run a job of a sweep, and return its objective.

    Raises:
        JobFailed: it failed, which has been told.
    """
    chosen = HydraConfig.get()
    run_dir = Path(chosen.runtime.output_dir)
    try:
        outcome = run()
    except SystemExit as ended:
        if ended.code != INTERRUPTED:
            why = readable(ended.__cause__) if ended.__cause__ else f"exit code {ended.code}"
            raise _failed(run_dir, composed, why) from None
        outcome = "interrupted"
    except Exception as error:
        traceback.print_exc()
        raise _failed(run_dir, composed, f"{type(error).__name__}: {error}") from None
    if outcome == "finished":
        return objective(run_dir, composed.train.keep_best)
    if chosen.runtime.choices["hydra/launcher"] == "basic":  # another launcher's process has others to serve
        print("the sweep ends here; its other runs have not begun", file=sys.stderr)
        sys.exit(INTERRUPTED)
    raise JobFailed(f"{run_dir} was interrupted")


def _failed(run_dir: Path, composed: DictConfig, why: str) -> JobFailed:
    """Note for the sweep's page a job that failed before it began.

    An earlier run in its folder stays as it is.
    """
    if not (run_dir / SETTINGS).exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        save_settings(run_dir, composed, HydraConfig.get())
        summary = json.dumps({"outcome": "failed", "error": why})
        (run_dir / SUMMARY).write_text(summary, encoding="utf-8")
    return JobFailed(f"{run_dir} failed: {why}")
