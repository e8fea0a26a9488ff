"""A run's evaluations: tables with confidence intervals, and a paired test of first against last."""

import math
from typing import Any

import numpy as np

from torchgrpo.evaluation.statistics import paired_test
from torchgrpo.reports.curves import round_number
from torchgrpo.reports.ledger_columns import Columns
from torchgrpo.reports.run_folder import Row


def evaluation_tables(evaluations: list[Row]) -> list[dict[str, Any]]:
    """Returns a table for each evaluation set.

    A table is {"set", "names", "rows": [{"iteration", "step", "values": {name: [value, low, high]}}]}. low and
    high are the ends of the 95% interval over problems; None for a metric without an interval.
    """
    sets: dict[str, list[dict[str, Any]]] = {}
    for row in evaluations:
        metrics_of_sets: dict[str, dict[str, float]] = {}
        for key, value in row.items():
            if key.startswith("eval/") and isinstance(value, int | float) and math.isfinite(value):
                _, name, metric = key.split("/", 2)
                metrics_of_sets.setdefault(name, {})[metric] = value
        for name, metrics in metrics_of_sets.items():
            values = {key: _interval(metrics, key) for key in metrics if not key.endswith(("_low", "_high"))}
            sets.setdefault(name, []).append(
                {"iteration": row.get("iteration"), "step": row["optimizer_step"], "values": values}
            )
    return [{"set": name, "names": _names(rows), "rows": rows} for name, rows in sets.items()]


def _interval(metrics: dict[str, float], name: str) -> list[float | None]:
    ends = [metrics.get(f"{name}_low"), metrics.get(f"{name}_high")]
    return [round_number(metrics[name]), *(None if end is None else round_number(end) for end in ends)]


def _names(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the metric names of the rows.

    pass@k is included for powers of two and for the largest k only.
    """
    names = list(dict.fromkeys(name for row in rows for name in row["values"] if name != "seconds"))
    largest = max([int(name[5:]) for name in names if name.startswith("pass@")], default=1)
    shown = {f"pass@{k}" for k in (1, 2, 4, 8, 16, 32, 64, 128, 256, largest)}
    names = [name for name in names if not name.startswith("pass@") or name in shown]
    return sorted(names, key=lambda name: name in ("problems", "errors"))


def problem_success_rates(columns: Columns, name: str, iteration: int) -> dict[str, float]:
    """Returns the success rate of each problem in one evaluation, by prompt id.

    Completions without a score do not count.
    """
    groups = columns.groups
    means = columns.mean_of_groups("success", columns.has_score)
    mask = (groups["set"] == columns.sets.index(name)) & (groups["iteration"] == iteration) & np.isfinite(means)
    return {columns.prompts[groups["prompt"][index]]: float(means[index]) for index in np.flatnonzero(mask)}


def evaluation_iterations(columns: Columns, name: str) -> list[int]:
    """Returns the iterations with an evaluation of the set in the ledger."""
    if name not in columns.sets:
        return []
    mask = columns.groups["set"] == columns.sets.index(name)
    return [int(iteration) for iteration in np.unique(columns.groups["iteration"][mask])]


def compare_first_and_last(columns: Columns) -> list[dict[str, Any]]:
    """Compares the first and the last evaluation of each set by a paired test."""
    comparisons = []
    for name in columns.sets[1:]:
        iterations = evaluation_iterations(columns, name)
        if len(iterations) > 1:
            first, last = (problem_success_rates(columns, name, each) for each in (iterations[0], iterations[-1]))
            comparison = compare_success_rates(first, last)
            if comparison is not None:
                comparisons.append({"set": name, "from": iterations[0], "to": iterations[-1]} | comparison)
    return comparisons


def compare_success_rates(before: dict[str, float], after: dict[str, float]) -> dict[str, Any] | None:
    """Runs the paired test over common problems; None with fewer than two of them."""
    common = sorted(before.keys() & after.keys())
    if len(common) < 2:
        return None
    test = paired_test([before[each] for each in common], [after[each] for each in common])
    numbers = {"difference": test.difference, "low": test.low, "high": test.high, "p": test.p_value}
    result = {key: round_number(value) if math.isfinite(value) else None for key, value in numbers.items()}
    return result | {"summary": test.summary, "problems": len(common)}
