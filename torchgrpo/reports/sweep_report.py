"""Writes the table and the page of a sweep, with one row per run.

The files are `summary.csv` and `report.html` in multirun/DATE/TIME/.
"""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.cli.saved_settings import METRICS
from config.run_folder.atomic_files import atomic_file
from config.run_folder.folders import REPORT
from torchgrpo.reports.curves import chart_layout
from torchgrpo.reports.html_page import render_page
from torchgrpo.reports.report import metric_names, run_data
from torchgrpo.reports.run_folder import RunFolder, read_overrides, read_summary

TABLE_FILE = "summary.csv"
COMPARED_METRICS = (
    "reward/mean", "reward/accuracy", "reward/zero_variance_groups", "kl/ref", "kl/teacher", "ess", "entropy",
    "length/response_mean", "length/truncated", "grad_norm", "loss/objective", "throughput/tokens_per_s",
)  # fmt: skip
"""Metrics with a chart on the page, in addition to pass@1 of the evaluations."""


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    name: name of the run's folder. overrides: settings of the command line, by key. run: None if the run never
    started. summary: content of summary.json.
    """

    name: str
    overrides: dict[str, str]
    run: RunFolder | None
    summary: dict[str, Any]

    def results(self) -> dict[str, Any]:
        """Returns the columns of the table after the overrides, in order.

        Columns without a value are missing.
        """
        failure = {"error": self.summary["error"]} if "error" in self.summary else {}
        if self.run is None:
            return {"outcome": self.summary.get("outcome", "did not start")} | failure
        rewards = [float(row["reward/mean"]) for row in self.run.steps]
        results: dict[str, Any] = {"outcome": self.summary.get("outcome", "no summary: killed, or still running")}
        if rewards:
            results |= {"first_reward": rewards[0], "last_reward": rewards[-1], "best_reward": max(rewards)}
        *_, last = [{}, *self.run.evaluations]
        results |= {name: value for name, value in last.items() if str(name).endswith(("/pass@1", "/score"))}
        results["optimizer_steps"] = len(rewards)
        *_, last = [{}, *self.run.steps]  # elapsed_s includes the time before a resume
        clocks = (last.get("time/elapsed_s"), self.summary.get("wall_time_s"))
        known = [float(value) for value in clocks if value is not None]
        results["seconds"] = round(max(known), 3) if known else None
        return results | failure


def read_sweep_runs(folder: Path) -> list[SweepRun]:
    """Reads the runs of a sweep's folder, in the order of their numbers."""
    folders = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    folders = [path for path in folders if (path / ".hydra").is_dir() or (path / METRICS).is_file()]
    runs = []
    for path in sorted(folders, key=lambda path: (len(path.name), path.name)):
        pairs = [word.split("=", 1) for word in read_overrides(path) if "=" in word]
        overrides = {key.lstrip("+~"): value for key, value in pairs}
        run = RunFolder.read(path) if (path / METRICS).is_file() else None
        runs.append(SweepRun(path.name, overrides, run, read_summary(path)))
    return runs


def table_columns(runs: list[SweepRun]) -> tuple[list[str], list[str]]:
    """Returns the names of all overrides and of all results, in order of appearance."""
    overrides = dict.fromkeys(key for run in runs for key in run.overrides)
    results = dict.fromkeys(key for run in runs for key in run.results())
    return list(overrides), list(results)


def sweep_page(folder: Path, runs: list[SweepRun]) -> bytes:
    """Returns the page with a sortable table and the curves of all runs."""
    overrides, results = table_columns(runs)
    varied = [key for key in overrides if len({run.overrides.get(key) for run in runs}) > 1]
    started_runs = [run.run for run in runs if run.run is not None]
    data_of_runs = []
    for swept in runs:
        if swept.run is not None:
            data = run_data(swept.run, points=300) | {"name": swept.name, "settings": [], "marks": []}
            series = data["curves"]["series"]
            data["curves"]["series"] = {name: series[name] for name in series if name in COMPARED_METRICS}
            data_of_runs.append(data)
    shown_metrics = [
        name for name in metric_names(started_runs) if name in COMPARED_METRICS or name.endswith("/pass@1")
    ]
    return render_page(
        f"GRPO sweep · {folder.name}",
        {
            "kind": "sweep",
            "name": "/".join(folder.resolve().parts[-2:]),
            "columns": varied,
            "common": [f"{key}={runs[0].overrides[key]}" for key in overrides if key not in varied],
            "results": results,
            "rows": [
                {
                    "run": run.name,
                    "overrides": run.overrides,
                    "results": run.results(),
                    "report": (folder / run.name / REPORT).is_file(),
                }
                for run in runs
            ],
            "runs": data_of_runs,
            "layout": chart_layout(shown_metrics),
        },
    )


def write_sweep(folder: Path) -> None:
    """Writes the table and the page of a sweep, if its folder has runs."""
    runs = read_sweep_runs(folder)
    if not runs:
        return
    overrides, results = table_columns(runs)
    text = io.StringIO()
    names = dict.fromkeys(["run", *overrides, *results])  # an override `run=eval` must not add a second column "run"
    writer = csv.DictWriter(text, list(names), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(run.overrides | run.results() | {"run": run.name} for run in runs)
    for name, content in ((TABLE_FILE, text.getvalue().encode()), (REPORT, sweep_page(folder, runs))):
        with atomic_file(folder / name) as file:
            file.write(content)
