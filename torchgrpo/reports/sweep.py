"""The table and the page of a sweep: `summary.csv` and `report.html` in multirun/DATE/TIME/, one row a run."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.cli.saved_settings import METRICS
from config.run_folder.files import written_whole
from config.run_folder.folders import REPORT
from torchgrpo.reports.curves import layout
from torchgrpo.reports.document import document
from torchgrpo.reports.report import metric_names, told_of
from torchgrpo.reports.run_folder import RunFolder, overrides_of, summary_of

TABLE = "summary.csv"
COMPARED = (
    "reward/mean", "reward/accuracy", "reward/zero_variance_groups", "kl/ref", "kl/teacher", "ess", "entropy",
    "length/response_mean", "length/truncated", "grad_norm", "loss/objective", "throughput/tokens_per_s",
)  # fmt: skip
"""Metrics with a picture, beside the evaluations' pass@1."""


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep.

    name: of its folder. overrides: what its command line set, by key. run: None: it never began. summary: how it ended.
    """

    name: str
    overrides: dict[str, str]
    run: RunFolder | None
    summary: dict[str, Any]

    def results(self) -> dict[str, Any]:
        """Columns of the table beside the overrides, in their order; those without a value are missing."""
        failure = {"error": self.summary["error"]} if "error" in self.summary else {}
        if self.run is None:
            return {"outcome": self.summary.get("outcome", "did not begin")} | failure
        rewards = [float(row["reward/mean"]) for row in self.run.steps]
        found: dict[str, Any] = {
            "outcome": self.summary.get("outcome", "no summary: killed, or still running")
        }
        if rewards:
            found |= {"first_reward": rewards[0], "last_reward": rewards[-1], "best_reward": max(rewards)}
        *_, last = [{}, *self.run.evaluations]
        found |= {name: value for name, value in last.items() if str(name).endswith(("/pass@1", "/score"))}
        found["optimizer_steps"] = len(rewards)
        *_, last = [{}, *self.run.steps]  # whose time includes the parts before a resume
        clocks = (last.get("time/elapsed_s"), self.summary.get("wall_time_s"))
        known = [float(value) for value in clocks if value is not None]
        found["seconds"] = round(max(known), 3) if known else None
        return found | failure


def swept_runs(folder: Path) -> list[SweptRun]:
    """The runs of a sweep's folder, in the order of their numbers."""
    found = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    found = [path for path in found if (path / ".hydra").is_dir() or (path / METRICS).is_file()]
    runs = []
    for path in sorted(found, key=lambda path: (len(path.name), path.name)):
        pairs = [word.split("=", 1) for word in overrides_of(path) if "=" in word]
        overrides = {key.lstrip("+~"): value for key, value in pairs}
        run = RunFolder.read(path) if (path / METRICS).is_file() else None
        runs.append(SweptRun(path.name, overrides, run, summary_of(path)))
    return runs


def columns(runs: list[SweptRun]) -> tuple[list[str], list[str]]:
    """Names of the overrides and of the results that any run has, in the order in which they come."""
    overrides = dict.fromkeys(key for run in runs for key in run.overrides)
    results = dict.fromkeys(key for run in runs for key in run.results())
    return list(overrides), list(results)


def sweep_page(folder: Path, runs: list[SweptRun]) -> bytes:
    """The table, which can be sorted, and the curves of all runs over each other."""
    overrides, results = columns(runs)
    varied = [key for key in overrides if len({run.overrides.get(key) for run in runs}) > 1]
    begun = [run.run for run in runs if run.run is not None]
    curves = []
    for swept in runs:
        if swept.run is not None:
            told = told_of(swept.run, points=300) | {"name": swept.name, "settings": [], "marks": []}
            series = told["curves"]["series"]
            told["curves"]["series"] = {name: series[name] for name in series if name in COMPARED}
            curves.append(told)
    logged = [name for name in metric_names(begun) if name in COMPARED or name.endswith("/pass@1")]
    return document(
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
            "runs": curves,
            "layout": layout(logged),
        },
    )


def write_sweep(folder: Path) -> None:
    """Write what the runs in a sweep's folder came to: table and page; nothing where it holds none."""
    runs = swept_runs(folder)
    if not runs:
        return
    overrides, results = columns(runs)
    text = io.StringIO()
    names = dict.fromkeys(["run", *overrides, *results])  # a swept `run=eval` is no second column
    writer = csv.DictWriter(text, list(names), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(run.overrides | run.results() | {"run": run.name} for run in runs)
    for name, content in ((TABLE, text.getvalue().encode()), (REPORT, sweep_page(folder, runs))):
        with written_whole(folder / name) as file:
            file.write(content)
