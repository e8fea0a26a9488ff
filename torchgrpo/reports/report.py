"""`report.html` of one run, and the page that lays several runs over each other.

RUN/metrics.jsonl, events.jsonl, .hydra/ ──RunFolder──┐
RUN/rollouts/ ──columns_of, rollouts──────────────────┴─▶ report_data ─▶ document ─▶ RUN/report.html
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from config.cli.saved_settings import saved_config
from config.run_folder.files import written_whole
from config.run_folder.folders import REPORT
from config.schema.errors import ConfigError
from torchgrpo.monitoring.doctor import diagnose
from torchgrpo.monitoring.ledger_storage import ledger_files
from torchgrpo.reports.columns import columns_of, read_files
from torchgrpo.reports.curves import MOST_POINTS, curves, layout, rounded
from torchgrpo.reports.document import document
from torchgrpo.reports.evaluations import (
    compared,
    evaluated_iterations,
    evaluation_tables,
    first_against_last,
    success_of_problems,
)
from torchgrpo.reports.histograms import histograms
from torchgrpo.reports.pieces import pieces_of_run
from torchgrpo.reports.rollouts import rollouts
from torchgrpo.reports.run_folder import RunFolder
from torchgrpo.reports.selection import select, steps_of_groups
from torchgrpo.reports.timeline import marks, timeline

COMPARISON = "comparison.html"


def write_report(run_dir: Path) -> Path:
    """Make the report of a run anew, of whatever its folder holds by now.

    Raises:
        ConfigError: no run has written to the folder.
    """
    return _write(run_dir / REPORT, f"GRPO · {run_dir.resolve().name}", report_data(run_dir))


def write_comparison(run_dirs: Sequence[Path], path: Path) -> Path:
    """A page that lays the curves of several runs over each other, at `path`.

    It shows the settings that are not the same in all; the paired test is of the first run against each other one.

    Raises:
        ConfigError: one of the folders is no run's.
    """
    runs = [RunFolder.read(path) for path in run_dirs]
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    settings = [[key, *(run.settings.get(key) for run in runs)] for key in keys]
    first, *others = [columns_of(read_files(path)) for path in run_dirs]
    paired = []
    for number, other in enumerate(others, start=1):
        for name in first.sets[1:]:
            iterations = [evaluated_iterations(columns, name) for columns in (first, other)]
            if all(iterations):  # the last evaluation that each has
                before = success_of_problems(first, name, iterations[0][-1])
                told = compared(before, success_of_problems(other, name, iterations[1][-1]))
                if told is not None:
                    paired.append({"set": name, "run": number} | told)
    data = {
        "kind": "comparison",
        "runs": [told_of(run) for run in runs],
        "layout": layout(metric_names(runs)),
        "settings": [row for row in settings if any(value != row[1] for value in row[2:])],
        "evaluations": [evaluation_tables(run.evaluations) for run in runs],
        "paired": paired,
    }
    return _write(path, f"GRPO · {len(run_dirs)} runs", data)


def _write(path: Path, title: str, data: dict[str, Any]) -> Path:
    page = document(title, data)
    with written_whole(path) as file:
        file.write(page)
    return path


def report_data(run_dir: Path) -> dict[str, Any]:
    run = RunFolder.read(run_dir)
    files = read_files(run_dir)
    columns = columns_of(files)
    steps = steps_of_groups(columns, run.evaluations)
    chosen = select(columns, steps)
    pieces, no_pieces = pieces_of_run(run.settings)
    shown = rollouts(files, columns, steps, chosen, pieces, no_pieces)
    shown["files"] = [len(files), len(ledger_files(run_dir))]
    findings: dict[str, Any] = {"found": [], "unknown": ""}
    try:
        findings["found"] = [asdict(finding) for finding in diagnose(run_dir)]
    except ConfigError as error:  # settings of another version
        findings["unknown"] = str(error).splitlines()[0]
    return {
        "kind": "run",
        "run": told_of(run),
        "layout": layout(metric_names([run])),
        "evaluations": evaluation_tables(run.evaluations),
        "paired": first_against_last(columns),
        "histograms": histograms(columns),
        "timeline": timeline(run, columns),
        "findings": findings,
        "rollouts": shown,
    }


def told_of(run: RunFolder, points: int = MOST_POINTS) -> dict[str, Any]:
    """What the head, the curves and the settings of a page say of one run. points: of a curve at most."""
    *_, last = [{}, *run.steps]
    planned = None
    with suppress(ConfigError):  # settings of another version
        planned = saved_config(run.path).total_optimizer_steps
    return {
        "name": run.name,
        "command": run.command,
        "outcome": run.summary.get("outcome"),
        "model": run.settings.get("model.name"),
        "dataset": run.settings.get("env.dataset"),
        "steps": len(run.steps),
        "planned_steps": planned,
        "seconds": rounded(last.get("time/elapsed_s", run.summary.get("wall_time_s", 0.0))),
        "tokens": last.get("tokens/total"),
        "written": time.time(),
        "curves": curves(run.steps, run.evaluations, points),
        "marks": marks(run),
        "settings": [[key, value, default] for key, value, default in run.differences()],
    }


def metric_names(runs: Sequence[RunFolder]) -> list[str]:
    """Of all that any of the runs logged, in the order in which they came."""
    rows = [row for run in runs for row in (*run.steps, *run.evaluations)]
    return list(
        dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, int | float))
    )
