"""The evaluations of a run as a table with intervals, and what a paired test says of the first and the last."""

import math
from typing import Any

import numpy as np

from torchgrpo.evaluation.statistics import paired_test
from torchgrpo.reports.columns import Columns
from torchgrpo.reports.curves import rounded
from torchgrpo.reports.run_folder import Row


def evaluation_tables(evaluations: list[Row]) -> list[dict[str, Any]]:
    """One for each set: {"set", "names", "rows": [{"iteration", "step", "values": {name: [value, low, high]}}]}.

    low and high: ends of the 95% interval over problems; None where a metric has none.
    """
    sets: dict[str, list[dict[str, Any]]] = {}
    for row in evaluations:
        found: dict[str, dict[str, float]] = {}
        for key, value in row.items():
            if key.startswith("eval/") and isinstance(value, int | float) and math.isfinite(value):
                _, name, metric = key.split("/", 2)
                found.setdefault(name, {})[metric] = value
        for name, metrics in found.items():
            values = {key: _interval(metrics, key) for key in metrics if not key.endswith(("_low", "_high"))}
            sets.setdefault(name, []).append(
                {"iteration": row.get("iteration"), "step": row["optimizer_step"], "values": values}
            )
    return [{"set": name, "names": _names(rows), "rows": rows} for name, rows in sets.items()]


def _interval(metrics: dict[str, float], name: str) -> list[float | None]:
    ends = [metrics.get(f"{name}_low"), metrics.get(f"{name}_high")]
    return [rounded(metrics[name]), *(None if end is None else rounded(end) for end in ends)]


def _names(rows: list[dict[str, Any]]) -> list[str]:
    """pass@k at powers of two alone, where there are many."""
    names = list(dict.fromkeys(name for row in rows for name in row["values"] if name != "seconds"))
    largest = max([int(name[5:]) for name in names if name.startswith("pass@")], default=1)
    shown = {f"pass@{k}" for k in (1, 2, 4, 8, 16, 32, 64, 128, 256, largest)}
    names = [name for name in names if not name.startswith("pass@") or name in shown]
    return sorted(names, key=lambda name: name in ("problems", "errors"))


def success_of_problems(columns: Columns, name: str, iteration: int) -> dict[str, float]:
    """Of one evaluation, by prompt id: the mean success of the completions that could be judged."""
    groups = columns.groups
    means = columns.mean_of_groups("success", columns.judged)
    mine = (
        (groups["set"] == columns.sets.index(name)) & (groups["iteration"] == iteration) & np.isfinite(means)
    )
    return {columns.prompts[groups["prompt"][index]]: float(means[index]) for index in np.flatnonzero(mine)}


def evaluated_iterations(columns: Columns, name: str) -> list[int]:
    """Those after which the set of this name was evaluated, as far as the ledger still has them."""
    if name not in columns.sets:
        return []
    mine = columns.groups["set"] == columns.sets.index(name)
    return [int(iteration) for iteration in np.unique(columns.groups["iteration"][mine])]


def first_against_last(columns: Columns) -> list[dict[str, Any]]:
    """For each set that was evaluated twice: what the paired test says, in numbers and words."""
    found = []
    for name in columns.sets[1:]:
        iterations = evaluated_iterations(columns, name)
        if len(iterations) > 1:
            first, last = (
                success_of_problems(columns, name, each) for each in (iterations[0], iterations[-1])
            )
            told = compared(first, last)
            if told is not None:
                found.append({"set": name, "from": iterations[0], "to": iterations[-1]} | told)
    return found


def compared(before: dict[str, float], after: dict[str, float]) -> dict[str, Any] | None:
    """The paired test over the problems that both have; None where they share fewer than two."""
    shared = sorted(before.keys() & after.keys())
    if len(shared) < 2:
        return None
    test = paired_test([before[each] for each in shared], [after[each] for each in shared])
    numbers = {"difference": test.difference, "low": test.low, "high": test.high, "p": test.p_value}
    told = {key: rounded(value) if math.isfinite(value) else None for key, value in numbers.items()}
    return told | {"words": test.words, "problems": len(shared)}
