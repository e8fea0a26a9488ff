"""One job of a sweep: what it returns to the sweeper, and how it fails without ending the others."""

import json
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from config.error_messages import readable
from config.files import written_whole
from config.folders import SETTINGS, SETTINGS_FILES, SUMMARY, remove_if_unused, save_settings
from config.run_outcome import INTERRUPTED, RunOutcome

STOPPED = ".stopped"
"""In a sweep's folder: no other job of it is to begin."""
BEGUN = ".begun"
"""In a sweep's folder, lines of JSON: `name` of each job that it has begun, not of those of earlier sweeps.

Another line holds `overrides` and `refused`, why, where a job found an earlier run in its folder and left it as it was.
"""
ENDS_HERE = "the sweep ends here; its other runs have not begun"
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


def run_in_sweep(run: Callable[[], RunOutcome], composed: DictConfig) -> float | None:
    """`run`, the job, as one of a sweep.

    Returns:
        The objective; None where it failed or was interrupted. Hydra's Optuna sweeper takes None for a failed trial
        and goes on, where an exception or NaN would end the study.
    """
    chosen = HydraConfig.get()
    run_dir = Path(chosen.runtime.output_dir)
    if (Path(chosen.sweep.dir) / STOPPED).exists():
        remove_if_unused(run_dir)
        return None
    _note(name=run_dir.name)
    before = _settings_written(run_dir)
    try:
        outcome = run()
    except SystemExit as ended:
        if ended.code != INTERRUPTED:
            cause = ended.__cause__
            why = readable(cause) if cause else f"exit code {ended.code}"
            _note_failure(run_dir, composed, why, before)
            return None
        outcome = "interrupted"
    except Exception as error:
        traceback.print_exc()
        _note_failure(run_dir, composed, f"{type(error).__name__}: {error}", before)
        return None
    if outcome == "finished":
        return objective(run_dir, composed.train.keep_best)
    if chosen.runtime.choices["hydra/launcher"] == "basic":  # another launcher's process has others to serve
        print(ENDS_HERE, file=sys.stderr)
        sys.exit(INTERRUPTED)
    return None


def _note(**told: Any) -> None:
    with (Path(HydraConfig.get().sweep.dir) / BEGUN).open("a", encoding="utf-8") as file:
        file.write(json.dumps(told) + "\n")


def _settings_written(run_dir: Path) -> int | None:
    """When, in nanoseconds; a run writes them as it begins."""
    path = run_dir / SETTINGS / SETTINGS_FILES[0]
    return path.stat().st_mtime_ns if path.is_file() else None


def _note_failure(run_dir: Path, composed: DictConfig, why: str, before: int | None) -> None:
    """Write settings and summary of a failed run for the sweep's table.

    A run that had not begun leaves what an earlier run wrote there.

    before: when the settings in the folder were written, as the job started.
    """
    if (run_dir / "metrics.jsonl").is_file() and _settings_written(run_dir) == before:
        _note(name=run_dir.name, overrides=list(HydraConfig.get().overrides.task), refused=why)
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    save_settings(run_dir, composed, HydraConfig.get())
    path = run_dir / SUMMARY
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    with written_whole(path) as file:
        file.write((json.dumps({**summary, "outcome": "failed", "error": why}, indent=2) + "\n").encode())
