"""Histograms of length, age and reward for each third of a run."""

from typing import Any

import numpy as np

from torchgrpo.reports.ledger_columns import Columns

THIRDS = ("first third", "middle third", "last third")
HISTOGRAMS = (("length", "Length", "tokens"), ("age", "Age", "policy versions"), ("score", "Reward", "per completion"))


def histogram_data(columns: Columns) -> list[dict[str, Any]]:
    """Returns the data of a histogram for each of length, age and reward with values.

    The data are {"title", "unit", "edges", "thirds": [{"name", "shares", "count", "mean"}]}. Only completions
    for training with a score count. The thirds are thirds of the iterations.
    """
    mask = columns.is_training & columns.has_score
    iterations = columns.groups["iteration"][columns.completions["group"]]
    results = []
    for name, title, unit in HISTOGRAMS:
        values = columns.completions[name]
        known = mask & np.isfinite(values)
        if not known.any():
            continue
        values, iteration = values[known], iterations[known]
        low, high = float(values.min()), float(values.max())
        if np.all(values == np.round(values)):  # at most 40 bins, centred at whole numbers
            width = max(1, -(-int(high - low + 1) // 40))
            edges = np.arange(low, high + width + 1, width) - 0.5
        else:
            spread = (high - low) or 1.0
            edges = np.linspace(low - spread / 60, high + spread / 60, 32)
        iterations_of_thirds = np.array_split(np.arange(iteration.min(), iteration.max() + 1), len(THIRDS))
        thirds = []
        for third, third_iterations in zip(THIRDS, iterations_of_thirds, strict=True):
            sample = values[np.isin(iteration, third_iterations)]
            if len(sample):
                counts, _ = np.histogram(sample, edges)
                shares = [round(float(share), 5) for share in counts / len(sample)]
                mean = round(float(sample.mean(dtype=np.float64)), 5)
                thirds.append({"name": third, "shares": shares, "count": len(sample), "mean": mean})
        rounded_edges = [round(float(edge), 5) for edge in edges]
        results.append({"title": title, "unit": unit, "edges": rounded_edges, "thirds": thirds})
    return results
