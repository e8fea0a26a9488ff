"""Writes `report.html` of one run, and a page that compares several runs.

RUN/metrics.jsonl, events.jsonl, .hydra/ ──RunFolder──┐
RUN/rollouts/ ──read_columns, rollout_data────────────┴─▶ build_report_data ─▶ render_page ─▶ RUN/report.html
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from config.cli.saved_settings import saved_config
from config.run_folder.atomic_files import atomic_file
from config.run_folder.folders import REPORT
from config.schema.errors import ConfigError
from torchgrpo.monitoring.diagnostics import diagnose
from torchgrpo.monitoring.ledger_storage import ledger_files
from torchgrpo.reports.completion_selection import group_steps, select_completions
from torchgrpo.reports.curves import MAX_POINTS, chart_layout, curve_data, round_number
from torchgrpo.reports.evaluations import (
    compare_first_and_last,
    compare_success_rates,
    evaluation_iterations,
    evaluation_tables,
    problem_success_rates,
)
from torchgrpo.reports.histograms import histogram_data
from torchgrpo.reports.html_page import render_page
from torchgrpo.reports.ledger_columns import read_columns, select_ledger_files
from torchgrpo.reports.rollouts import rollout_data
from torchgrpo.reports.run_folder import RunFolder
from torchgrpo.reports.timeline import event_marks, timeline_data
from torchgrpo.reports.token_strings import make_token_decoder

COMPARISON_PAGE = "comparison.html"


def write_report(run_dir: Path) -> Path:
    """Writes the report of a run from the present files of its folder.

    Raises:
        ConfigError: the folder has no metrics of a run.
    """
    return _write_page(run_dir / REPORT, f"GRPO · {run_dir.resolve().name}", build_report_data(run_dir))


def write_comparison(run_dirs: Sequence[Path], path: Path) -> Path:
    """Writes a page at `path` that compares the curves of several runs.

    The page shows the settings that differ. The paired tests compare the first run with each other run.

    Raises:
        ConfigError: one of the folders has no metrics of a run.
    """
    runs = [RunFolder.read(path) for path in run_dirs]
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    settings = [[key, *(run.settings.get(key) for run in runs)] for key in keys]
    first, *others = [read_columns(select_ledger_files(path)) for path in run_dirs]
    paired = []
    for number, other in enumerate(others, start=1):
        for name in first.sets[1:]:
            iterations = [evaluation_iterations(columns, name) for columns in (first, other)]
            if all(iterations):  # compare the last evaluation of each
                before = problem_success_rates(first, name, iterations[0][-1])
                comparison = compare_success_rates(before, problem_success_rates(other, name, iterations[1][-1]))
                if comparison is not None:
                    paired.append({"set": name, "run": number} | comparison)
    data = {
        "kind": "comparison",
        "runs": [run_data(run) for run in runs],
        "layout": chart_layout(metric_names(runs)),
        "settings": [row for row in settings if any(value != row[1] for value in row[2:])],
        "evaluations": [evaluation_tables(run.evaluations) for run in runs],
        "paired": paired,
    }
    return _write_page(path, f"GRPO · {len(run_dirs)} runs", data)


def _write_page(path: Path, title: str, data: dict[str, Any]) -> Path:
    page = render_page(title, data)
    with atomic_file(path) as file:
        file.write(page)
    return path


def build_report_data(run_dir: Path) -> dict[str, Any]:
    """Returns the data of a run's report page."""
    run = RunFolder.read(run_dir)
    files = select_ledger_files(run_dir)
    columns = read_columns(files)
    steps = group_steps(columns, run.evaluations)
    selection = select_completions(columns, steps)
    token_decoder, missing_decoder_reason = make_token_decoder(run.settings)
    rollouts = rollout_data(files, columns, steps, selection, token_decoder, missing_decoder_reason)
    rollouts["files"] = [len(files), len(ledger_files(run_dir))]
    findings: dict[str, Any] = {"findings": [], "error": ""}
    try:
        findings["findings"] = [asdict(finding) for finding in diagnose(run_dir)]
    except ConfigError as error:  # the settings are of another version
        findings["error"] = str(error).splitlines()[0]
    return {
        "kind": "run",
        "run": run_data(run),
        "layout": chart_layout(metric_names([run])),
        "evaluations": evaluation_tables(run.evaluations),
        "paired": compare_first_and_last(columns),
        "histograms": histogram_data(columns),
        "timeline": timeline_data(run, columns),
        "findings": findings,
        "rollouts": rollouts,
    }


def run_data(run: RunFolder, points: int = MAX_POINTS) -> dict[str, Any]:
    """Returns the data of one run for head, curves and settings of a page.

    points: maximum points of a curve.
    """
    *_, last = [{}, *run.steps]
    planned_steps = None
    with suppress(ConfigError):  # the settings may be of another version
        planned_steps = saved_config(run.path).total_optimizer_steps
    return {
        "name": run.name,
        "command": run.command,
        "outcome": run.summary.get("outcome"),
        "model": run.settings.get("model.name"),
        "dataset": run.settings.get("env.dataset"),
        "steps": len(run.steps),
        "planned_steps": planned_steps,
        "seconds": round_number(last.get("time/elapsed_s", run.summary.get("wall_time_s", 0.0))),
        "tokens": last.get("tokens/total"),
        "written_at": time.time(),
        "curves": curve_data(run.steps, run.evaluations, points),
        "marks": event_marks(run),
        "settings": [[key, value, default] for key, value, default in run.changed_settings()],
    }


def metric_names(runs: Sequence[RunFolder]) -> list[str]:
    """Returns the names of the metrics that any run logged, in order of appearance."""
    rows = [row for run in runs for row in (*run.steps, *run.evaluations)]
    return list(dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, int | float)))
