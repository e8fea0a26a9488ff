"""How length, age and reward were distributed in the first, the middle and the last third of a run."""

from typing import Any

import numpy as np

from torchgrpo.reports.columns import Columns

PARTS = ("first third", "middle third", "last third")
SHOWN = (
    ("length", "Length", "tokens"),
    ("age", "Age", "policy versions"),
    ("score", "Reward", "of a completion"),
)


def histograms(columns: Columns) -> list[dict[str, Any]]:
    """One for each of length, age, reward that there are values of: {"title", "unit", "edges", "parts": shares}.

    Of completions that were generated for training; the thirds are of iterations. A reward that could not be judged is
    not counted.
    """
    counted = columns.training & columns.judged
    iterations = columns.groups["iteration"][columns.completions["group"]]
    found = []
    for name, title, unit in SHOWN:
        values = columns.completions[name]
        kept = counted & np.isfinite(values)
        if not kept.any():
            continue
        values, iteration = values[kept], iterations[kept]
        low, high = float(values.min()), float(values.max())
        if np.all(values == np.round(values)):  # at most 40 bins, around whole numbers
            width = max(1, -(-int(high - low + 1) // 40))
            edges = np.arange(low, high + width + 1, width) - 0.5
        else:
            spread = (high - low) or 1.0
            edges = np.linspace(low - spread / 60, high + spread / 60, 32)
        thirds = np.array_split(np.arange(iteration.min(), iteration.max() + 1), len(PARTS))
        parts = []
        for part, third in zip(PARTS, thirds, strict=True):
            mine = values[np.isin(iteration, third)]
            if len(mine):
                counts, _ = np.histogram(mine, edges)
                shares = [round(float(share), 5) for share in counts / len(mine)]
                mean = round(float(mine.mean(dtype=np.float64)), 5)
                parts.append({"name": part, "shares": shares, "count": len(mine), "mean": mean})
        rounded = [round(float(edge), 5) for edge in edges]
        found.append({"title": title, "unit": unit, "edges": rounded, "parts": parts})
    return found
